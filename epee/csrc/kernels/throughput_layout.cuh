// Where every row goes: counts, prefix sums, and the exchange of counts between ranks.
//
// Blocks cut the tokens into contiguous pieces, warps cut a block's piece again. Counter i < num_experts counts the
// (token, k) slots of expert i, counter num_experts + d the tokens that go to rank d, the last one bad expert ids.
//   1. every warp counts its tokens; a scan over warps and (after a grid barrier) over blocks turns counts into the
//      number of earlier entries;
//   2. the last block sends header and totals to all ranks. Each number travels in one 8-byte store together with the
//      low half of the call's tag, so its arrival needs no flag and no fence;
//   3. every warp walks its tokens again and writes each entry's place among this rank's entries;
//   4. the last block collects the numbers of all ranks, checks them, writes the matrix of counts, the grants and what
//      the host waits for.
// A cached call (`do_count == 0`) exchanges headers only: it needs the receivers' grants all the same.
//
// A grant says that the slot is free: the peer's kernels that read it ended before this one began. Nothing of a peer's
// row is used before it is checked. A refused, differing or impossible row fails the call here; since all ranks see
// the same rows, it fails everywhere.
#pragma once
#include "../common/call.cuh"
#include "../common/work.cuh"

enum HeaderWord : int { kSignatureLow = 0, kSignatureHigh, kGrant, kRefusal, kChannels, kBlocks, kNumHeaderWords };

DEVICE u64* counts_row(const Call& call, int owner, int src_rank, u64 tag) {
  const u64 row = (tag & 1) * kMaxRanks + static_cast<u64>(src_rank);
  return control_words(call, owner, kControlCountsOffset) + row * kCountsRowWords;
}

/// One (token, k) slot as a lane sees it. `ranks` has bit d when the token goes to rank d; `is_first` marks the lane
/// that speaks for the token.
struct Entry {
  int token, k, expert;
  u32 ranks;
  bool is_first;
};

/// The expert of a slot, -1 for none, -2 for an id that does not exist.
DEVICE int load_expert(const LayoutParams& p, int token, int k) {
  const i64 id = reinterpret_cast<const i64*>(p.topk_idx)[static_cast<i64>(token) * p.num_topk + k];
  if (id >= -1 && id < p.num_experts) return static_cast<int>(id);
  return -2;
}

/// Completes a step's entries from the experts of its lanes: `32 / lanes_per_token` tokens from `first` on. All lanes.
DEVICE Entry make_entry(const LayoutParams& p, int first, int end, int expert) {
  const int lane = lane_idx();
  Entry entry = {first + lane / p.lanes_per_token, lane % p.lanes_per_token, expert, 0, false};
  const bool has_token = entry.token < end;
  entry.is_first = has_token && entry.k == 0;
  if (expert >= 0) entry.ranks = 1u << (expert / p.num_local_experts);
  if (has_token && p.token_in_rank)
    for (int d = 0; d < kNumRanks; ++d)
      entry.ranks |= static_cast<u32>(reinterpret_cast<const u8*>(
                                          p.token_in_rank)[static_cast<i64>(entry.token) * kNumRanks + d] != 0)
                     << d;
  for (int distance = p.lanes_per_token / 2; distance; distance /= 2)
    entry.ranks |= __shfl_xor_sync(~0u, entry.ranks, distance);
  if (!has_token) entry.ranks = 0;
  return entry;
}

/// Step 1: this warp's counts, in shared memory of its own. Keeps the experts in `kept` for step 3, and copies
/// experts and weights into the handle.
DEVICE void count_entries(const LayoutParams& p, u64 tag, Range tokens, i32* counters, i32* kept) {
  const int step = 32 / p.lanes_per_token;
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += step) {
    const int token = first + lane_idx() / p.lanes_per_token;
    const int k = lane_idx() % p.lanes_per_token;
    const bool is_slot = token < tokens.end && k < p.num_topk && p.topk_idx;
    const i64 at = static_cast<i64>(token) * p.num_topk + k;
    const float weight = is_slot && p.weights_of ? reinterpret_cast<const float*>(p.topk_weights)[at] : 0.0f;
    int expert = is_slot ? load_expert(p, token, k) : -1;
    if (expert == -2) {
      red_add_shared(counters + p.num_experts + kNumRanks, 1);
      report_failure(p.call, tag,
                     {kBadExpert, p.call.rank, static_cast<u64>(token), reinterpret_cast<const u64*>(p.topk_idx)[at],
                      static_cast<u64>(k)});
      expert = -1;
    }
    kept[(first - tokens.begin) / step * 32 + lane_idx()] = expert;
    const Entry entry = make_entry(p, first, tokens.end, expert);
    if (expert >= 0) red_add_shared(counters + expert, 1);
    if (entry.is_first)
      for (int d = 0; d < kNumRanks; ++d)
        if (entry.ranks >> d & 1) red_add_shared(counters + p.num_experts + d, 1);
    if (is_slot) reinterpret_cast<i32*>(p.expert_of)[at] = expert;
    if (is_slot && p.weights_of) reinterpret_cast<float*>(p.weights_of)[at] = weight;
  }
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

/// Step 2: header and totals to every rank. One block, all threads; no order among the stores is needed.
DEVICE void send_counts(const LayoutParams& p, u64 tag, const i32* totals) {
  const u64 mark = tag << 32;
  const int num_totals = p.do_count ? p.num_experts + kNumRanks : 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_totals; i += static_cast<int>(blockDim.x)) {
    const u64 word = mark | static_cast<u32>(totals[i]);
#pragma unroll
    for (int peer = 0; peer < kNumRanks; ++peer)
      st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + kCountsHeaderWords + i, word);
  }
  if (threadIdx.x < kNumHeaderWords * kNumRanks) {
    const int peer = static_cast<int>(threadIdx.x) % kNumRanks;
    const int which = static_cast<int>(threadIdx.x) / kNumRanks;
    const bool has_bad_id = p.do_count && totals[p.num_experts + kNumRanks] != 0;  // refuses the whole call
    const i32 values[kNumHeaderWords] = {static_cast<i32>(p.signature),
                                         static_cast<i32>(p.signature >> 32),
                                         p.grant,
                                         has_bad_id ? kBadExpert : p.refused,
                                         p.num_channels,
                                         p.num_blocks};
    i32 value = 0;
#pragma unroll
    for (int i = 0; i < kNumHeaderWords; ++i) value = which == i ? values[i] : value;
    st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + which, mark | static_cast<u32>(value));
  }
}

/// Step 3: each entry's place among this rank's entries, in (token, k) order.
DEVICE void assign_places(const LayoutParams& p, Range tokens, i32* counters, const i32* kept) {
  const int step = 32 / p.lanes_per_token;
  i32* send_prefix = reinterpret_cast<i32*>(p.send_prefix);
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += step) {
    const Entry entry = make_entry(p, first, tokens.end, kept[(first - tokens.begin) / step * 32 + lane_idx()]);
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

/// Collects word `idx` of the rows of all ranks. False, with a report, when one does not come.
DEVICE bool collect(const LayoutParams& p, u64 tag, int idx, i32 (&values)[kNumRanks]) {
  const u64* rows = counts_row(p.call, p.call.rank, 0, tag) + idx;
  const u64 start = global_time_ns();
  for (u32 polls = 1;; ++polls) {
    int missing = -1;
#pragma unroll
    for (int src = 0; src < kNumRanks; ++src) {
      const u64 word = ld_relaxed_sys(rows + src * kCountsRowWords);
      values[src] = static_cast<i32>(word);
      if (word >> 32 != (tag & 0xFFFFFFFF)) missing = src;
    }
    if (missing < 0) return true;
    poll_pause();
    if (polls % kPollsPerLook) continue;
    const bool is_late = global_time_ns() - start > p.call.timeout_ns;
    if (is_late || is_aborted(p.call)) {
      report_failure(p.call, tag,
                     {is_late ? kTimeout : kAborted, missing, tag, rows[missing * kCountsRowWords] >> 32, 0});
      return false;
    }
    if (has_failed(p.call, tag)) return false;
  }
}

/// Checks a header word of all ranks and keeps what the payload kernel needs. One thread for each word.
DEVICE bool receive_header(const LayoutParams& p, u64 tag, int which) {
  i32 values[kNumRanks];
  if (p.refused) {
    if (which == 0) mark_failed(p.call, tag);
    return false;
  }
  if (!collect(p, tag, which, values)) return false;
  i32* grants = reinterpret_cast<i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    const i32 value = values[src];
    if (which == kRefusal && value) {
      report_failure(p.call, tag, {kRefused, src, 0, static_cast<u64>(value), 0});
      return false;
    }
    const u32 mine = static_cast<u32>(which == kSignatureLow ? p.signature : p.signature >> 32);
    if (which <= kSignatureHigh && static_cast<u32>(value) != mine) {
      report_failure(p.call, tag, {kMismatch, src, mine, static_cast<u32>(value), 0});
      return false;
    }
    const i32 limit = which == kGrant ? p.num_slots - 1 : which == kChannels ? kMaxChannels : kMaxBlocks;
    if (which == kGrant || which == kChannels || which == kBlocks) {
      if (value < 0 || value > limit) {
        report_failure(p.call, tag, {kBadCount, src, static_cast<u64>(limit), static_cast<u64>(value), 1});
        return false;
      }
      grants[(which == kGrant ? 0 : which == kChannels ? 1 : 2) * kMaxRanks + src] = value;
    }
  }
  return true;
}

/// Copies the checked counts of all ranks into the handle and sums up what each rank will receive. `padded_rows` is
/// shared memory for one number per expert.
DEVICE bool receive_counts(const LayoutParams& p, u64 tag, i32* num_recv, i32* num_expanded, i32* padded_rows) {
  bool is_good = true;
  const int num_counters = p.num_experts + kNumRanks;
  const int max_count = p.max_tokens * max(1, p.num_topk);
  i32* matrix = reinterpret_cast<i32*>(p.count_matrix);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) {
    i32 values[kNumRanks];
    if (!collect(p, tag, kCountsHeaderWords + i, values)) return false;
    i32 sum = 0;
    i32 before = 0;
#pragma unroll
    for (int src = 0; src < kNumRanks; ++src) {
      if (values[src] < 0 || values[src] > max_count) {
        report_failure(p.call, tag, {kBadCount, src, static_cast<u64>(max_count), static_cast<u64>(values[src]), 2});
        is_good = false;
      }
      matrix[src * num_counters + i] = values[src];
      if (src < p.call.rank) before += values[src];
      sum += values[src];
    }
    reinterpret_cast<i32*>(p.row_base)[i] = before;
    if (i >= p.num_experts) {
      num_recv[i - p.num_experts] = sum;
      continue;
    }
    const int owner = i / p.num_local_experts;
    const i32 padded = p.expert_alignment == 1 ? sum : round_up(sum, p.expert_alignment);
    padded_rows[i] = padded;
    if (p.ordinals) red_add_shared(num_expanded + owner, padded);
    if (owner == p.call.rank) {
      const int local_expert = i - owner * p.num_local_experts;
      reinterpret_cast<i32*>(p.recv_info)[kRecvInfoCounts + local_expert] = padded;
      if (p.mailbox) st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kRecvInfoCounts + local_expert, padded);
    }
  }
  return is_good;
}

/// Expert layout: where this rank's rows of each expert begin at its owner; completes what `receive_counts` began.
DEVICE void place_experts(const LayoutParams& p, const i32* padded_rows) {
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < p.num_experts; e += static_cast<int>(blockDim.x)) {
    i32 start = 0;
    for (int other = e / p.num_local_experts * p.num_local_experts; other < e; ++other) start += padded_rows[other];
    reinterpret_cast<i32*>(p.row_base)[e] += start;
  }
}

/// Fails the call when any rank would receive more rows than fit; every rank comes to the same answer.
DEVICE bool check_capacity(const LayoutParams& p, u64 tag, const i32* num_recv, const i32* num_expanded) {
  bool is_good = true;
  for (int d = 0; d < kNumRanks; ++d) {
    const bool is_expanded = num_recv[d] <= p.max_recv_rows;
    const i32 limit = is_expanded ? p.max_expanded_rows : p.max_recv_rows;
    const i32 rows = is_expanded ? num_expanded[d] : num_recv[d];
    if (rows <= limit || (is_expanded && limit == 0)) continue;
    report_failure(p.call, tag, {kOverflow, d, static_cast<u64>(limit), static_cast<u64>(rows), is_expanded});
    is_good = false;
  }
  return is_good;
}

/// Step 4. One block, all threads; `sums` is shared memory for 2 * kMaxRanks counters, `padded_rows` for one per
/// expert.
DEVICE void receive_rows(const LayoutParams& p, u64 tag, i32* sums, i32* padded_rows) {
  __shared__ u32 has_all;
  if (threadIdx.x < 2 * kMaxRanks) sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) has_all = 1;
  __syncthreads();
  // the last warp sees to the header while the others collect counts
  const int which = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (which < kNumHeaderWords && !receive_header(p, tag, which)) has_all = 0;
  if (p.do_count && !p.refused && !receive_counts(p, tag, sums, sums + kMaxRanks, padded_rows)) has_all = 0;
  __syncthreads();
  if (p.do_count && p.ordinals) place_experts(p, padded_rows);
  if (threadIdx.x != 0) return;
  bool is_good = has_all;
  if (is_good && p.do_count) is_good = check_capacity(p, tag, sums, sums + kMaxRanks);
  const i32 rows = is_good ? sums[p.call.rank] : 0;
  const i32 expanded = is_good ? sums[kMaxRanks + p.call.rank] : 0;
  if (p.do_count) {
    reinterpret_cast<i32*>(p.recv_info)[kRecvInfoRows] = rows;
    reinterpret_cast<i32*>(p.recv_info)[kRecvInfoExpanded] = expanded;
  }
  if (p.mailbox) {
    st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kRecvInfoRows, rows);
    st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kRecvInfoExpanded, expanded);
    st_release_sys(reinterpret_cast<u64*>(p.mailbox), is_good ? 1 : 2);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) throughput_layout(const __grid_constant__ LayoutParams p) {
  __shared__ i32 sums[2 * kMaxRanks];
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
  __syncwarp();
  wait_previous_kernel();
  allow_next_kernel();
  const u64 tag = current_tag(p.call);
  if (p.do_count) {
    count_entries(p, tag, tokens, mine, kept);
    scan_warps(counters, num_counters, num_warps);
    if (gridDim.x > 1) add_earlier_blocks(p, tag, counters, num_counters, num_warps);
  }
  const bool is_last = blockIdx.x == gridDim.x - 1;
  if (is_last) send_counts(p, tag, counters + num_warps * num_counters);
  if (p.do_count) assign_places(p, tokens, mine, kept);
  if (is_last) receive_rows(p, tag, sums, counters);
}
