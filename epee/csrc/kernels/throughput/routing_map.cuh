// Routing that is given as a map of tokens and experts: as top-k ids with their weights, and weights back into a map.
//
// Local: no peers, no waits. A warp takes a token at a time. Results are written whole, so they need not be cleared;
// a block writes two numbers of its own, which their reader adds up.
#pragma once
#include "../../common/work.cuh"
#include "../../ptx/memory.cuh"

constexpr int kLoadsAtOnce = 8;  // of a lane

/// Finds the experts of a token in ascending order, writes the first `num_topk` with their weights, then -1 and 0.
/// Returns how many there are. All lanes of a warp.
DEVICE i32 find_experts(const MapParams& p, i64 token) {
  const u8* chosen = reinterpret_cast<const u8*>(p.routing_map) + token * p.num_experts;
  const float* probs = reinterpret_cast<const float*>(p.probs) + token * p.num_experts;
  i64* ids = reinterpret_cast<i64*>(p.topk_idx) + token * p.num_topk;
  float* weights = reinterpret_cast<float*>(p.topk_weights) + token * p.num_topk;
  i32 found = 0;
#pragma unroll 1
  for (int first = lane_idx(); first - lane_idx() < p.num_experts; first += 32 * kLoadsAtOnce) {
    bool is_in[kLoadsAtOnce];
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      const int expert = first + 32 * i;
      is_in[i] = expert < p.num_experts && chosen[expert] != 0;
    }
#pragma unroll
    for (int i = 0; i < kLoadsAtOnce; ++i) {
      const u32 all = __ballot_sync(~0u, is_in[i]);
      const i32 at = found + __popc(all & lanes_below());
      found += __popc(all);
      if (!is_in[i] || at >= p.num_topk) continue;
      const int expert = first + 32 * i;
      ids[at] = expert;
      if (p.probs) weights[at] = probs[expert];
    }
  }
#pragma unroll 1
  for (int at = found + lane_idx(); at < p.num_topk; at += 32) {
    ids[at] = -1;
    if (p.probs) weights[at] = 0;
  }
  return found;
}

namespace epee {

__global__ void __launch_bounds__(1024, 1) layout_topk_of_map(const __grid_constant__ MapParams p) {
  i32* most_of = reinterpret_cast<i32*>(dynamic_shared());
  const int num_warps = static_cast<int>(blockDim.x / 32);
  i32* left_out_of = most_of + num_warps;
  const int first = static_cast<int>(blockIdx.x) * num_warps + warp_idx();
  i32 most = 0, left_out = 0;
#pragma unroll 1
  for (int token = first; token < p.num_tokens; token += static_cast<int>(gridDim.x) * num_warps) {
    const i32 found = find_experts(p, token);
    most = max(most, found);
    left_out += max(0, found - p.num_topk);
  }
  if (lane_idx() == 0) {
    most_of[warp_idx()] = most;
    left_out_of[warp_idx()] = left_out;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  i32* counts = reinterpret_cast<i32*>(p.counts) + 2 * blockIdx.x;
  for (int warp = 1; warp < num_warps; ++warp) {
    most = max(most, most_of[warp]);
    left_out += left_out_of[warp];
  }
  counts[0] = most;
  counts[1] = left_out;
}

__global__ void __launch_bounds__(1024, 1) layout_map_of_topk(const __grid_constant__ DenseParams p) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int first = static_cast<int>(blockIdx.x) * num_warps + warp_idx();
#pragma unroll 1
  for (i64 token = first; token < p.num_tokens; token += static_cast<i64>(gridDim.x) * num_warps) {
    float* row = reinterpret_cast<float*>(p.dense) + token * p.num_experts;
    for (int expert = lane_idx(); expert < p.num_experts; expert += 32) row[expert] = 0;
    __syncwarp();
    for (int k = lane_idx(); k < p.num_topk; k += 32) {
      const i64 id = reinterpret_cast<const i64*>(p.topk_idx)[token * p.num_topk + k];
      if (id >= 0 && id < p.num_experts)
        row[id] = reinterpret_cast<const float*>(p.topk_weights)[token * p.num_topk + k];
    }
  }
}

}  // namespace epee
