// A combine between hosts: partial sums for each record go back to its source, which adds up those of all hosts.
//
//   partials  the gateway of a source: for each of its records the sum of its rows at the ranks of this host, in
//             float32, ranks ascending, rounded to the payload, into the slots for that source. Rows of neighbours are
//             loaded from their memory, as soon as these have said that they are there (`combine_ready`).
//   summers   for each token of this rank: its own host's sum, made and rounded alike; then the sums of all hosts in
//             float32, hosts ascending (by lowest rank); then the biases; rounded once. Sums begin at -0, that of a
//             token without rows is +0 (`epee/reference/two_level.py`).
//
// A partial sum has one reader, the rank that owns the page (`FOR_ONE`). Tokens are summed in their order, so all
// records of a chunk are read when the tokens up to its last one are. They wait for chunks of several hosts; these
// leave their gateways each in its own flow, of which none waits for another (`flows.cuh`).
#pragma once
#include "../../common/lanes.cuh"
#include "pack.cuh"

typedef Lanes<kBf16> Sum;

/// A row of the memory that a rank of this island has for a combine; -1 for none.
DEVICE i32 row_idx(const HostCombineParams& p, int source, int position, i32 place) {
  if (place < 0) return -1;
  const i64 row =
      reinterpret_cast<const i32*>(p.host.row_base)[source * kNumRanks + position] + static_cast<i64>(place);
  return is_row(row, p.max_rows) ? static_cast<i32>(row) : -1;
}
/// `rows`: where those of each rank of the island lie, by position.
DEVICE const u8* row_at(const HostCombineParams& p, const u64* rows, int position, i32 row) {
  return row < 0 ? nullptr : reinterpret_cast<const u8*>(rows[position]) + static_cast<i64>(row) * p.row_bytes;
}

/// The row of a record at a position.
DEVICE i32 served_row(const HostCombineParams& p, const Record& record, int position) {
  if (position >= kNumRanks) return -1;
  const i64 at = (static_cast<i64>(record.flow) * p.host.max_tokens + record.index) * kNumRanks + position;
  return row_idx(p, routes_of(p.host).served[record.flow], position,
                 reinterpret_cast<const i32*>(p.host.served_places)[at]);
}

DEVICE const u8* of_lane(const u8* address, int lane_id) {
  return reinterpret_cast<const u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(address), lane_id));
}

/// Loads this thread's vectors of a row from vector `first` on.
DEVICE void load_vectors(const HostCombineParams& p, const u8* row, int first, Vec16 (&to)[kSumVectors]) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) {
    const int at = (first + 32 * u + lane_idx()) * 16;
    if (at < p.row_bytes) to[u] = ld_vec16(row + at);
  }
}
DEVICE void store_vectors(const HostCombineParams& p, u8* row, int first, const Vec16 (&from)[kSumVectors]) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) {
    const int at = (first + 32 * u + lane_idx()) * 16;
    if (at < p.row_bytes) st_vec16(row + at, from[u]);
  }
}

DEVICE void begin_sums(Sum (&sums)[kSumVectors], float value) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) sums[u] = filled<kBf16>(value);
}
DEVICE void add_vectors(Sum (&sums)[kSumVectors], const Vec16 (&what)[kSumVectors]) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) add<kBf16>(sums[u], unpack<kBf16>(what[u]));
}
DEVICE void round_sums(const Sum (&sums)[kSumVectors], Vec16 (&to)[kSumVectors]) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) to[u] = pack<kBf16>(sums[u]);
}

/// `to` = `to` + `what`, rounded; without `has_two`, `what` alone. One vector after the other, so that a row of vectors
/// needs no registers beside these. The order of two does not matter: rounding gives every NaN the same bits.
DEVICE void add_packed(Vec16 (&to)[kSumVectors], const Vec16 (&what)[kSumVectors], bool has_two) {
#pragma unroll
  for (int u = 0; u < kSumVectors; ++u) {
    Sum sum = filled<kBf16>(-0.0f);
    if (has_two) sum = unpack<kBf16>(to[u]);
    add<kBf16>(sum, unpack<kBf16>(what[u]));
    to[u] = pack<kBf16>(sum);
  }
}

/// The sum of the rows whose threads are in `ranks`, from vector `first` on, rounded.
DEVICE void sum_here(const HostCombineParams& p, const u8* row, u32 ranks, int first, Vec16 (&to)[kSumVectors]) {
  load_vectors(p, of_lane(row, __ffs(static_cast<int>(ranks)) - 1), first, to);
  if (!(ranks & (ranks - 1))) return add_packed(to, to, false);
  Sum sums[kSumVectors];
  begin_sums(sums, -0.0f);
  add_vectors(sums, to);
#pragma unroll 1
  for (u32 left = ranks & (ranks - 1); left; left &= left - 1) {
    load_vectors(p, of_lane(row, __ffs(static_cast<int>(left)) - 1), first, to);
    add_vectors(sums, to);
  }
  round_sums(sums, to);
}

/// Partial sums of one row each, which are these rows: an island of one rank. See `packer`.
struct RowCargo {
  const HostCombineParams& p;
  const Progress& progress;
  const u64* rows;

  DEVICE int num_pieces() const { return (p.row_bytes + p.piece_bytes - 1) / p.piece_bytes; }
  DEVICE u32 num_bytes(int piece) const {
    return static_cast<u32>(min(p.piece_bytes, p.row_bytes - piece * p.piece_bytes));
  }
  DEVICE i32 find(int flow, i32 index) const {
    const i32 row = served_row(p, {flow, index}, 0);
    return row < 0 ? 0 : row;  // a place that no dispatch leaves behind
  }
  DEVICE void load(i32 row, int piece, u8* stage, u64* barrier) const {
    const u8* from = reinterpret_cast<const u8*>(rows[0]) + static_cast<i64>(row) * p.row_bytes;
    mbarrier_arrive_expect(barrier, num_bytes(piece));
    bulk_load(stage, from + piece * static_cast<i64>(p.piece_bytes), num_bytes(piece), barrier);
  }
  struct Meta {};
  DEVICE Meta read_meta(const Record&, i32) const { return {}; }
  DEVICE void write_meta(const Record&, i32, const Meta&, u8*) const {}
  DEVICE void store(const Record& record, i32, int piece, const u8* stage) const {
    const Flow& flow = progress.out[record.flow];
    u8* to = record_at(p.host, progress, flow, record.index);
    if (lane_idx() == 0) bulk_store(to + piece * static_cast<i64>(p.piece_bytes), stage, num_bytes(piece));
  }
};

/// Sums up the records of the sources that this rank serves. One warp.
DEVICE void sum_records(const HostCombineParams& p, u64 tag, const Progress& progress, const u64* rows) {
  const HostCall& h = p.host;
  Claims claims(h, progress);
#pragma unroll 1
  for (Record at = claims.await(h, tag, progress); at.flow >= 0; at = claims.await(h, tag, progress)) {
    perhaps_stall(tag, h.call.rank, 7);
    const u8* row = row_at(p, rows, lane_idx(), served_row(p, at, lane_idx()));
    const u32 ranks = __ballot_sync(~0u, row != nullptr);
    const Flow& flow = progress.out[at.flow];
    u8* to = record_at(h, progress, flow, at.index);
#pragma unroll 1
    for (int first = 0; first * 16 < p.row_bytes; first += 32 * kSumVectors) {
      Vec16 sum[kSumVectors];
      sum_here(p, row, ranks, first, sum);
      store_vectors(p, to, first, sum);
    }
    __syncwarp();
    if (lane_idx() == 0) count_out(h, progress, at);
  }
}

/// What the threads of a summer know of a token: thread j its row at position j of this island, thread i its sum of
/// host i.
struct Token {
  const u8* row;
  const u8* part;
  u32 ranks, hosts;  // threads that have one; this host's sum is made here
};

/// Waits until the sums of a token have come, and finds its rows. `seen`: behind the last chunk of this thread's host
/// that has come. The whole warp; false after a report.
DEVICE bool find_token(const HostCombineParams& p, u64 tag, const Progress& progress, const u64* rows, i64 token,
                       u32& seen, Token& found) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  const int thread = lane_idx();
  found = {nullptr, nullptr, 0, 0};
  if (thread < kNumRanks) {
    const int to = rank_at(routes, h.host, thread);
    const i32 place = reinterpret_cast<const i32*>(h.rank_places)[token * h.num_ranks + to];
    found.row = row_at(p, rows, thread, row_idx(p, my_rank(h), thread, place));
  }
  const bool is_away = thread < h.num_hosts && thread != h.host;
  const i32 record = is_away ? reinterpret_cast<const i32*>(h.host_records)[token * h.num_hosts + thread] : -1;
  if (record >= 0) found.part = record_at(h, progress, progress.in[thread], record);
  const auto has_come = [&] {
    bool is_there = true;
    if (record >= 0) {
      const u32 k = chunk_of(h, record);
      is_there = seen == k + 1 || has_arrived(h, tag, progress, progress.in[thread], k);
      if (is_there) seen = k + 1;
    }
    __syncwarp();  // what one thread has acquired, all of them read
    return __ballot_sync(~0u, is_there) == ~0u;
  };
  found.ranks = __ballot_sync(~0u, found.row != nullptr);
  found.hosts = __ballot_sync(~0u, found.part != nullptr);
  if (has_come()) return true;
  const int first = __ffs(static_cast<int>(found.hosts)) - 1;
  return warp_wait(h, tag, routes.inlets[progress.in[first].link].rank, 41, has_come);
}

/// Adds up a token, whose row of the result and of the biases begins at byte `offset`. The whole warp.
DEVICE void sum_token(const HostCombineParams& p, const Token& at, i64 offset) {
  u8* to = reinterpret_cast<u8*>(p.out) + offset;
  const int own = p.host.host, early = __ffs(static_cast<int>(at.hosts)) - 1;
  const u32 hosts = at.hosts | (at.ranks ? 1u << own : 0);
  const bool is_simple = !(at.hosts & (at.hosts - 1)) && !p.bias_0;  // at most one sum of another host
#pragma unroll 1
  for (int first = 0; first * 16 < p.row_bytes; first += 32 * kSumVectors) {
    Vec16 here[kSumVectors] = {}, away[kSumVectors] = {};
    if (at.hosts) load_vectors(p, of_lane(at.part, early), first, away);  // under way while this host's rows are added
    if (at.ranks) sum_here(p, at.row, at.ranks, first, here);
    if (is_simple) {
      if (at.hosts) add_packed(here, away, at.ranks != 0);
      store_vectors(p, to, first, here);
      continue;
    }
    Sum sums[kSumVectors];
    begin_sums(sums, hosts ? -0.0f : 0.0f);
#pragma unroll 1
    for (u32 left = hosts; left; left &= left - 1) {
      const int host = __ffs(static_cast<int>(left)) - 1;
      if (host == own) {
        add_vectors(sums, here);
        continue;
      }
      if (host != early) load_vectors(p, of_lane(at.part, host), first, away);
      add_vectors(sums, away);
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const u64 bias = i == 0 ? p.bias_0 : p.bias_1;
      if (!bias) continue;
      load_vectors(p, reinterpret_cast<const u8*>(bias) + offset, first, away);
      add_vectors(sums, away);
    }
    round_sums(sums, here);
    store_vectors(p, to, first, here);
  }
}

/// Adds up the tokens of this rank. One warp.
DEVICE void sum_tokens(const HostCombineParams& p, u64 tag, const Progress& progress, const u64* rows) {
  const HostCall& h = p.host;
  const auto take = [&] {
    u32* counter = reinterpret_cast<u32*>(state_counters(h, kStateNextUnitOffset));
    return lane_idx() == 0 ? static_cast<i32>(atom_add_relaxed_gpu(counter, 1)) : 0;
  };
  u32 seen = 0;
  i32 upcoming = take();
#pragma unroll 1
  for (i32 token = __shfl_sync(~0u, upcoming, 0); token < h.num_tokens; token = __shfl_sync(~0u, upcoming, 0)) {
    upcoming = take();
    perhaps_stall(tag, h.call.rank, 8);
    Token found;
    if (!find_token(p, tag, progress, rows, token, seen, found)) return;
    sum_token(p, found, token * static_cast<i64>(p.row_bytes));
    __syncwarp();
    if (found.part) count_in(h, progress, lane_idx(), seen - 1, 1);
  }
}

/// The word by which a rank says that its rows are there, in which slot, and of which dispatch: 16 bits of its number.
constexpr int kReadyShift = 24;
DEVICE u64 ready_word(const HostCall& h, u64 tag, int slot) {
  return tag << kReadyShift | static_cast<u64>(slot) << 16 |
         (static_cast<u32>(reinterpret_cast<const i32*>(h.info)[kInfoCall]) & 0xFFFF);
}

/// Waits until the rows of all ranks of this island are there, all of the same dispatch, and finds them: all warps of
/// the block write the same into `rows`. The whole warp; false after a report.
DEVICE bool await_rows(const HostCombineParams& p, u64 tag, u64* rows) {
  const int position = lane_idx();
  bool is_there = true;
  if (position < kNumRanks) {
    const u64* word = state_words(p.host, kStateCombineReadyOffset) + position;
    const int rank = rank_at(routes_of(p.host), p.host.host, position);
    const u64 want = ready_word(p.host, tag, 0), start = global_time_ns();
    u64 got;
    is_there = bounded_wait<kPollsPerLook>([&] { return (got = ld_acquire_sys(word)) >> kReadyShift == tag; },
                                           [&] { return must_stop(p.host, tag, start, rank, want, got, 42); });
    const int slot = static_cast<int>(got >> 16 & 0xFF);
    if (is_there && (got & 0xFFFF) != (want & 0xFFFF))
      report_failure(p.host.call, tag, {kMismatch, rank, want & 0xFFFF, got & 0xFFFF, 46});
    else if (is_there && slot >= p.num_slots)
      report_failure(p.host.call, tag, {kBadRow, rank, static_cast<u64>(p.num_slots), static_cast<u64>(slot), 47});
    is_there = is_there && (got & 0xFFFF) == (want & 0xFFFF) && slot < p.num_slots;
    if (is_there) rows[position] = p.slots[position] + static_cast<u64>(slot) * p.slot_bytes;
  }
  __syncwarp();
  fence_proxy_async();
  return __ballot_sync(~0u, is_there) == ~0u;
}

namespace epee {

__global__ void __launch_bounds__(kMoveThreads, 1) combine_hosts_bf16(const __grid_constant__ HostCombineParams p) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  __shared__ u64 barriers[2 * kMaxWorkers];
  __shared__ u64 rows[kMaxLocal];  // where those of each rank of the island lie
  const int num_workers = p.num_pack_warps + p.num_sum_warps, warp = warp_idx(), me = my_rank(h);
  init_barriers(barriers, 2 * p.num_pack_warps);
  wait_previous_kernel();
  const u64 tag = current_tag(h.call);
  const i32* records = reinterpret_cast<const i32*>(h.records);
  const auto back = [&](int position, int host) { return routes.return_inlet[position * kMaxHosts + host]; };
  const i32* info = reinterpret_cast<const i32*>(h.info);
  const u32 flags = kForOne | (static_cast<u32>(info[kInfoCall]) & ((1u << kCallBits) - 1)) << kCallShift;
  const Progress& progress = make_progress(h, routes.num_served, h.num_hosts, num_workers,
                                           static_cast<u32>(p.row_bytes), flags, [&](bool is_out, int i, Flow& flow) {
                                             flow.link = is_out ? routes.served_outlet[i] : back(h.call.rank, i);
                                             if (flow.link >= 0)
                                               flow.total = is_out ? records[routes.served[i] * h.num_hosts + h.host]
                                                                   : records[me * h.num_hosts + i];
                                           });
  const bool is_broken = *state_words(h, kStateBrokenOffset) != 0;
  const u64 refusal = is_broken   ? kBrokenStreamsCode
                      : p.refused ? static_cast<u64>(p.refused)
                                  : flaw_of(view_number(h.call), info);
  const bool has_begun = refusal == 0;
  if (!has_begun && threadIdx.x == 0 && blockIdx.x == 0) {
    if (p.refused)  // this rank's cpu knows why
      mark_failed(h.call, tag);
    else
      report_failure(h.call, tag, {kRefused, me, 0, refusal, 43});
  }
  const i64 stage_bytes = min(p.piece_bytes, p.row_bytes);
  u8* stages = dynamic_shared() + progress_bytes(h, progress.num_out, progress.num_in) + 2 * warp * stage_bytes;
  if (warp < num_workers) {
    const bool has_rows = has_begun && await_rows(p, tag, rows);
    u32 use = 0;
    if (has_rows && warp < p.num_pack_warps && kNumRanks == 1)
      packer(h, tag, progress, RowCargo{p, progress, rows}, stages, stage_bytes, barriers + 2 * warp, use);
    else if (has_rows && warp < p.num_pack_warps)
      sum_records(p, tag, progress, rows);
    if (has_rows) sum_tokens(p, tag, progress, rows);  // packers that have no more records as well
    if (has_rows && warp >= p.num_pack_warps && kNumRanks != 1) sum_records(p, tag, progress, rows);
    end_worker(progress);
  } else if (warp == num_workers) {
    const auto num_sent = [&](bool is_out, int i) {
      const int rank = is_out ? routes.outlets[i].rank : routes.inlets[i].rank, host = routes.host_of[rank];
      const int position = is_out ? 0 : routes.inlets[i].position, source = rank_at(routes, h.host, position);
      const bool is_used = is_out ? routes.served_idx[rank] >= 0 : back(position, host) == i;
      const i32 count = is_out ? records[rank * h.num_hosts + h.host] : records[source * h.num_hosts + host];
      return is_used ? (count + h.chunk_records - 1) / h.chunk_records : 0;
    };
    if (announcer(h, tag, progress))
      end_call(h, tag, progress, refusal, kControlCombineDoneOffset, num_sent, p.refused != 0);
  } else {
    const int is_mine = lane_idx() == 0 && is_watching(h, tag);
    if (!__shfl_sync(~0u, is_mine, 0)) {
      keep_mirror(h, progress);
      return;
    }
    if (has_begun && lane_idx() < kNumRanks)
      st_release_sys(state_words(h, lane_idx(), kStateCombineReadyOffset) + h.call.rank, ready_word(h, tag, p.slot));
    watcher(h, tag, progress);
  }
}

}  // namespace epee
