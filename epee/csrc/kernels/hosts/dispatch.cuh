// The second kernel of a dispatch between hosts: rows into slots and out of them. Behind `layout_hosts`, which has
// exchanged counts. Protocol: `words.cuh`; roles of all kernels: `flows.cuh`.
//
//   packers   records into the slots of the gateways of this rank, one flow for each other host; where none of these
//             has room, rows of this island into the memory of its ranks, which their rows of counts have granted
//   pullers   records out of the slots of all gateways of this host, those of this rank into their final rows. A unit
//             of work is a few adjacent records: threads read this rank's places in them, then the rows come one by
//             one. A puller that must wait for a chunk stores first what it has loaded.
//
// The gateway keeps the places of all ranks of its host for the combine (`served_places`).
#pragma once
#include "pack.cuh"

/// What lies behind the row in a record.
enum MetaWord : int { kMetaToken = 0, kMetaPlaces };
DEVICE int meta_ids(const HostDispatchParams& p) { return kMetaPlaces + p.max_island; }
DEVICE int meta_weights(const HostDispatchParams& p) { return meta_ids(p) + p.host.num_topk; }

/// Bytes of a row in one of its pieces.
DEVICE u32 piece_bytes(const HostDispatchParams& p, int piece) {
  return static_cast<u32>(min(p.piece_bytes, p.row_bytes - piece * p.piece_bytes));
}

/// Writes what travels beside a row to its final place at rank `to`. The whole warp; `meta` is in shared memory.
DEVICE void deliver_meta(const HostDispatchParams& p, u8* slot, int to, i64 row, const i32* meta) {
  const int num_local = p.host.num_experts / p.host.num_ranks;
  for (int k = lane_idx(); k < p.host.num_topk; k += 32) {
    const i32 expert = meta[meta_ids(p) + k] - to * num_local;
    const bool is_there = expert >= 0 && expert < num_local;
    reinterpret_cast<i64*>(slot + p.topk_idx_offset)[row * p.host.num_topk + k] = is_there ? expert : -1;
    if (p.has_weights)
      reinterpret_cast<float*>(slot + p.weights_offset)[row * p.host.num_topk + k] =
          is_there ? __uint_as_float(static_cast<u32>(meta[meta_weights(p) + k])) : 0.0f;
  }
  if (lane_idx() == 0) reinterpret_cast<i64*>(slot + p.src_token_offset)[row] = meta[kMetaToken];
}

/// The rows of this rank's tokens; see `packer`. Flow f is host f.
struct TokenCargo {
  const HostDispatchParams& p;
  const Progress& progress;
  i32 base;  // of thread j: this rank's first row at position j

  DEVICE int num_pieces() const { return (p.row_bytes + p.piece_bytes - 1) / p.piece_bytes; }
  DEVICE i32 token_of(const Record& record) const {
    return reinterpret_cast<const i32*>(
        p.host.record_tokens)[static_cast<i64>(record.flow) * p.host.max_tokens + record.index];
  }

  DEVICE void load(const Record& record, int piece, u8* stage, u64* barrier) const {
    const i64 token = token_of(record);
    const u32 num_bytes = piece_bytes(p, piece);
    if (lane_idx() == 0) {
      mbarrier_arrive_expect(barrier, num_bytes);
      bulk_load(stage, reinterpret_cast<const u8*>(p.x) + token * p.x_stride + piece * static_cast<i64>(p.piece_bytes),
                num_bytes, barrier);
    }
    if (piece + 1 < num_pieces()) return;
    const HostCall& h = p.host;
    const HostRoutes& routes = routes_of(h);
    i32* meta = reinterpret_cast<i32*>(stage + num_bytes);
#pragma unroll 1
    for (int w = lane_idx(); w < p.meta_bytes / 4; w += 32) {
      i32 value = w == kMetaToken ? static_cast<i32>(token) : 0;
      const int position = w - kMetaPlaces, k = w - meta_ids(p);
      if (position >= 0 && position < p.max_island) {
        const int to = rank_at(routes, record.flow, position);
        value = to < 0 ? -1 : reinterpret_cast<const i32*>(h.rank_places)[token * h.num_ranks + to];
      } else if (k >= 0 && k < h.num_topk) {
        value = reinterpret_cast<const i32*>(h.expert_of)[token * h.num_topk + k];
      } else if (k >= h.num_topk && k < 2 * h.num_topk && p.has_weights) {
        value = reinterpret_cast<const i32*>(p.topk_weights)[token * h.num_topk + k - h.num_topk];
      }
      meta[w] = value;
    }
    fence_proxy_async();
    __syncwarp();
  }

  DEVICE void store(const Record& record, int piece, const u8* stage) const {
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
    const HostRoutes& routes = routes_of(h);
    const i32* meta = reinterpret_cast<const i32*>(stage + num_bytes);
#pragma unroll 1
    for (int i = 1; i <= kNumRanks; ++i) {  // each rank begins behind itself, so that no inlet is crowded
      const int position = h.call.rank + i < kNumRanks ? h.call.rank + i : h.call.rank + i - kNumRanks;
      const int to = rank_at(routes, h.host, position);
      const i32 place =
          is_last ? meta[kMetaPlaces + position]
                  : reinterpret_cast<const i32*>(h.rank_places)[static_cast<i64>(token_of(record)) * h.num_ranks + to];
      if (place < 0) continue;
      const i64 row = __shfl_sync(~0u, base, position) + place;
      u8* slot = reinterpret_cast<u8*>(p.slots[position]);
      if (lane_idx() == 0) bulk_store(slot + row * p.row_bytes + offset, stage, num_bytes);
      if (is_last) deliver_meta(p, slot, to, row, meta);
    }
  }
};

/// The units that a puller works on: a few adjacent records of a chunk each, in the order of `pull_order`.
struct Puller {
  const HostDispatchParams& p;
  const Progress& progress;
  u64 tag;
  int units_per_chunk, num_units;
  int upcoming;       // thread 0: the unit after this one, taken ahead of its use
  int flow, k;        // of the unit at hand
  i32 first, length;  // its records; length 0: none at hand
  i32 row;            // of this thread's record at this rank, -1 for none
  u32 mine;           // threads whose records are still to be pulled

  DEVICE Puller(const HostDispatchParams& params, const Progress& shared, u64 call)
      : p(params), progress(shared), tag(call), flow(0), k(0), first(0), length(0), row(-1), mine(0) {
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

  /// Goes to the next unit that has records. False when there is none. The whole warp.
  DEVICE bool advance() {
    for (;;) {
      const int unit = __shfl_sync(~0u, upcoming, 0);
      if (unit >= num_units) return false;
      take();
      const u32 chunk = reinterpret_cast<const u32*>(p.host.pull_order)[unit / units_per_chunk];
      flow = static_cast<int>(chunk >> kPullChunkBits);
      k = static_cast<int>(chunk & ((1u << kPullChunkBits) - 1));
      first = unit % units_per_chunk * kPullRecords;
      length = min(kPullRecords, chunk_length(p.host, progress.in[flow], k) - first);
      first += k * p.host.chunk_records;
      if (length > 0) return true;
    }
  }

  DEVICE bool look() {
    const bool is_there = lane_idx() == 0 && has_arrived(p.host, tag, progress, progress.in[flow], static_cast<u32>(k));
    __syncwarp();  // what one thread has acquired, all of them read
    return __shfl_sync(~0u, static_cast<int>(is_there), 0) != 0;
  }
  DEVICE const u8* record(i32 index) const { return record_at(p.host, progress, progress.in[flow], index); }
  DEVICE i32 num_rows(int source, int position) const {
    const i32* base = reinterpret_cast<const i32*>(p.host.row_base) + source * kNumRanks + position;
    return base[kNumRanks] - base[0];
  }

  /// Reads the places of the unit's records, which have come. Records for others count as read. The whole warp.
  DEVICE void open() {
    const HostCall& h = p.host;
    const HostRoutes& routes = routes_of(h);
    const int source = routes.sources[flow], served = routes.served_idx[source];
    row = -1;
    if (lane_idx() < length) {
      const i32* places = reinterpret_cast<const i32*>(record(first + lane_idx()) + p.row_bytes) + kMetaPlaces;
      const auto read = [&](int position) {
        const i32 found = ld_relaxed_sys(places + position);
        if (found >= -1 && found < num_rows(source, position)) return found;
        report_failure(h.call, tag,
                       {kBadRow, source, static_cast<u64>(num_rows(source, position)),
                        static_cast<u64>(static_cast<i64>(found)), static_cast<u64>(first + lane_idx())});
        return -1;
      };
      const i32 place = read(h.call.rank);
      if (place >= 0) row = reinterpret_cast<const i32*>(h.row_base)[source * kNumRanks + h.call.rank] + place;
      i32* kept = reinterpret_cast<i32*>(h.served_places) +
                  (static_cast<i64>(served) * h.max_tokens + first + lane_idx()) * kNumRanks;
      if (served >= 0)
        for (int position = 0; position < kNumRanks; ++position)
          kept[position] = position == h.call.rank ? place : read(position);
    }
    mine = __ballot_sync(~0u, row >= 0);
    __syncwarp();  // all threads have read their records: see `count_in`
    if (lane_idx() == 0) count_in(h, progress, flow, static_cast<u32>(k), static_cast<u32>(length - __popc(mine)));
    length = 0;
  }

  /// The next record of this rank, and its final row; `flow` is -1 when there is none, or (`must_wait`) none has come.
  DEVICE Record next(bool& must_wait, i64& to) {
    must_wait = false;
    while (!mine) {
      if (length == 0 && !advance()) return {-1, 0};
      if (!look()) {
        must_wait = true;
        return {-1, 0};
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

/// Moves what comes to this rank to its final rows. One warp, two stages.
DEVICE void pull_records(const HostDispatchParams& p, u64 tag, const Progress& progress, u8* stages, i64 stage_bytes,
                         u64* barriers) {
  const HostCall& h = p.host;
  const int lane_id = lane_idx(), num_pieces = (p.row_bytes + p.piece_bytes - 1) / p.piece_bytes;
  u8* slot = reinterpret_cast<u8*>(p.slots[h.call.rank]);
  const int me = my_rank(h);
  Puller units(p, progress, tag);
  bool must_wait = false;
  const auto find = [&] {
    Pulled found = {{-1, 0}, 0, 0};
    found.record = units.next(must_wait, found.row);
    return found;
  };
  const auto await = [&](Pulled& found) {  // nothing of this warp is held back meanwhile
    const int source = routes_of(h).sources[units.flow];
    while (must_wait && warp_wait(h, tag, source, 40, [&] { return units.look(); })) found = find();
  };
  const auto load = [&](const Pulled& at, u32 use) {
    const u32 meta = at.piece + 1 == num_pieces ? static_cast<u32>(p.meta_bytes) : 0;
    const u32 num_bytes = piece_bytes(p, at.piece) + meta;
    const u8* record = record_at(h, progress, progress.in[at.record.flow], at.record.index);
    if (lane_id == 0) {
      bulk_wait_read<0>();
      fence_proxy_async();  // behind the word of the chunk
      mbarrier_arrive_expect(barriers + (use & 1), num_bytes);
      bulk_load(stages + (use & 1) * stage_bytes, record + at.piece * static_cast<i64>(p.piece_bytes), num_bytes,
                barriers + (use & 1));
    }
    __syncwarp();
  };
  Pulled at = find();
  await(at);
  if (at.record.flow >= 0) load(at, 0);
#pragma unroll 1
  for (u32 use = 0; at.record.flow >= 0; ++use) {
    perhaps_stall(tag, h.call.rank, 6);
    const bool is_last = at.piece + 1 == num_pieces;
    Pulled ahead = {at.record, at.row, at.piece + 1};
    if (is_last) ahead = find();
    if (ahead.record.flow >= 0) load(ahead, use + 1);
    const bool is_loaded = wait_load(h.call, tag, barriers + (use & 1), use >> 1 & 1);  // the whole warp read the stage
    if (__ballot_sync(~0u, is_loaded) != ~0u) break;
    const u8* stage = stages + (use & 1) * stage_bytes;
    const u32 num_bytes = piece_bytes(p, at.piece);
    if (lane_id == 0) {
      if (is_last) count_in(h, progress, at.record.flow, chunk_of(h, at.record.index), 1);
      bulk_store(slot + at.row * p.row_bytes + at.piece * static_cast<i64>(p.piece_bytes), stage, num_bytes);
      bulk_commit();
    }
    if (is_last) deliver_meta(p, slot, me, at.row, reinterpret_cast<const i32*>(stage + num_bytes));
    __syncwarp();  // the threads have read the stage
    if (is_last && must_wait) {
      await(ahead);
      if (ahead.record.flow >= 0) load(ahead, use + 1);
    }
    at = ahead;
  }
  if (lane_id == 0) bulk_wait<0>();
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
  Progress progress =
      make_progress(h, h.num_hosts, routes.num_sources, num_workers, [&](bool is_out, int i, Flow& flow) {
        flow.link = is_out ? routes.gateway_outlet[i] : routes.source_inlet[routes.sources[i]];
        flow.total = is_out ? records[me * h.num_hosts + i] : records[routes.sources[i] * h.num_hosts + h.host];
      });
  progress.out_unit = static_cast<u32>(p.row_bytes + p.meta_bytes);
  progress.flags = 0;
  __syncthreads();
  const bool has_begun = reinterpret_cast<const i32*>(h.info)[kInfoState] == kHandleGood;
  const i64 stage_bytes = min(p.piece_bytes, p.row_bytes) + p.meta_bytes;
  u8* stages = dynamic_shared() + progress_bytes(h, progress.num_out, progress.num_in) + 2 * warp * stage_bytes;
  if (warp < num_workers) {
    const i32* base = reinterpret_cast<const i32*>(h.row_base) + me * kNumRanks;
    const i32 first = has_begun && lane_idx() < kNumRanks ? base[lane_idx()] : 0;
    if (has_begun && warp < p.num_pack_warps)
      packer(h, tag, progress, TokenCargo{p, progress, first}, stages, stage_bytes, barriers + 2 * warp);
    else if (has_begun)
      pull_records(p, tag, progress, stages, stage_bytes, barriers + 2 * warp);
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
    if (__shfl_sync(~0u, is_mine, 0)) watcher(h, tag);
  }
}

}  // namespace epee
