// The second kernel of a dispatch between hosts: rows into slots and out of them. Behind `layout_hosts`, which has
// exchanged counts. Protocol: `words.cuh`; roles of all kernels: `flows.cuh`.
//
//   packers   records into the slots of the gateways of this rank, one flow for each other host; and in turn with them
//             rows of this island into the memory of its ranks, which their rows of counts have granted
//   pullers   records out of the slots of all gateways of this host, those of this rank into their final rows. A unit
//             of work is a few adjacent records: threads read this rank's places in them, then the rows come one by
//             one. A puller that must wait for a chunk stores first what it has loaded.
// A packer that has no more records pulls, a puller that has no more units packs: so all warps end together.
//
// The gateway keeps the places of all ranks of its host for the combine (`served_places`).
#pragma once
#include "../../common/experts.cuh"
#include "pack.cuh"

/// What lies behind the row in a record.
enum MetaWord : int { kMetaToken = 0, kMetaPlaces };
DEVICE int meta_ids(const HostDispatchParams& p) { return kMetaPlaces + p.max_island; }
DEVICE int meta_weights(const HostDispatchParams& p) { return meta_ids(p) + p.host.num_topk; }
DEVICE int meta_scales(const HostDispatchParams& p) { return meta_weights(p) + p.host.num_topk; }

/// Where the result of the rank at `position` goes.
DEVICE u64 result_at(const HostDispatchParams& p, int position) {
  return p.slots[position] + static_cast<u64>(grants_of(p.host)[position]) * p.slot_bytes;
}

/// Bytes of a row in one of its pieces.
DEVICE u32 piece_bytes(const HostDispatchParams& p, int piece) {
  return static_cast<u32>(min(p.piece_bytes, p.row_bytes - piece * p.piece_bytes));
}

/// Writes what travels beside a row to its final place at a rank, whose experts are `num_local` from `first` on. The
/// whole warp; `meta` is in shared memory.
DEVICE void deliver_meta(const HostDispatchParams& p, u8* slot, int first, int num_local, i64 row, const i32* meta) {
  const i32 *ids = meta + meta_ids(p), *weights = meta + meta_weights(p);
  for (int k = lane_idx(); k < p.host.num_topk; k += 32) {
    const i32 expert = ids[k] - first;
    const bool is_there = expert >= 0 && expert < num_local;
    reinterpret_cast<i64*>(slot + p.topk_idx_offset)[row * p.host.num_topk + k] = is_there ? expert : -1;
    if (p.has_weights)
      reinterpret_cast<float*>(slot + p.weights_offset)[row * p.host.num_topk + k] =
          is_there ? __uint_as_float(static_cast<u32>(weights[k])) : 0.0f;
  }
  for (int s = lane_idx(); s < p.num_scales; s += 32)
    reinterpret_cast<i32*>(slot + p.scales_offset)[row * p.num_scales + s] = meta[meta_scales(p) + s];
  if (lane_idx() == 0) reinterpret_cast<i64*>(slot + p.src_token_offset)[row] = meta[kMetaToken];
}

/// Words behind a row that a thread reads ahead of their use: 96 of a warp hold the 56 scales of 7168 FP8 values.
constexpr int kMetaAhead = 3;

/// The rows of this rank's tokens; see `packer`. Flow f is host f.
struct TokenCargo {
  struct Meta {
    i32 word[kMetaAhead];
  };
  const HostDispatchParams& p;
  const Progress& progress;
  i32 base, rank;  // of thread j: this rank's first row at position j, and the rank there
  u64 result;      // and where its rows go
  int num_local;   // experts of a rank

  DEVICE TokenCargo(const HostDispatchParams& params, const Progress& shared)
      : p(params),
        progress(shared),
        base(0),
        rank(-1),
        result(0),
        num_local(params.host.num_experts / params.host.num_ranks) {
    const HostRoutes& routes = routes_of(p.host);
    if (lane_idx() >= kNumRanks) return;
    rank = rank_at(routes, p.host.host, lane_idx());
    base = reinterpret_cast<const i32*>(p.host.row_base)[my_rank(p.host) * kNumRanks + lane_idx()];
    result = result_at(p, lane_idx());
  }

  DEVICE int num_pieces() const { return (p.row_bytes + p.piece_bytes - 1) / p.piece_bytes; }
  DEVICE i32 find(int flow, i32 index) const {
    return reinterpret_cast<const i32*>(p.host.record_tokens)[static_cast<i64>(flow) * p.host.max_tokens + index];
  }

  DEVICE void load(i32 token, int piece, u8* stage, u64* barrier) const {
    const u32 num_bytes = piece_bytes(p, piece);
    mbarrier_arrive_expect(barrier, num_bytes);
    bulk_load(stage, reinterpret_cast<const u8*>(p.x) + token * p.x_stride + piece * static_cast<i64>(p.piece_bytes),
              num_bytes, barrier);
  }

  /// Word w behind the row.
  DEVICE i32 meta_word(const Record& record, i32 token, int w) const {
    const HostCall& h = p.host;
    const int position = w - kMetaPlaces, k = w - meta_ids(p);
    if (w == kMetaToken) return token;
    if (position < p.max_island) {
      const int to = rank_at(routes_of(h), record.flow, position);
      return to < 0 ? -1 : reinterpret_cast<const i32*>(h.rank_places)[static_cast<i64>(token) * h.num_ranks + to];
    }
    if (k < h.num_topk) return reinterpret_cast<const i32*>(h.expert_of)[static_cast<i64>(token) * h.num_topk + k];
    if (k < 2 * h.num_topk && p.has_weights)
      return reinterpret_cast<const i32*>(p.topk_weights)[static_cast<i64>(token) * h.num_topk + k - h.num_topk];
    const int s = k - 2 * h.num_topk;
    if (s >= 0 && s < p.num_scales)
      return reinterpret_cast<const i32*>(p.scales)[token * p.scale_row_stride + s * p.scale_column_stride];
    return 0;
  }
  DEVICE Meta read_meta(const Record& record, i32 token) const {
    Meta meta;
#pragma unroll
    for (int i = 0; i < kMetaAhead; ++i) {
      const int w = lane_idx() + 32 * i;
      meta.word[i] = w < p.meta_bytes / 4 ? meta_word(record, token, w) : 0;
    }
    return meta;
  }
  DEVICE void write_meta(const Record& record, i32 token, const Meta& meta, u8* stage) const {
    i32* to = reinterpret_cast<i32*>(stage + piece_bytes(p, num_pieces() - 1));
#pragma unroll
    for (int i = 0; i < kMetaAhead; ++i)
      if (lane_idx() + 32 * i < p.meta_bytes / 4) to[lane_idx() + 32 * i] = meta.word[i];
#pragma unroll 1
    for (int w = lane_idx() + 32 * kMetaAhead; w < p.meta_bytes / 4; w += 32) to[w] = meta_word(record, token, w);
    fence_proxy_async_shared();
    __syncwarp();
  }

  DEVICE void store(const Record& record, i32 token, int piece, const u8* stage) const {
    const HostCall& h = p.host;
    const Flow& flow = progress.out[record.flow];
    const bool is_last = piece + 1 == num_pieces();
    const u32 num_bytes = piece_bytes(p, piece);
    const i64 offset = piece * static_cast<i64>(p.piece_bytes);
    if (flow.link >= 0) {
      u8* to = record_at(h, progress, flow, record.index);
      if (lane_idx() == 0) bulk_store(to + offset, stage, num_bytes + (is_last ? static_cast<u32>(p.meta_bytes) : 0));
      return;
    }
    const i32* meta = reinterpret_cast<const i32*>(stage + num_bytes);
#pragma unroll 1
    for (int i = 1; i <= kNumRanks; ++i) {  // each rank begins behind itself, so that no inlet is crowded
      const int position = h.call.rank + i < kNumRanks ? h.call.rank + i : h.call.rank + i - kNumRanks;
      const int to = __shfl_sync(~0u, rank, position);
      const i32 place = is_last
                            ? meta[kMetaPlaces + position]
                            : reinterpret_cast<const i32*>(h.rank_places)[static_cast<i64>(token) * h.num_ranks + to];
      if (place < 0) continue;
      const i64 row = __shfl_sync(~0u, base, position) + place;
      u8* slot = reinterpret_cast<u8*>(__shfl_sync(~0u, result, position));
      if (lane_idx() == 0) bulk_store(slot + row * p.row_bytes + offset, stage, num_bytes);
      if (is_last) deliver_meta(p, slot, first_expert_of(to, num_local), num_local, row, meta);
    }
  }
};

/// A few adjacent records of a chunk.
struct Unit {
  int flow, k;
  i32 first, length;
};

/// The units that a puller works on, in the order of `pull_order`. What the next one needs is read while rows of the
/// one at hand are moved, a step in each `look_ahead`: where it is, and when it has come, the places of its records.
struct Puller {
  const HostDispatchParams& p;
  const Progress& progress;
  u64 tag;
  int units_per_chunk, num_units;
  int upcoming;  // thread 0: the unit behind `next`, taken ahead of its use
  u32 entry;     // thread 0: its chunk in `pull_order`, if `has_entry`
  bool has_entry, has_next, has_places;
  Unit next;
  i32 place;  // of this thread's record of `next`, if `has_places`
  int flow;   // of the unit at hand, whose facts are these: rank and index among those served here
  int source, served;
  i32 base, num_rows, first;  // where the rows of this source begin at this rank, how many; the unit's first record
  i32 row;                    // of this thread's record at this rank, -1 for none
  u32 mine;                   // threads whose records are still to be pulled

  DEVICE Puller(const HostDispatchParams& params, const Progress& shared, u64 call)
      : p(params),
        progress(shared),
        tag(call),
        entry(0),
        has_entry(false),
        has_next(false),
        has_places(false),
        next{0, 0, 0, 0},
        place(-1),
        flow(-1),
        source(0),
        served(-1),
        base(0),
        num_rows(0),
        first(0),
        row(-1),
        mine(0) {
    units_per_chunk = (p.host.chunk_records + kPullRecords - 1) / kPullRecords;
    num_units = reinterpret_cast<const i32*>(p.host.info)[kInfoChunks] * units_per_chunk;
    upcoming = 0;
    take();
  }
  DEVICE void take() {
    if (lane_idx() == 0)
      upcoming = static_cast<int>(
          atom_add_relaxed_gpu(reinterpret_cast<u32*>(state_counters(p.host, kStateNextUnitOffset)), 1));
  }
  DEVICE void read_entry() {
    if (lane_idx() == 0 && upcoming < num_units)
      entry = reinterpret_cast<const u32*>(p.host.pull_order)[upcoming / units_per_chunk];
    has_entry = true;
  }

  /// Goes to the next unit that has records. False when there is none. The whole warp.
  DEVICE bool advance() {
    while (!has_next) {
      const int unit = __shfl_sync(~0u, upcoming, 0);
      if (unit >= num_units) return false;
      if (!has_entry) read_entry();
      const u32 chunk = __shfl_sync(~0u, entry, 0);
      has_entry = false;
      take();
      next.flow = static_cast<int>(chunk >> kPullChunkBits);
      next.k = static_cast<int>(chunk & ((1u << kPullChunkBits) - 1));
      next.first = unit % units_per_chunk * kPullRecords;
      next.length = min(kPullRecords, chunk_length(p.host, progress.in[next.flow], next.k) - next.first);
      next.first += next.k * p.host.chunk_records;
      has_next = next.length > 0;
    }
    return true;
  }

  /// Whether the next unit, which there is, has come. The whole warp.
  DEVICE bool look() {
    const bool is_there =
        lane_idx() == 0 && has_arrived(p.host, tag, progress, progress.in[next.flow], static_cast<u32>(next.k));
    if (is_there) fence_proxy_async();  // this thread's bulk loads come behind the word of the chunk
    __syncwarp();                       // what one thread has acquired, all of them read
    return __shfl_sync(~0u, static_cast<int>(is_there), 0) != 0;
  }
  DEVICE i32 place_in(i32 record, int position) const {
    const u8* at = record_at(p.host, progress, progress.in[next.flow], record) + p.row_bytes;
    return ld_relaxed_sys(reinterpret_cast<const i32*>(at) + kMetaPlaces + position);
  }
  DEVICE void read_places() {
    place = lane_idx() < next.length ? place_in(next.first + lane_idx(), p.host.call.rank) : -1;
    has_places = true;
  }
  DEVICE void look_ahead() {
    if (has_next) {
      if (!has_places && look()) read_places();
    } else if (has_entry) {
      advance();
    } else {
      read_entry();
    }
  }

  DEVICE i32 base_of(int from, int position) const {
    return reinterpret_cast<const i32*>(p.host.row_base)[from * kNumRanks + position];
  }
  /// A record's place, or -1 after a report that its source has no so many rows there.
  DEVICE i32 checked(i32 found, i32 most, i32 record) const {
    if (found >= -1 && found < most) return found;
    report_failure(
        p.host.call, tag,
        {kBadRow, source, static_cast<u64>(most), static_cast<u64>(static_cast<i64>(found)), static_cast<u64>(record)});
    return -1;
  }

  /// Begins the next unit, whose places are read. Records for others count as read. The whole warp.
  DEVICE void open() {
    const HostCall& h = p.host;
    const HostRoutes& routes = routes_of(h);
    const int lane_id = lane_idx();
    if (next.flow != flow) {
      flow = next.flow;
      source = routes.sources[flow];
      served = routes.served_idx[source];
      base = base_of(source, h.call.rank);
      num_rows = base_of(source + 1, h.call.rank) - base;
    }
    first = next.first;
    place = checked(place, num_rows, first + lane_id);
    row = place < 0 ? -1 : base + place;
    if (served >= 0) {
      i32* kept =
          reinterpret_cast<i32*>(h.served_places) + (static_cast<i64>(served) * h.max_tokens + first) * kNumRanks;
      if (lane_id < next.length) kept[lane_id * kNumRanks + h.call.rank] = place;
#pragma unroll 1
      for (int i = lane_id; kNumRanks > 1 && i < next.length * kNumRanks; i += 32) {
        const int position = i % kNumRanks;
        if (position == h.call.rank) continue;
        const i32 most = base_of(source + 1, position) - base_of(source, position);
        kept[i] = checked(place_in(first + i / kNumRanks, position), most, first + i / kNumRanks);
      }
    }
    mine = __ballot_sync(~0u, row >= 0);
    __syncwarp();  // all threads have read their records: see `count_in`
    if (lane_id == 0)
      count_in(h, progress, flow, static_cast<u32>(next.k), static_cast<u32>(next.length - __popc(mine)));
    has_next = has_places = false;
  }

  /// The next record of this rank, and its final row; `flow` is -1 when there is none, or (`must_wait`) none has come.
  DEVICE Record take_record(bool& must_wait, i64& to) {
    must_wait = false;
    while (!mine) {
      if (!advance()) return {-1, 0};
      if (!has_places) {
        must_wait = !look();
        if (must_wait) return {-1, 0};
        read_places();
      }
      open();
    }
    const int next_one = __ffs(static_cast<int>(mine)) - 1;
    mine &= mine - 1;
    to = __shfl_sync(~0u, row, next_one);
    return {flow, first + next_one};
  }
};

/// A piece of a record between its load and its store.
struct Pulled {
  Record record;
  i64 row;
  int piece;
};

/// Moves what comes to this rank to its final rows. One warp, two stages; `use` and result as of `packer`.
DEVICE bool pull_records(const HostDispatchParams& p, u64 tag, const Progress& progress, u8* stages, i64 stage_bytes,
                         u64* barriers, u32& use) {
  const HostCall& h = p.host;
  const int lane_id = lane_idx(), num_pieces = (p.row_bytes + p.piece_bytes - 1) / p.piece_bytes;
  u8* slot = reinterpret_cast<u8*>(result_at(p, h.call.rank));
  const int num_local = h.num_experts / h.num_ranks, first_expert = first_expert_of(my_rank(h), num_local);
  Puller units(p, progress, tag);
  bool must_wait = false;
  const auto find = [&] {
    Pulled found = {{-1, 0}, 0, 0};
    found.record = units.take_record(must_wait, found.row);
    return found;
  };
  const auto await = [&](Pulled& found) {  // nothing of this warp is held back meanwhile
    const int source = routes_of(h).sources[units.next.flow];
    while (must_wait && warp_wait(h, tag, source, 40, [&] { return units.look(); })) found = find();
  };
  const auto load = [&](const Pulled& at) {
    const u32 meta = at.piece + 1 == num_pieces ? static_cast<u32>(p.meta_bytes) : 0;
    const u32 num_bytes = piece_bytes(p, at.piece) + meta;
    const u8* record = record_at(h, progress, progress.in[at.record.flow], at.record.index);
    if (lane_id == 0) {
      bulk_wait_read<0>();
      mbarrier_arrive_expect(barriers + (use & 1), num_bytes);
      bulk_load(stages + (use & 1) * stage_bytes, record + at.piece * static_cast<i64>(p.piece_bytes), num_bytes,
                barriers + (use & 1));
    }
    __syncwarp();
  };
  Pulled at = find();
  await(at);
  if (at.record.flow >= 0) load(at);
#pragma unroll 1
  while (at.record.flow >= 0) {
    const u32 now = use++;
    perhaps_stall(tag, h.call.rank, 6);
    const bool is_last = at.piece + 1 == num_pieces;
    Pulled ahead = {at.record, at.row, at.piece + 1};
    if (is_last) ahead = find();
    if (ahead.record.flow >= 0) load(ahead);
    const bool is_loaded = wait_load(h.call, tag, barriers + (now & 1), now >> 1 & 1);  // the whole warp read the stage
    if (__ballot_sync(~0u, is_loaded) != ~0u) return false;
    const u8* stage = stages + (now & 1) * stage_bytes;
    const u32 num_bytes = piece_bytes(p, at.piece);
    if (lane_id == 0) {
      if (is_last) count_in(h, progress, at.record.flow, chunk_of(h, at.record.index), 1);
      bulk_store(slot + at.row * p.row_bytes + at.piece * static_cast<i64>(p.piece_bytes), stage, num_bytes);
      bulk_commit();
    }
    if (is_last)
      deliver_meta(p, slot, first_expert, num_local, at.row, reinterpret_cast<const i32*>(stage + num_bytes));
    __syncwarp();  // the threads have read the stage
    units.look_ahead();
    if (is_last && must_wait) {
      await(ahead);
      if (ahead.record.flow >= 0) load(ahead);
    }
    at = ahead;
  }
  if (lane_id == 0) bulk_wait<0>();
  return true;
}

namespace epee {

__global__ void __launch_bounds__(kMoveThreads, 1) dispatch_hosts(const __grid_constant__ HostDispatchParams p) {
  const HostCall& h = p.host;
  const HostRoutes& routes = routes_of(h);
  __shared__ u64 barriers[2 * kMaxWorkers];
  const int num_workers = p.num_pack_warps + p.num_pull_warps, warp = warp_idx(), me = my_rank(h);
  init_barriers(barriers, 2 * num_workers);
  wait_previous_kernel();
  const u64 tag = current_tag(h.call);
  const i32* records = reinterpret_cast<const i32*>(h.records);
  const Progress progress = make_progress(
      h, h.num_hosts, routes.num_sources, num_workers, static_cast<u32>(p.row_bytes + p.meta_bytes), 0,
      [&](bool is_out, int i, Flow& flow) {
        flow.link = is_out ? routes.gateway_outlet[i] : routes.source_inlet[routes.sources[i]];
        flow.total = is_out ? records[me * h.num_hosts + i] : records[routes.sources[i] * h.num_hosts + h.host];
      });
  const bool has_begun = reinterpret_cast<const i32*>(h.info)[kInfoState] == kHandleGood;
  const i64 stage_bytes = min(p.piece_bytes, p.row_bytes) + p.meta_bytes;
  u8* stages = dynamic_shared() + progress_bytes(h, progress.num_out, progress.num_in) + 2 * warp * stage_bytes;
  if (warp < num_workers) {
    u32 use = 0;
    const bool is_packer = warp < p.num_pack_warps;
#pragma unroll 1
    for (int role = 0; has_begun && role < 2; ++role) {  // who has no more of its own work does the other's
      const bool is_good =
          (role == 0) == is_packer
              ? packer(h, tag, progress, TokenCargo(p, progress), stages, stage_bytes, barriers + 2 * warp, use)
              : pull_records(p, tag, progress, stages, stage_bytes, barriers + 2 * warp, use);
      if (!is_good) break;
    }
    end_worker(progress);
  } else if (warp == num_workers) {
    const auto num_sent = [&](bool is_out, int i) {
      const int rank = is_out ? routes.outlets[i].rank : routes.inlets[i].rank, host = routes.host_of[rank];
      const bool is_used = is_out ? routes.gateway_outlet[host] == i : routes.source_inlet[rank] == i;
      const i32 count = is_out ? records[me * h.num_hosts + host] : records[rank * h.num_hosts + h.host];
      return is_used ? (count + h.chunk_records - 1) / h.chunk_records : 0;
    };
    if (announcer(h, tag, progress)) {
      const u64 refusal = *state_words(h, kStateBrokenOffset) != 0 ? kBrokenStreamsCode : kBadHandleCode;
      end_call(h, tag, progress, has_begun ? 0 : refusal, kControlDispatchDoneOffset, num_sent);
      if (has_failed(h.call, tag)) reinterpret_cast<i32*>(h.info)[kInfoState] = kHandleBad;
    }
  } else {
    const int is_mine = lane_idx() == 0 && is_watching(h, tag);
    if (__shfl_sync(~0u, is_mine, 0))
      watcher(h, tag, progress);
    else
      keep_mirror(h, progress);
  }
}

}  // namespace epee
