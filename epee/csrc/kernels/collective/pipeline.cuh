// Large collectives, from and to memory that only this rank has mapped: through slots (`slots.cuh`).
#include "slots.cuh"

template <bool kIsPlaced>
DEVICE void pipeline(const CollectiveParams& p) {
  __shared__ Meeting s;
  __shared__ Cut c;
  __shared__ Outbox box;
  open_outbox(box);
  wait_previous_kernel();
  if (open_call(p.call, s, 0)) move_in_chunks<kIsPlaced>(p, s, c, &box);
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_reduced(const __grid_constant__ CollectiveParams p) {
  pipeline<false>(p);
}

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_placed(const __grid_constant__ CollectiveParams p) {
  pipeline<true>(p);
}

}  // namespace epee
