// A bias in the sums of a combine.
#pragma once
#include "../../common/lanes.cuh"

/// The elements of a bias that belong to the 16 bytes of payload at byte `at` of the output.
template <int kPayload>
DEVICE Lanes<kPayload> load_bias(const CombineParams& p, u64 bias, i64 at) {
  const u8* from = reinterpret_cast<const u8*>(bias);
  if (kPayload == kF32 || !p.is_bias_f32) return unpack<kPayload>(ld_vec16(from + at));
  Lanes<kPayload> r;
  const Vec16 low = ld_vec16(from + 2 * at);
  const Vec16 high = ld_vec16(from + 2 * at + 16);
#pragma unroll
  for (int i = 0; i < Lanes<kPayload>::kCount; ++i)
    r.value[i] = __uint_as_float(i < 4 ? low.word[i % 4] : high.word[i % 4]);
  return r;
}
