// The first kernel of a dispatch between hosts: counts, places, and the exchange of counts between all ranks.
//
// One block, so that nothing but its own barrier orders the steps; a warp looks at 32 tokens at a time, a thread at
// one.
//   1. each warp counts its tokens for every rank and host; a scan over warps gives the number of earlier tokens;
//   2. each thread writes its token's place among this rank's tokens for each rank, and its record's number for each
// host;
//   3. the row of counts goes to the ranks of the island (`rows` of this rank's state, announced in `row_ready` of
// theirs)
//      and by the proxy to the gateway on each other host, whose neighbours read it there;
//   4. the rows of all ranks are awaited, checked and copied into the handle; sums say where rows begin. All ranks see
//      the same rows, so they come to the same verdict: refused, differing, too many rows.
//
// A rank whose ids are bad, or that must refuse, takes part like any other, and reports behind step 4: waits of a call
// that has failed end early, and a row that is not read here keeps its slot, so that its sender can send no third one.
// Where a row does not come in time, or could not be sent, the ranks are out of step: this one sets `broken`. It still
// takes the rows that have come.
//
// A row: signature, refusal, tokens, slot and handle; tokens for each rank; records for each host; (token, k) pairs for
// each expert.
// Two copies, and two words in each `row_ready`, by the parity of the row's number: a rank sends row r after it has
// read row r - 1 of all others, each of which has sent that after it had read row r - 2. Behind a refused call nothing
// else holds a rank back: it may send row r + 1 while a neighbour still waits for its row r.
// A row also says that this rank's memory for the result is free.
#pragma once
#include "../../common/experts.cuh"
#include "words.cuh"

/// Where a token goes.
struct Goes {
  u64 ranks;
  u32 hosts;

  /// Column c: rank c, or behind the ranks a host.
  DEVICE bool to(const HostCall& h, int c) const {
    return c < h.num_ranks ? ranks >> c & 1 : hosts >> (c - h.num_ranks) & 1;
  }
};

/// What the warps share: counts by column for each warp and in all, by expert, and of bad ids.
struct Counters {
  i32 *warps, *totals, *experts, *num_bad;
  int num_columns;
};

constexpr int kIdsAtOnce = 8;  // of a token, loaded together: each load has a latency of its own

/// Reads the ids of a token. With `counters` it counts them, those that do not exist too, and writes the handle's
/// experts.
DEVICE Goes read_token(const HostLayoutParams& p, int token, const Counters* counters) {
  Goes goes = {0, 0};
  const HostRoutes& routes = routes_of(p.host);
  const int num_local = p.host.num_experts / p.host.num_ranks;
#pragma unroll 1
  for (int first = 0; token < p.host.num_tokens && first < p.host.num_topk; first += kIdsAtOnce) {
    const i64 at = static_cast<i64>(token) * p.host.num_topk + first;
    const int count = min(kIdsAtOnce, p.host.num_topk - first);
    i64 ids[kIdsAtOnce];
#pragma unroll
    for (int k = 0; k < kIdsAtOnce; ++k) ids[k] = k < count ? reinterpret_cast<const i64*>(p.topk_idx)[at + k] : -1;
#pragma unroll
    for (int k = 0; k < kIdsAtOnce; ++k) {
      const i64 id = ids[k];
      const i32 expert = physical_expert(staged_experts(), id, p.host.num_experts, -1);
      const bool is_expert = expert >= 0;
      if (counters && k < count) {
        reinterpret_cast<i32*>(p.host.expert_of)[at + k] = expert;
        if (is_expert) red_add_shared(counters->experts + expert, 1);
        if (!is_expert && id != -1) red_add_shared(counters->num_bad, 1);
      }
      if (!is_expert) continue;
      const int rank = owner_of(expert, num_local);
      goes.ranks |= 1ull << rank;
      goes.hosts |= 1u << routes.host_of[rank];
    }
  }
  return goes;
}

/// Reports ids of this warp's tokens that do not exist.
DEVICE void report_bad_ids(const HostLayoutParams& p, u64 tag, Range tokens) {
  const HostCall& h = p.host;
#pragma unroll 1
  for (int token = tokens.begin + lane_idx(); token < tokens.end; token += 32)
#pragma unroll 1
    for (int k = 0; k < h.num_topk; ++k) {
      const i64 id = reinterpret_cast<const i64*>(p.topk_idx)[static_cast<i64>(token) * h.num_topk + k];
      if (id < -1 || id >= h.num_experts)
        report_failure(h.call, tag,
                       {kBadExpert, my_rank(h), static_cast<u64>(token), static_cast<u64>(id), static_cast<u64>(k)});
    }
}

/// Step 1: this warp's counts.
DEVICE void count_tokens(const HostLayoutParams& p, Range tokens, const Counters& counters) {
  i32* mine = counters.warps + warp_idx() * counters.num_columns;
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += 32) {
    const int token = first + lane_idx();
    const Goes goes = read_token(p, token < tokens.end ? token : p.host.num_tokens, &counters);
#pragma unroll 1
    for (int c = 0; c < counters.num_columns; ++c) {
      const u32 going = __ballot_sync(~0u, goes.to(p.host, c));
      if (lane_idx() == c % 32) mine[c] += __popc(going);
    }
  }
}

/// Turns the warps' counts into the numbers of earlier tokens, and sums them up. All threads.
DEVICE void scan_counts(const Counters& counters) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  __syncthreads();
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x); c < counters.num_columns; c += static_cast<int>(blockDim.x)) {
    i32 sum = 0;
#pragma unroll 1
    for (int w = 0; w < num_warps; ++w) {
      const i32 count = counters.warps[w * counters.num_columns + c];
      counters.warps[w * counters.num_columns + c] = sum;
      sum += count;
    }
    counters.totals[c] = sum;
  }
  __syncthreads();
}

/// Step 2: places and records of this warp's tokens.
DEVICE void assign_places(const HostLayoutParams& p, Range tokens, const Counters& counters) {
  i32* mine = counters.warps + warp_idx() * counters.num_columns;
  const int num_ranks = p.host.num_ranks;
  i32* rank_places = reinterpret_cast<i32*>(p.host.rank_places);
  i32* host_records = reinterpret_cast<i32*>(p.host.host_records);
  i32* record_tokens = reinterpret_cast<i32*>(p.host.record_tokens);
#pragma unroll 1
  for (int first = tokens.begin; first < tokens.end; first += 32) {
    const i64 token = first + lane_idx();
    const bool is_one = token < tokens.end;
    const Goes goes = read_token(p, is_one ? static_cast<int>(token) : p.host.num_tokens, nullptr);
#pragma unroll 1
    for (int c = 0; c < counters.num_columns; ++c) {
      const bool is_going = goes.to(p.host, c);
      const u32 going = __ballot_sync(~0u, is_going);
      const i32 place = is_going ? mine[c] + __popc(going & lanes_below()) : -1;
      __syncwarp();
      if (lane_idx() == c % 32) mine[c] += __popc(going);
      if (!is_one) continue;
      const int host = c - num_ranks;
      if (host < 0) rank_places[token * num_ranks + c] = place;
      if (host >= 0) host_records[token * p.host.num_hosts + host] = place;
      if (host >= 0 && is_going)
        record_tokens[static_cast<i64>(host) * p.host.max_tokens + place] = static_cast<i32>(token);
    }
    __syncwarp();
  }
}

DEVICE i32* row_copy(const HostCall& h, int position, u64 row) {
  return reinterpret_cast<i32*>(state_words(h, position, kStateRowsOffset)) + row % 2 * kRowRoom;
}

DEVICE int num_row_words(const HostCall& h) { return kRowCounts + h.num_ranks + h.num_hosts + h.num_experts; }

/// Where a rank of the island announces its row to the one at `position`.
DEVICE u64* row_ready(const HostCall& h, int position, int from, u64 row) {
  return state_words(h, position, kStateRowReadyOffset) + row % 2 * kMaxLocal + from;
}

/// Step 3. All threads; `refusal` is 0 or says why this rank cannot make the call. False after a report: there is a
/// host that the row was not sent to.
DEVICE bool send_row(const HostLayoutParams& p, u64 tag, u64 row, const Counters& counters, i32 refusal, i32 handle) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  __shared__ u32 is_free, is_full;  // a bit for each host
  if (threadIdx.x == 0) is_free = is_full = 0;
  __syncthreads();
  const u64 slot = row % kRowSlots;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < h.num_hosts && routes.gateway_outlet[thread] >= 0) {
    const Outlet& outlet = routes.outlets[routes.gateway_outlet[thread]];
    const u64* freed = reinterpret_cast<const u64*>(outlet.rows_freed) + slot;
    if (row < routes.first + kRowSlots || wait_word(h, tag, freed, row + 1 - kRowSlots, outlet.rank, 32, outlet.inlet))
      red_or_shared(&is_free, 1u << thread);
    else
      red_or_shared(&is_full, 1u << thread);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < num_row_words(h); i += static_cast<int>(blockDim.x)) {
    const int column = i - kRowCounts;
    const i32 value = i == kRowSignature              ? static_cast<i32>(p.signature)
                      : i == kRowRefusal              ? refusal
                      : i == kRowTokens               ? h.num_tokens
                      : column < 0                    ? p.grant | handle << kHandleShift
                      : column < counters.num_columns ? counters.totals[column]
                                                      : counters.experts[column - counters.num_columns];
    row_copy(h, h.call.rank, row)[i] = value;
#pragma unroll 1
    for (int host = 0; host < h.num_hosts; ++host)
      if (is_free >> host & 1)
        reinterpret_cast<i32*>(routes.outlets[routes.gateway_outlet[host]].rows + slot * routes.row_bytes)[i] = value;
  }
  __syncthreads();
  perhaps_stall(tag, h.call.rank, 11);
  if (thread < kNumRanks) st_release_sys(row_ready(h, thread, h.call.rank, row), row + 1);
  if (thread < h.num_hosts && is_free >> thread & 1)
    st_release_sys(reinterpret_cast<u64*>(routes.outlets[routes.gateway_outlet[thread]].rows_posted) + slot,
                   chunk_word(row, routes.row_bytes, 0));
  return !is_full;
}

/// Where the row of a rank is to be read.
DEVICE const i32* row_of(const HostCall& h, int rank, u64 row) {
  const HostRoutes& routes = routes_of(h);
  if (routes.host_of[rank] == h.host) return row_copy(h, routes.position[rank], row);
  return reinterpret_cast<const i32*>(routes.inlets[routes.source_inlet[rank]].rows +
                                      row % kRowSlots * routes.row_bytes);
}

/// Where the row of a rank on another host is announced.
DEVICE const u64* row_arrived(const HostCall& h, int rank, u64 row) {
  const HostRoutes& routes = routes_of(h);
  return reinterpret_cast<const u64*>(routes.inlets[routes.source_inlet[rank]].rows_arrived) + row % kRowSlots;
}

/// Waits for the row of a rank. False after a report.
DEVICE bool await_row(const HostCall& h, u64 tag, int rank, u64 row) {
  const HostRoutes& routes = routes_of(h);
  if (routes.host_of[rank] == h.host)
    return wait_word(h, tag, row_ready(h, h.call.rank, routes.position[rank], row), row + 1, rank, 33);
  return wait_word(h, tag, row_arrived(h, rank, row), chunk_word(row, routes.row_bytes, 0), rank, 33,
                   routes.source_inlet[rank]);
}

/// Says that this rank has read the row of a source. The slot of the row before is free then, too: where it came too
/// late for its call, nobody else would say so.
DEVICE void take_row(const HostCall& h, int source, u64 row) {
  const HostRoutes& routes = routes_of(h);
  u64* taken = reinterpret_cast<u64*>(routes.inlets[routes.source_inlet[source]].rows_taken);
  if (row > routes.first) st_release_sys(taken + (row - 1) % kRowSlots * kNumRanks, row);
  st_release_sys(taken + row % kRowSlots * kNumRanks, row + 1);
}

/// The handle of the dispatch that is made again, as rows have it; 0 for none.
DEVICE i32 known_handle(const HostLayoutParams& p) {
  return p.known_info ? 0x4000 | (reinterpret_cast<const i32*>(p.known_info)[kInfoCall] & 0x3FFF) : 0;
}

/// Checks the head of a rank's row, and keeps what a rank of this island grants. False after a report.
DEVICE bool check_head(const HostLayoutParams& p, u64 tag, int rank, const i32* from) {
  const i32 signature = ld_relaxed_sys(from + kRowSignature), refusal = ld_relaxed_sys(from + kRowRefusal);
  const i32 tokens = ld_relaxed_sys(from + kRowTokens), granted = ld_relaxed_sys(from + kRowGrant);
  const i32 slot = granted & ((1 << kHandleShift) - 1), handle = granted >> kHandleShift;
  Failure failure = {kBadCount, rank, static_cast<u64>(p.host.max_tokens), static_cast<u64>(tokens), 1};
  const bool has_tokens = tokens >= 0 && tokens <= p.host.max_tokens;
  const bool has_slot = slot < p.num_grants;
  if (!has_slot) failure = {kBadRow, rank, static_cast<u64>(p.num_grants), static_cast<u64>(slot), 4};
  const HostRoutes& routes = routes_of(p.host);
  if (has_slot && routes.host_of[rank] == p.host.host) grants_of(p.host)[routes.position[rank]] = slot;
  if (handle != known_handle(p))
    failure = {kMismatch, rank, static_cast<u32>(known_handle(p)), static_cast<u32>(handle), kRowGrant};
  if (signature != static_cast<i32>(p.signature))
    failure = {kMismatch, rank, static_cast<u32>(p.signature), static_cast<u32>(signature), kRowSignature};
  if (refusal) failure = {kRefused, rank, 0, static_cast<u64>(refusal), 0};
  if (has_tokens && has_slot && handle == known_handle(p) && !refusal && signature == static_cast<i32>(p.signature))
    return true;
  if (p.refused)  // this rank's cpu knows why
    mark_failed(p.host.call, tag);
  else
    report_failure(p.host.call, tag, failure);
  return false;
}

/// Copies a rank's counts into the handle, each checked. One warp for each rank in turn; false after a report.
DEVICE bool copy_counts(const HostLayoutParams& p, u64 tag, int rank, const i32* from) {
  bool is_good = true;
  const HostCall& h = p.host;
  const i32 most = ld_relaxed_sys(from + kRowTokens);
#pragma unroll 1
  for (int c = lane_idx(); c < h.num_ranks + h.num_hosts; c += 32) {
    const i32 count = ld_relaxed_sys(from + kRowCounts + c);
    if (count < 0 || count > most) {
      report_failure(h.call, tag, {kBadCount, rank, static_cast<u64>(most), static_cast<u64>(count), 2});
      is_good = false;
    }
    if (c < h.num_ranks) reinterpret_cast<i32*>(h.counts)[rank * h.num_ranks + c] = count;
    if (c >= h.num_ranks) reinterpret_cast<i32*>(h.records)[rank * h.num_hosts + c - h.num_ranks] = count;
  }
  return is_good;
}

/// Sums the counts of all ranks: where the rows of each begin at the ranks of this island, and how many there are at
/// any rank. False, on every rank, when these are too many somewhere. All threads.
DEVICE bool sum_counts(const HostLayoutParams& p, u64 tag) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  bool is_good = true;
#pragma unroll 1
  for (int to = static_cast<int>(threadIdx.x); to < h.num_ranks; to += static_cast<int>(blockDim.x)) {
    const bool is_here = routes.host_of[to] == h.host;
    i32* base = reinterpret_cast<i32*>(h.row_base) + routes.position[to];
    i64 sum = 0;
#pragma unroll 1
    for (int source = 0; source < h.num_ranks; ++source) {
      if (is_here) base[source * kNumRanks] = static_cast<i32>(sum);
      sum += reinterpret_cast<const i32*>(h.counts)[source * h.num_ranks + to];
    }
    if (is_here) base[h.num_ranks * kNumRanks] = static_cast<i32>(sum);
    if (sum <= p.max_recv_rows) continue;
    report_failure(h.call, tag, {kOverflow, to, static_cast<u64>(p.max_recv_rows), static_cast<u64>(sum), 0});
    is_good = false;
  }
  return is_good;
}

/// (token, k) pairs that this rank's experts receive. All threads; false after a report.
DEVICE bool sum_experts(const HostLayoutParams& p, u64 tag, u64 row) {
  const HostCall& h = p.host;
  const int num_local = h.num_experts / h.num_ranks, first = first_expert_of(my_rank(h), num_local);
  bool is_good = true;
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < num_local; e += static_cast<int>(blockDim.x)) {
    i64 sum = 0;
#pragma unroll 1
    for (int source = 0; source < h.num_ranks; ++source) {
      const i32 count = ld_relaxed_sys(row_of(h, source, row) + kRowCounts + h.num_ranks + h.num_hosts + first + e);
      sum += count;
      const i64 most = static_cast<i64>(h.max_tokens) * h.num_topk;
      if (count >= 0 && count <= most) continue;
      report_failure(h.call, tag, {kBadCount, source, static_cast<u64>(most), static_cast<u64>(count), 3});
      is_good = false;
    }
    reinterpret_cast<i32*>(h.info)[kInfoCounts + e] = static_cast<i32>(sum);
  }
  return is_good;
}

/// Lists the chunks that come to this host in the order in which they are pulled: chunk k of all sources before chunk
/// k + 1 of any. All ranks pack and pull in this order, so none waits in a circle: a chunk waits for a slot that is
/// freed by chunks before it in the order of every other rank.
DEVICE void list_chunks(const HostLayoutParams& p) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  const auto num_chunks = [&](int x) {
    const i32 count = reinterpret_cast<const i32*>(h.records)[routes.sources[x] * h.num_hosts + h.host];
    return (count + h.chunk_records - 1) / h.chunk_records;
  };
  i32 most = 0, total = 0;
  for (int x = 0; x < routes.num_sources; ++x) {
    most = max(most, num_chunks(x));
    total += num_chunks(x);
  }
  if (threadIdx.x == 0) reinterpret_cast<i32*>(h.info)[kInfoChunks] = total;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < most * routes.num_sources; i += static_cast<int>(blockDim.x)) {
    const int k = i / routes.num_sources, x = i % routes.num_sources;
    if (k >= num_chunks(x)) continue;
    i32 before = 0;
    for (int other = 0; other < routes.num_sources; ++other)
      before += min(num_chunks(other), k) + (other < x && num_chunks(other) > k);
    reinterpret_cast<u32*>(h.pull_order)[before] = static_cast<u32>(x) << kPullChunkBits | static_cast<u32>(k);
  }
}

/// Step 4. All threads; true when the call may go on, which all ranks find alike, unless rows were missing
/// (`all_came`). `bad_ids` reports those of this rank.
template <class BadIds>
DEVICE bool receive_rows(const HostLayoutParams& p, u64 tag, u64 row, BadIds bad_ids, bool& all_came) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  __shared__ u32 num_flaws;
  const int thread = static_cast<int>(threadIdx.x), num_warps = static_cast<int>(blockDim.x / 32);
  const auto note = [&](bool is_good) {
    if (!is_good) red_or_shared(&num_flaws, 1);
  };
  const auto has_flaws = [&] {  // all threads find the same, before any can note what it finds behind
    __syncthreads();
    const bool has_any = num_flaws != 0;
    __syncthreads();
    return has_any;
  };
  if (thread == 0) num_flaws = 0;
  __syncthreads();
#pragma unroll 1
  for (int rank = thread; rank < h.num_ranks; rank += static_cast<int>(blockDim.x)) note(await_row(h, tag, rank, row));
  all_came = !has_flaws();
  bad_ids();
  if (all_came) {
    __syncthreads();  // bad ids are reported before the refusal that they are
#pragma unroll 1
    for (int rank = thread; rank < h.num_ranks; rank += static_cast<int>(blockDim.x))
      note(check_head(p, tag, rank, row_of(h, rank, row)));
  }
  if (!has_flaws()) {
#pragma unroll 1
    for (int rank = warp_idx(); rank < h.num_ranks; rank += num_warps)
      note(copy_counts(p, tag, rank, row_of(h, rank, row)));
    note(sum_experts(p, tag, row));
  }
  const bool is_bad = has_flaws();
#pragma unroll 1
  for (int i = thread; i < routes.num_sources; i += static_cast<int>(blockDim.x)) {  // these rows have been read
    const int source = routes.sources[i];
    if (all_came || ld_acquire_sys(row_arrived(h, source, row)) == chunk_word(row, routes.row_bytes, 0))
      take_row(h, source, row);
  }
  if (is_bad) return false;
  note(sum_counts(p, tag));
  list_chunks(p);
  return !has_flaws();
}

namespace epee {

__global__ void __launch_bounds__(512, 1) layout_hosts(const __grid_constant__ HostLayoutParams p) {
  const HostCall& h = p.host;
  const int num_warps = static_cast<int>(blockDim.x / 32), num_columns = h.num_ranks + h.num_hosts;
  i32* shared = reinterpret_cast<i32*>(dynamic_shared());
  i32* totals = shared + num_warps * num_columns;
  const Counters counters = {shared, totals, totals + num_columns, totals + num_columns + h.num_experts, num_columns};
  const int num_counters = (num_warps + 1) * num_columns + h.num_experts + 1;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) shared[i] = 0;
  stage_experts(staged_experts(), h.experts, h.num_experts);
  __syncthreads();
  wait_previous_kernel();
  const u64 tag = current_tag(h.call);
  const u64 row = *state_words(h, kStateNextRowOffset);
  const Range tokens = piece(h.num_tokens, num_warps, warp_idx());
  count_tokens(p, tokens, counters);
  scan_counts(counters);
  const bool is_broken = *state_words(h, kStateBrokenOffset) != 0;
  const u32 flaw = p.known_info ? flaw_of(view_number(h.call), reinterpret_cast<const i32*>(p.known_info)) : 0;
  const i32 refusal = is_broken ? kBrokenStreamsCode : *counters.num_bad ? kBadExpert : p.refused;
  const bool is_sent = send_row(p, tag, row, counters, refusal ? refusal : static_cast<i32>(flaw), known_handle(p));
  assign_places(p, tokens, counters);
  bool all_came = false;
  const auto bad_ids = [&] {
    if (*counters.num_bad) report_bad_ids(p, tag, tokens);
  };
  const bool is_good = receive_rows(p, tag, row, bad_ids, all_came) && is_sent;
  i32* info = reinterpret_cast<i32*>(h.info);
  const int num_local = h.num_experts / h.num_ranks;
  __syncthreads();
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); p.mailbox && e < num_local; e += static_cast<int>(blockDim.x))
    st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kInfoCounts + e, info[kInfoCounts + e]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (!is_sent || !all_came) *state_words(h, kStateBrokenOffset) = 1;
  if (is_sent && all_came) mark_exchanged(h.call, tag);
  info[kInfoState] = is_good ? kHandleGood : kHandleBad;
  info[kInfoView] = static_cast<i32>(view_number(h.call));
  info[kInfoRows] = is_good ? reinterpret_cast<const i32*>(h.row_base)[h.num_ranks * kNumRanks + h.call.rank] : 0;
  info[kInfoCall] = static_cast<i32>(row);
  if (!is_good) mark_failed(h.call, tag);
  *state_words(h, kStateNextRowOffset) = row + 1;
  if (!p.mailbox) return;
  st_relaxed_sys(reinterpret_cast<i32*>(p.mailbox) + kInfoRows, info[kInfoRows]);
  st_release_sys(reinterpret_cast<u64*>(p.mailbox), static_cast<u64>(is_good ? kHandleGood : kHandleBad));
}

}  // namespace epee
