// Collectives of mode "mask", for rows of packet size (`mended.cuh`).
#include "mended.cuh"

template <bool kIsPlaced>
DEVICE void masked(const MaskedParams& m) {
  __shared__ Meeting s;
  __shared__ Settling z;
  wait_previous_kernel();
  make_masked<kIsPlaced>(m, s, z);
}

namespace epee {

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_masked_reduced(const __grid_constant__ MaskedParams m) {
  masked<false>(m);
}

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_masked_placed(const __grid_constant__ MaskedParams m) {
  masked<true>(m);
}

}  // namespace epee
