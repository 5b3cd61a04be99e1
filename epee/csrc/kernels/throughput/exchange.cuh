// The exchange that every dispatch begins with: each rank tells all others who it is, what it sends and what it grants.
//
// A rank's row of words lies in the control block of every receiver, one of two copies by the tag's parity: a rank can
// be one call ahead of a reader, never two, as it needs that reader's row of the call between.
// Each number travels in one 8-byte store together with the low half of the call's tag, so its arrival needs no flag
// and no fence, and a word of another call is not mistaken for one of this.
//
// A grant says that the slot is free: the peer's kernels that read it ended before this one began. Nothing of a peer's
// row is used before it is checked. A refused, differing or impossible row fails the call here; since all ranks see
// the same rows, it fails everywhere.
#pragma once
#include "../../common/call.cuh"
#include "../../common/experts.cuh"
#include "../../common/work.cuh"

typedef i32 PerRank[ROOM(kNumRanks, kMaxRanks)];  // a word of each rank

/// What a dispatch goes by. With a handle: 31 bits of the number of the dispatch that made it, as the kernels count;
/// the shape was compared then. Without one: the shape, which says where the fields of a slot lie, and the capacity,
/// as a number with bit 31 set. 0: the call is refused.
DEVICE i32 handle_in_use(const LayoutParams& p) {
  if (p.refused) return 0;
  return p.do_count ? p.shape : reinterpret_cast<const i32*>(p.recv_info)[kRecvInfoCall] & 0x7FFFFFFF;
}

/// Whether rows that do not fit are dropped: the bound is the call's capacity then, not the room.
DEVICE bool may_drop(const LayoutParams& p) { return p.capacity == p.max_recv_rows; }

/// Header and totals to every active rank; `refusal` is 0 or says why this rank cannot make the call. One block, all
/// threads; no order among the stores is needed.
DEVICE void send_counts(const LayoutParams& p, u64 tag, u32 active, u32 losses, const i32* totals, int refusal) {
  perhaps_stall(tag, p.call.rank, 11);
  const u64 mark = tag << 32;
  const u64 number = view_number(p.call);
  const int num_totals = p.do_count ? p.num_experts + kNumRanks : 0;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_totals; i += static_cast<int>(blockDim.x)) {
    const u64 word = mark | static_cast<u32>(totals[i]);
#pragma unroll
    for (int peer = 0; peer < kNumRanks; ++peer)
      if (is_in(active, peer))
        st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + kCountsHeaderWords + i, word);
  }
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x); at < kNumHeaderWords * kNumRanks; at += static_cast<int>(blockDim.x)) {
    const int peer = at % kNumRanks;
    const int which = at / kNumRanks;
    if (!is_in(active, peer)) continue;
    if (which == kRefusal && !refusal && is_slot_haunted(p.call, number, p.grant))
      refusal = static_cast<int>(kHauntedCode);
    const bool has_bad_id = p.do_count && totals[p.num_experts + kNumRanks] != 0;  // refuses the whole call
    const i32 values[kNumHeaderWords] = {handle_in_use(p),
                                         static_cast<i32>(p.signature),
                                         static_cast<i32>(losses),
                                         p.grant,
                                         has_bad_id ? kBadExpert : refusal,
                                         p.num_channels,
                                         p.num_blocks,
                                         p.num_tokens};
    i32 value = 0;
#pragma unroll
    for (int i = 0; i < kNumHeaderWords; ++i) value = which == i ? values[i] : value;
    st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + which, mark | static_cast<u32>(value));
    if (which == 0 && !p.refused)  // a peer that combines instead need not wait
      st_relaxed_sys(call_word(p.call, peer, kControlCombineReadyOffset, p.call.rank, tag), mark | kOtherCallSlot << 8);
  }
}

/// Collects word `idx` of the rows of all active ranks, 0 for the others. False, with a report, when one does not come.
DEVICE bool collect(const LayoutParams& p, u64 tag, u32 active, int idx, PerRank& values) {
  const u64* rows = counts_row(p.call, p.call.rank, 0, tag) + idx;
  const u64 start = global_time_ns();
  int missing;
  const auto have_come = [&] {
    missing = -1;
#pragma unroll
    for (int src = 0; src < kNumRanks; ++src) {
      values[src] = 0;
      if (!is_in(active, src)) continue;
      const u64 word = ld_relaxed_sys(rows + src * kCountsRowWords);
      values[src] = static_cast<i32>(word);
      if (word >> 32 != (tag & 0xFFFFFFFF)) missing = src;
    }
    return missing < 0;
  };
  return bounded_wait<kPollsPerLook>(have_come, [&] {
    const u64 seen = ld_relaxed_sys(rows + missing * kCountsRowWords);
    if (!is_later(seen, tag)) return must_stop(p.call, tag, start, missing, tag, seen >> 32, 0);
    report_failure(p.call, tag, {kRefused, missing, 0, kGaveUpCode, 0});
    return true;
  });
}

/// Whether some rank refuses this call: then its other words mean nothing, and whoever reads the refusals reports them.
DEVICE bool is_refused(const LayoutParams& p, u64 tag, u32 active) {
  PerRank refusals;
  if (!collect(p, tag, active, kRefusal, refusals)) return true;
  bool is_any = false;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) is_any |= refusals[src] != 0;
  return is_any;
}

/// Whether ranks go by different handles or shapes: then their counts mean nothing, and whoever reads those words
/// reports it.
DEVICE_COLD bool is_other_call(const LayoutParams& p, u64 tag, u32 active) {
  PerRank words;
  if (!collect(p, tag, active, kHandleInUse, words)) return true;
  bool is_any = false;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) is_any |= is_in(active, src) && words[src] != handle_in_use(p);
  return is_any;
}

/// What a rank's word `which` must be: that of this rank for those that are compared, and no more than this for others.
DEVICE i32 wanted_word(const LayoutParams& p, u32 losses, int which) {
  return which == kHandleInUse ? handle_in_use(p)
         : which == kSignature ? static_cast<i32>(p.signature)
         : which == kLosses    ? static_cast<i32>(losses)
         : which == kGrant     ? p.num_slots - 1
         : which == kRefusal   ? 0
         : which == kChannels  ? kMaxChannels
         : which == kTokens    ? p.max_tokens
                               : kMaxBlocks;
}

/// Whether a rank's word `which` is as it must be; `wanted` as of `wanted_word`.
DEVICE bool is_good_word(int which, i32 wanted, i32 value) {
  return which <= kLosses ? value == wanted : value >= 0 && value <= wanted;
}

/// Reports that a rank's word `which` is not as it must be, unless another word says why.
DEVICE_COLD void report_word(const LayoutParams& p, u64 tag, u32 active, int which, i32 wanted, int src, i32 value) {
  Failure failure = {kBadCount, src, static_cast<u64>(wanted), static_cast<u64>(value), 1};
  if (which == kRefusal) failure = {kRefused, src, 0, static_cast<u64>(value), 0};
  if (which <= kLosses)
    failure = {kMismatch, src, static_cast<u32>(wanted), static_cast<u32>(value), static_cast<u64>(which)};
  if (which != kRefusal && is_refused(p, tag, active)) return;
  if (which > kLosses && which != kRefusal && is_other_call(p, tag, active)) return;
  report_failure(p.call, tag, failure);
}

/// Checks word `which` of the headers of all active ranks. False, with a report, when one refuses, differs or cannot be
/// right.
DEVICE bool check_header(const LayoutParams& p, u64 tag, u32 active, u32 losses, int which, const PerRank& values) {
  const i32 wanted = wanted_word(p, losses, which);
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    if (is_good_word(which, wanted, values[src]) || !is_in(active, src)) continue;
    report_word(p, tag, active, which, wanted, src, values[src]);
    return false;
  }
  return true;
}

/// The largest count that any rank can have.
DEVICE i32 max_count(const LayoutParams& p) { return p.max_tokens * max(1, p.num_topk); }

/// Checks one count of all ranks, before it is used as a size or a place.
DEVICE bool check_counts(const LayoutParams& p, u64 tag, u32 active, const PerRank& values) {
  bool is_good = true;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    if (values[src] >= 0 && values[src] <= max_count(p)) continue;
    if (is_other_call(p, tag, active)) return false;
    report_failure(p.call, tag, {kBadCount, src, static_cast<u64>(max_count(p)), static_cast<u64>(values[src]), 2});
    is_good = false;
  }
  return is_good;
}

/// What lies behind `recv_info` in a handle (`HandleSpace`), to be read on the GPU.
struct Ends {
  i32 *slot_ends, *recv_slots, *token_ends, *source_tokens, *num_dropped;

  DEVICE explicit Ends(const LayoutParams& p) {
    slot_ends = reinterpret_cast<i32*>(p.recv_info) + round_up(kRecvInfoCounts + p.num_local_experts, 4);
    recv_slots = slot_ends + round_up(p.num_local_experts, 4);
    token_ends = recv_slots + round_up(p.num_local_experts, 4);
    source_tokens = token_ends + round_up(kNumRanks, 4);
    num_dropped = source_tokens + round_up(kNumRanks, 4);
  }
};

/// Collects and checks a header word of all ranks, keeps what the payload kernel needs. One thread for each word.
DEVICE bool receive_header(const LayoutParams& p, u64 tag, u32 active, u32 losses, int which) {
  if (p.refused) {
    if (which == 0) mark_failed(p.call, tag);
    return false;
  }
  PerRank values;
  if (!collect(p, tag, active, which, values) || !check_header(p, tag, active, losses, which, values)) return false;
  i32* grants = reinterpret_cast<i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    if (which == kGrant) grants[src] = values[src];
    if (which == kChannels) grants[kMaxRanks + src] = values[src];
    if (which == kBlocks) grants[2 * kMaxRanks + src] = values[src];
    if (which == kTokens && p.do_count) Ends(p).source_tokens[src] = values[src];
  }
  return true;
}

/// Ranks that have left this call already: they have waited in vain for this one, or for a reason that all see. One
/// thread, while others wait for the words of the call.
DEVICE u32 ranks_gone(const LayoutParams& p, u64 tag, u32 active) {
  u32 gone = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    const u64* next = call_word(p.call, p.call.rank, kControlCombineReadyOffset, src, tag + 1);
    gone |= static_cast<u32>(is_later(ld_relaxed_sys(next), tag)) << src;
  }
  return gone & active;
}

/// What the last block sums up, in shared memory; beside it `padded_rows`, a number for each expert of all ranks, and
/// behind them as many without padding.
struct Sums {
  i32 num_recv[kMaxRanks];      // tokens for rank d
  i32 num_expanded[kMaxRanks];  // its rows in the expert layout
  i32 tokens_from[kMaxRanks];   // for this rank
  u32 has_all;
  u32 gone;  // ranks
};

/// Copies the checked counts of all ranks into the handle and sums up what each rank will receive.
DEVICE bool receive_counts(const LayoutParams& p, u64 tag, u32 active, Sums& s, i32* padded_rows) {
  bool is_good = true;
  const int num_counters = p.num_experts + kNumRanks;
  i32* matrix = reinterpret_cast<i32*>(p.count_matrix);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) {
    PerRank values;
    if (!collect(p, tag, active, kCountsHeaderWords + i, values)) return false;
    if (!check_counts(p, tag, active, values)) is_good = false;
    i32 sum = 0;
    i32 before = 0;
#pragma unroll
    for (int src = 0; src < kNumRanks; ++src) {
      matrix[src * num_counters + i] = values[src];
      if (src < p.call.rank) before += values[src];
      sum += values[src];
    }
    reinterpret_cast<i32*>(p.row_base)[i] = before;
    if (i >= p.num_experts) {
      s.num_recv[i - p.num_experts] = sum;
      if (i - p.num_experts == p.call.rank)
#pragma unroll
        for (int src = 0; src < kNumRanks; ++src) s.tokens_from[src] = values[src];
      continue;
    }
    const int owner = owner_of(i, p.num_local_experts);
    const i32 padded = p.expert_alignment == 1 ? sum : round_up(sum, p.expert_alignment);
    padded_rows[i] = padded;
    padded_rows[p.num_experts + i] = sum;
    if (p.ordinals) red_add_shared(s.num_expanded + owner, padded);
    if (owner == p.call.rank) {
      const int local_expert = i - first_expert_of(owner, p.num_local_experts);
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
    const int first = first_expert_of(owner_of(e, p.num_local_experts), p.num_local_experts);
    for (int other = first; other < e; ++other) start += padded_rows[other];
    reinterpret_cast<i32*>(p.row_base)[e] += start;
  }
}

/// Whether rank `d` would receive more rows than fit, and may not drop them.
DEVICE bool has_overflow(const LayoutParams& p, const Sums& s, int d) {
  return (s.num_recv[d] > p.max_recv_rows && !may_drop(p)) ||
         (p.max_expanded_rows > 0 && s.num_expanded[d] > p.max_expanded_rows);
}

/// Fails the call when any rank would receive more rows than fit; every rank comes to the same answer.
DEVICE bool check_capacity(const LayoutParams& p, u64 tag, const Sums& s) {
  bool is_good = true;
  for (int d = 0; d < kNumRanks; ++d) {
    if (!has_overflow(p, s, d)) continue;
    const bool is_expanded = p.max_expanded_rows > 0 && s.num_expanded[d] > p.max_expanded_rows;
    const i32 limit = is_expanded ? p.max_expanded_rows : p.max_recv_rows;
    const i32 rows = is_expanded ? s.num_expanded[d] : s.num_recv[d];
    report_failure(p.call, tag, {kOverflow, d, static_cast<u64>(limit), static_cast<u64>(rows), is_expanded});
    is_good = false;
  }
  return is_good;
}

/// The sum of `value` over this lane and those below. All lanes.
DEVICE i32 sum_up_to_lane(i32 value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const i32 below = __shfl_sync(~0u, value, lane_idx() - distance);
    if (lane_idx() >= distance) value += below;
  }
  return value;
}

/// Writes what is read on the GPU alone, by whoever works on the rows (`HandleSpace`): where each local expert's slots
/// end, how many it has (dropped rows counted), and how many tokens have come from this and all lower ranks. Zeros in a
/// call that fails, so that nobody goes by what never came. One warp.
DEVICE void write_ends(const LayoutParams& p, const Sums& s, const i32* padded_rows) {
  bool is_good = s.has_all && !s.gone;
  for (int d = 0; d < kNumRanks; ++d) is_good = is_good && !has_overflow(p, s, d);
  const int num_local = p.num_local_experts;
  const i32* mine = padded_rows + first_expert_of(p.call.rank, num_local);
  const Ends to(p);
  i32 before = 0;
#pragma unroll 1
  for (int at = 0; at < num_local; at += 32) {
    const int expert = at + lane_idx();
    const bool is_one = is_good && expert < num_local;
    const i32 padded = is_one ? mine[expert] : 0;
    const i32 slots = is_one ? mine[p.num_experts + expert] : 0;
    const i32 end = before + sum_up_to_lane(padded);
    before = __shfl_sync(~0u, end, 31);
    if (expert >= num_local) continue;
    to.slot_ends[expert] = p.ordinals ? end - padded + slots : end;  // expert layout: of the rows that are no padding
    to.recv_slots[expert] = slots;
  }
  __syncwarp();
  const i32 tokens = is_good && lane_idx() < kNumRanks ? s.tokens_from[lane_idx()] : 0;
  const i32 end = sum_up_to_lane(tokens);
  if (lane_idx() < kNumRanks) to.token_ends[lane_idx()] = min(end, p.max_recv_rows);
}

/// Collects and checks what all ranks say, writes what the host and later kernels need. One block, all threads;
/// `padded_rows` is shared memory for two numbers per expert.
DEVICE void receive_rows(const LayoutParams& p, u64 tag, u32 active, u32 losses, i32* padded_rows) {
  __shared__ Sums s;
  if (threadIdx.x < kMaxRanks) s.num_recv[threadIdx.x] = s.num_expanded[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.has_all = 1;
  __syncthreads();
  // the last warp sees to the header while the others collect counts
  const int which = static_cast<int>(blockDim.x - 1 - threadIdx.x);
  if (which < kNumHeaderWords && !receive_header(p, tag, active, losses, which)) s.has_all = 0;
  if (which == kNumHeaderWords) s.gone = ranks_gone(p, tag, active);
  if (p.do_count && !p.refused && !receive_counts(p, tag, active, s, padded_rows)) s.has_all = 0;
  __syncthreads();
  if (p.do_count && p.ordinals) place_experts(p, padded_rows);
  if (p.do_count && warp_idx() == static_cast<int>(blockDim.x / 32) - 1)
    write_ends(p, s, padded_rows);  // meanwhile thread 0 tells the host
  if (threadIdx.x != 0) return;
  bool is_good = s.has_all;
  if (is_good && !s.gone) mark_exchanged(p.call, tag);
  if (is_good && p.do_count) is_good = check_capacity(p, tag, s);
  if (is_good && s.gone) {  // no rows will come from them
    report_failure(p.call, tag, {kPeerGaveUp, __ffs(static_cast<int>(s.gone)) - 1, 0, 0, 1});
    is_good = false;
  }
  const i32 rows = is_good ? min(s.num_recv[p.call.rank], p.max_recv_rows) : 0;
  const i32 expanded = is_good ? s.num_expanded[p.call.rank] : 0;
  if (p.do_count) {
    reinterpret_cast<i32*>(p.recv_info)[0] = is_good ? kHandleGood : kHandleBad;
    reinterpret_cast<i32*>(p.recv_info)[kRecvInfoRows] = rows;
    reinterpret_cast<i32*>(p.recv_info)[kRecvInfoExpanded] = expanded;
  }
  if (p.mailbox) {
    st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kRecvInfoRows, rows);
    st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kRecvInfoExpanded, expanded);
    st_release_sys(reinterpret_cast<u64*>(p.mailbox), is_good ? kHandleGood : kHandleBad);
  }
  if (!p.do_count) return;
  reinterpret_cast<i32*>(p.recv_info)[1] = static_cast<i32>(view_number(p.call));
  reinterpret_cast<i32*>(p.recv_info)[kRecvInfoCall] = static_cast<i32>(tag);
  *Ends(p).num_dropped = is_good ? s.num_recv[p.call.rank] - rows : 0;
}
