// Where every row goes: counts, prefix sums, and the exchange of counts between ranks (exchange.cuh).
//
// Blocks cut the tokens into contiguous pieces, warps cut a block's piece again. Counter i < num_experts counts the
// (token, k) slots of expert i, counter num_experts + d the tokens that go to rank d, the last one bad expert ids.
//   1. every warp counts its tokens; a scan over warps and (after a grid barrier) over blocks turns counts into the
//      number of earlier entries;
//   2. the last block sends header and totals to all ranks;
//   3. every warp walks its tokens again and writes each entry's place among this rank's entries;
//   4. the last block collects the numbers of all ranks, checks them, writes the matrix of counts, the grants and what
//      the host waits for.
// A cached call (`do_count == 0`) exchanges headers only: it needs the receivers' grants all the same.
#pragma once
#include "entries.cuh"
#include "exchange.cuh"

/// Step 1: this warp's counts, in shared memory of its own. Keeps the experts in `kept` for step 3.
DEVICE void count_entries(const LayoutParams& p, u64 tag, u32 active, Range tokens, i32* counters, i32* kept) {
  const int step = 32 / p.lanes_per_token;
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += step)
    kept[(first - tokens.begin) / step * 32 + lane_idx()] =
        read_entries(p, tag, active, first, tokens.end, counters).expert;
}

/// Turns the warps' counts into the number of entries in earlier warps of the block, and leaves the block's sums in
/// row `num_warps`. All threads.
DEVICE void scan_warps(i32* counters, int num_counters, int num_warps) {
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) {
    i32 sum = 0;
#pragma unroll 4
    for (int w = 0; w < num_warps; ++w) {
      const i32 count = counters[w * num_counters + i];
      counters[w * num_counters + i] = sum;
      sum += count;
    }
    counters[num_warps * num_counters + i] = sum;
  }
  __syncthreads();
}

/// Adds the entries of earlier blocks; afterwards row `num_warps` of the last block holds the rank's totals.
DEVICE void add_earlier_blocks(const LayoutParams& p, u64 tag, i32* counters, int num_counters, int num_warps) {
  i32* scratch = reinterpret_cast<i32*>(control_at(p.call, p.call.rank, kControlScratchOffset));
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x))
    scratch[blockIdx.x * kCountsRowWords + i] = counters[num_warps * num_counters + i];
  grid_barrier(p.call, tag, kControlGridOffset, kControlGateOffset);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) {
    i32 sum = 0;
#pragma unroll
    for (int b = 0; b < kMaxLayoutBlocks - 1; ++b)  // a fixed bound, so that all loads are under way at once
      sum += b < static_cast<int>(blockIdx.x) ? ld_relaxed_sys(scratch + b * kCountsRowWords + i) : 0;
    for (int w = 0; w <= num_warps; ++w) counters[w * num_counters + i] += sum;
  }
  __syncthreads();
}

/// Step 3: each entry's place among this rank's entries, in (token, k) order.
DEVICE void assign_places(const LayoutParams& p, u32 active, Range tokens, i32* counters, const i32* kept) {
  const int step = 32 / p.lanes_per_token;
  i32* send_prefix = reinterpret_cast<i32*>(p.send_prefix);
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += step) {
    const Entry entry = make_entry(p, active, first, tokens.end, kept[(first - tokens.begin) / step * 32 + lane_idx()]);
    const u32 same = __match_any_sync(~0u, entry.expert);
    const i64 at = static_cast<i64>(entry.token) * p.num_topk + entry.k;
    if (entry.expert >= 0 && p.ordinals)
      reinterpret_cast<i32*>(p.ordinals)[at] = counters[entry.expert] + __popc(same & lanes_below());
#pragma unroll
    for (int d = 0; d < kNumRanks; ++d) {
      const bool goes = entry.is_first && (entry.ranks >> d & 1);
      const u32 going = __ballot_sync(~0u, goes);
      const i32 place = counters[p.num_experts + d] + __popc(going & lanes_below());
      if (entry.is_first) send_prefix[static_cast<i64>(entry.token) * kNumRanks + d] = goes ? place : -1;
      __syncwarp();
      if (lane_idx() == 0) counters[p.num_experts + d] += __popc(going);
    }
    if (entry.expert >= 0 && (same & lanes_below()) == 0) counters[entry.expert] += __popc(same);
    __syncwarp();
  }
}

namespace epee {

__global__ void __launch_bounds__(512, 1) layout_throughput(const __grid_constant__ LayoutParams p) {
  i32* counters = reinterpret_cast<i32*>(dynamic_shared());
  const int num_counters = p.num_experts + kNumRanks + 1;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  i32* mine = counters + warp_idx() * num_counters;
  const Range block_tokens = piece(p.num_tokens, static_cast<int>(gridDim.x), static_cast<int>(blockIdx.x));
  Range tokens = piece(block_tokens.end - block_tokens.begin, num_warps, warp_idx());
  tokens = {tokens.begin + block_tokens.begin, tokens.end + block_tokens.begin};
  i32* kept = counters + (num_warps + 1) * num_counters + warp_idx() * p.kept_per_warp;
  if (p.do_count)
#pragma unroll 1
    for (int i = lane_idx(); i < num_counters; i += 32) mine[i] = 0;
  if (p.do_count) stage_experts(staged_experts(), p.experts, p.num_experts);
  __syncthreads();
  wait_previous_kernel();
  allow_next_kernel();  // the payload kernel's blocks set up their barriers while this one counts
  const u64 tag = current_tag(p.call);
  const u32 active = active_ranks(p.call);
  const bool is_last = blockIdx.x == gridDim.x - 1;
  const u32 losses = is_last ? losses_of(p.call) : 0;  // early, for its latency
  if (p.do_count) {
    count_entries(p, tag, active, tokens, mine, kept);
    scan_warps(counters, num_counters, num_warps);
    if (gridDim.x > 1) add_earlier_blocks(p, tag, counters, num_counters, num_warps);
  }
  // A cached call whose dispatch had failed here has no places; those of another view are not to be used.
  u32 flaw = 0;
  if (!p.do_count && !p.refused) flaw = flaw_of(view_number(p.call), reinterpret_cast<const i32*>(p.recv_info));
  if (is_last) {
    const bool is_broken = gridDim.x > 1 && has_failed(p.call, tag);  // then the sums over blocks are not to be used
    const u64 own_code = flaw ? flaw : is_broken ? kBrokenGridCode : 0;
    const int refusal = own_code ? static_cast<int>(own_code) : p.refused;
    send_counts(p, tag, active, losses, counters + num_warps * num_counters, refusal);
  }
  if (p.do_count) assign_places(p, active, tokens, mine, kept);
  if (flaw && threadIdx.x == 0) report_failure(p.call, tag, {kRefused, p.call.rank, 0, flaw, 0});
  if (is_last && !flaw) receive_rows(p, tag, active, losses, counters);
}

}  // namespace epee
