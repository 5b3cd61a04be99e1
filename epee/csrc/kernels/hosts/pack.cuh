// Records on their way into slots, or into final rows of this island: one warp, two stages of shared memory.
//
// A record passes in pieces, each by a bulk load and a bulk store; the load of the next piece is under way while one is
// stored. `Cargo` says where a piece comes from and where it goes:
//   num_pieces()                            of a record
//   find(flow, index)                       what this thread must read to find a record: a token or row
//   load(found, piece, stage, barrier)      begins the load; thread 0
//   read_meta(record, found)                this thread's words of what lies behind the row; the whole warp
//   write_meta(record, found, words, to)    writes them, and those beyond `Cargo::Meta`, behind the row
//   store(record, found, piece, stage)      begins the stores; the whole warp, thread 0 does the bulk ones
// What is read from memory is read early: where the next record of a flow lies, as soon as its number is known, and
// what is behind a row while the row before is awaited.
//
// A record is counted when its stores are complete. Before a warp waits for a slot it counts all that it has stored:
// else a chunk could wait for a record whose warp waits for a slot that the chunk would free.
#pragma once
#include "flows.cuh"

/// Packs records until there are none. `use`: of the two stages in turn, so far, by this warp. False when a load has
/// not come, and the stages cannot be used any more.
template <class Cargo>
DEVICE bool packer(const HostCall& h, u64 tag, const Progress& progress, const Cargo& cargo, u8* stages,
                   i64 stage_bytes, u64* barriers, u32& use) {
  const int lane_id = lane_idx(), num_pieces = cargo.num_pieces();
  const i32 total = lane_id < progress.num_out ? progress.out[lane_id].total : 0;
  const Record none = {-1, 0};
  Claims claims(h, progress);
  i32 peeked = -1, ahead_found = 0;  // this thread's next record
  const auto peek = [&] {
    if (claims.next == peeked || claims.next >= total) return;
    peeked = claims.next;
    ahead_found = cargo.find(lane_id, peeked);
  };
  const auto stage_of = [&](u32 n) { return stages + (n & 1) * stage_bytes; };
  const auto load = [&](const Record& record, i32 found, int piece) {  // its stage was stored a piece ago
    if (lane_id == 0) {
      bulk_wait_read<0>();
      cargo.load(found, piece, stage_of(use), barriers + (use & 1));
    }
    return piece + 1 == num_pieces ? cargo.read_meta(record, found) : typename Cargo::Meta{};
  };
  peek();
  Record at = claims.await(h, tag, progress), stored = none;
  i32 found = __shfl_sync(~0u, ahead_found, at.flow & 31);
  int piece = 0;
  if (at.flow >= 0) {
    const typename Cargo::Meta meta = load(at, found, 0);
    if (num_pieces == 1) cargo.write_meta(at, found, meta, stage_of(use));
  }
#pragma unroll 1
  while (at.flow >= 0) {
    perhaps_stall(tag, h.call.rank, 4);
    const u32 now = use++;
    const bool is_last = piece + 1 == num_pieces;
    const int next_piece = is_last ? 0 : piece + 1;
    bool is_over = false;
    Record ahead = at;
    i32 next_found = found;
    typename Cargo::Meta next_meta = {};
    if (is_last) {
      peek();
      ahead = claims.find(h, progress, is_over);
      next_found = __shfl_sync(~0u, ahead_found, ahead.flow & 31);
    }
    if (ahead.flow >= 0) next_meta = load(ahead, next_found, next_piece);
    const bool is_loaded = lane_id != 0 || wait_load(h.call, tag, barriers + (now & 1), now >> 1 & 1);
    if (!__shfl_sync(~0u, static_cast<int>(is_loaded), 0)) return false;
    cargo.store(at, found, piece, stage_of(now));
    __syncwarp();  // the threads have read the stage
    if (lane_id == 0) bulk_commit();
    if (is_last) peek();
    if (lane_id == 0) {
      bulk_wait<1>();
      count_out(h, progress, stored);
    }
    if (ahead.flow >= 0 && next_piece + 1 == num_pieces) cargo.write_meta(ahead, next_found, next_meta, stage_of(use));
    stored = is_last ? at : none;
    if (ahead.flow < 0 && !is_over) {
      if (lane_id == 0) bulk_wait<0>();
      __syncwarp();
      if (lane_id == 0) count_out(h, progress, stored);
      stored = none;
      ahead = claims.await(h, tag, progress);
      next_found = __shfl_sync(~0u, ahead_found, ahead.flow & 31);
      if (ahead.flow >= 0) {
        next_meta = load(ahead, next_found, 0);
        if (num_pieces == 1) cargo.write_meta(ahead, next_found, next_meta, stage_of(use));
      }
    }
    at = ahead;
    found = next_found;
    piece = next_piece;
  }
  if (lane_id == 0) bulk_wait<0>();
  __syncwarp();
  if (lane_id == 0) count_out(h, progress, stored);
  return true;
}
