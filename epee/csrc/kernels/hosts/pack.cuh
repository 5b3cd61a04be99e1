// Records on their way into slots, or into final rows of this island: one warp, two stages of shared memory.
//
// A record passes in pieces, each by a bulk load and a bulk store; the load of the next piece is under way while one is
// stored. `Cargo` says where a piece comes from and where it goes:
//   num_pieces()                            of a record
//   load(record, piece, stage, barrier)     begins the load, and writes what is no row behind it; the whole warp
//   store(record, piece, stage)             begins the stores; the whole warp, thread 0 does the bulk ones
// A record is counted when its stores are complete. Before a warp waits for a slot it counts all that it has stored:
// else a chunk could wait for a record whose warp waits for a slot that the chunk would free.
#pragma once
#include "flows.cuh"

template <class Cargo>
DEVICE void packer(const HostCall& h, u64 tag, const Progress& progress, const Cargo& cargo, u8* stages,
                   i64 stage_bytes, u64* barriers) {
  const int lane_id = lane_idx(), num_pieces = cargo.num_pieces();
  const Record none = {-1, 0};
  Claims claims(h, progress);
  const auto load = [&](const Record& record, int piece, u32 use) {  // its stage was stored a piece ago
    if (lane_id == 0) bulk_wait_read<0>();
    __syncwarp();
    cargo.load(record, piece, stages + (use & 1) * stage_bytes, barriers + (use & 1));
  };
  Record at = claims.await(h, tag, progress), stored = none;
  int piece = 0;
  if (at.flow >= 0) load(at, 0, 0);
#pragma unroll 1
  for (u32 use = 0; at.flow >= 0; ++use) {
    perhaps_stall(tag, h.call.rank, 4);
    const bool is_last = piece + 1 == num_pieces;
    bool is_over = false;
    Record ahead = is_last ? claims.find(h, progress, is_over) : at;
    const int next_piece = is_last ? 0 : piece + 1;
    if (ahead.flow >= 0) load(ahead, next_piece, use + 1);
    const bool is_loaded = lane_id != 0 || wait_load(h.call, tag, barriers + (use & 1), use >> 1 & 1);
    if (!__shfl_sync(~0u, static_cast<int>(is_loaded), 0)) break;
    cargo.store(at, piece, stages + (use & 1) * stage_bytes);
    if (lane_id == 0) {
      bulk_commit();
      bulk_wait<1>();
      count_out(h, progress, stored);
    }
    stored = is_last ? at : none;
    if (ahead.flow < 0 && !is_over) {
      if (lane_id == 0) bulk_wait<0>();
      __syncwarp();
      if (lane_id == 0) count_out(h, progress, stored);
      stored = none;
      ahead = claims.await(h, tag, progress);
      if (ahead.flow >= 0) load(ahead, 0, use + 1);
    }
    at = ahead;
    piece = next_piece;
  }
  if (lane_id == 0) bulk_wait<0>();
  __syncwarp();
  if (lane_id == 0) count_out(h, progress, stored);
}
