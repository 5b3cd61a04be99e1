// Where one rank's tokens go, for callers that want to know before they dispatch (DeepEP's `get_dispatch_layout`).
//
// Local: no peers, no waits for anything but this grid, which is one cluster. A lane looks at one (token, k) slot, a
// token has `lanes_per_token` neighbouring lanes, a power of two that is not below num_topk and num_ranks. Each block
// counts in shared memory (experts, then ranks); after a barrier of the cluster the blocks add up what all have, a part
// each. So the sums are exact without memory that somebody would have to clear, and launches share nothing.
//
// Ids that do not exist count nowhere: a dispatch reports them.
#pragma once
#include "../../common/experts.cuh"
#include "../../common/work.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/memory.cuh"

constexpr int kAtOnce = 4;  // steps whose loads are under way together

/// Counts the tokens from `first` on, `32 / lanes_per_token` at a time, each time `stride` behind the last, and says to
/// which ranks they go. All threads. `Id` is the type of the ids.
template <class Id>
DEVICE void count_tokens(const CountParams& p, Vec16* table, i32* counters, int first, int stride) {
  const int k = lane_idx() % p.lanes_per_token;  // a lane speaks for rank k as well
  const int token = first + lane_idx() / p.lanes_per_token;
  u8* is_token_in_rank = reinterpret_cast<u8*>(p.is_token_in_rank);
  i32 num_in_rank = 0;
  int step = 0;
#pragma unroll 1
  do {
    Id id[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const i64 at = static_cast<i64>(token) + step + i * stride;
      id[i] = -1;
      if (at < p.num_tokens && k < p.num_topk) id[i] = reinterpret_cast<const Id*>(p.topk_idx)[at * p.num_topk + k];
    }
    if (step == 0) {
      stage_experts(table, p.experts, p.num_experts);  // its loads are under way with those before
      __syncthreads();                                 // the counters are zero, and the table is there
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = physical_expert(table, id[i], p.num_experts, -1);
      u32 ranks = 0;
      if (expert >= 0) {
        red_add_shared(counters + id[i], 1);
        ranks = 1u << owner_of(expert, p.num_local_experts);
      }
      for (int distance = p.lanes_per_token / 2; distance; distance /= 2)
        ranks |= __shfl_xor_sync(~0u, ranks, distance);
      const i64 at = static_cast<i64>(token) + step + i * stride;
      if (at < p.num_tokens && k < p.num_ranks) {
        is_token_in_rank[at * p.num_ranks + k] = ranks >> k & 1;
        num_in_rank += static_cast<i32>(ranks >> k & 1);
      }
    }
    step += kAtOnce * stride;
  } while (step < p.num_tokens - first);
  if (num_in_rank) red_add_shared(counters + p.num_experts + k, num_in_rank);
}

/// Adds up what all blocks have counted. All threads of all blocks, between two meetings of the cluster.
DEVICE void add_blocks(const CountParams& p, const i32* counters, int num_counters) {
  const Range mine = piece(num_counters, kCountBlocks, static_cast<int>(blockIdx.x));
#pragma unroll 1
  for (int i = mine.begin + static_cast<int>(threadIdx.x); i < mine.end; i += static_cast<int>(blockDim.x)) {
    i32 sum = 0;
#pragma unroll
    for (u32 b = 0; b < kCountBlocks; ++b) sum += ld_shared_of(counters + i, b);
    i32* out = i < p.num_experts ? reinterpret_cast<i32*>(p.num_tokens_per_expert) + i
                                 : reinterpret_cast<i32*>(p.num_tokens_per_rank) + (i - p.num_experts);
    *out = sum;
  }
}

namespace epee {

__global__ void __cluster_dims__(kCountBlocks, 1, 1) __launch_bounds__(1024, 1)
    layout_count(const __grid_constant__ CountParams p) {
  Vec16* table = reinterpret_cast<Vec16*>(dynamic_shared());
  i32* counters = reinterpret_cast<i32*>(table + (p.num_experts + kExpertsOfVec - 1) / kExpertsOfVec);
  const int num_counters = p.num_experts + p.num_ranks;
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) counters[i] = 0;
  const int tokens_per_warp = 32 / p.lanes_per_token;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(blockIdx.x) * num_warps + warp_idx();
  const int first = warp * tokens_per_warp, stride = kCountBlocks * num_warps * tokens_per_warp;
  if (p.is_i32)
    count_tokens<i32>(p, table, counters, first, stride);
  else
    count_tokens<i64>(p, table, counters, first, stride);
  cluster_barrier();
  add_blocks(p, counters, num_counters);
  cluster_leave();
}

}  // namespace epee
