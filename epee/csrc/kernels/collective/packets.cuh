// Payload in packets of 16 bytes, three words of it and the low half of the call's number, each stored at once: whoever
// reads a packet with the number of its call has the payload, without a flag that would have to cross behind it.
//
// A row is cut into tiles of 96 vectors of 16 bytes, a tile for a warp: lane l has vectors l, 32 + l and 64 + l, which
// it sends in four packets, that lie likewise. So each access of a warp is to 512 bytes in a row.
//
// A packet keeps the number of the call that last stored there. Should it be 2^32 calls old to the call when its place
// is used again, it would pass for a new one: whoever makes that many calls lets the host clear the packets in between.
#pragma once
#include "call.cuh"
#include "elements.cuh"

constexpr int kTileVecs = 3, kTilePackets = 4;  // of a lane
constexpr int kTileBytes = kTileVecs * 512, kTilePacketBytes = kTilePackets * 512;
CONSTANT int kGroup = kNumRanks < 4 ? kNumRanks : 4;  // ranks whose packets a thread holds at once
using Tile = Words<4 * kTileVecs>;

DEVICE int num_tiles(i64 num_bytes) { return static_cast<int>((num_bytes + kTileBytes - 1) / kTileBytes); }

/// Warps of the grid, block by block, so that few tiles spread over many multiprocessors.
DEVICE int first_tile() { return warp_idx() * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x); }
DEVICE int tile_step() { return static_cast<int>(gridDim.x * blockDim.x / 32); }

/// A lane's share of a tile of a row in user memory. What lies behind the row is zeros, and is not stored.
DEVICE Tile load_tile(const u8* row, i64 num_bytes, int tile) {
  Tile t;
#pragma unroll
  for (int j = 0; j < kTileVecs; ++j) {
    const Vec16 v = load_user(row, static_cast<i64>(tile) * kTileBytes + j * 512 + lane_idx() * 16, num_bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) t.word[4 * j + i] = v.word[i];
  }
  return t;
}
DEVICE void store_tile(u8* row, i64 num_bytes, int tile, const Tile& t) {
#pragma unroll
  for (int j = 0; j < kTileVecs; ++j) {
    const Vec16 v = {{t.word[4 * j], t.word[4 * j + 1], t.word[4 * j + 2], t.word[4 * j + 3]}};
    store_user(row, static_cast<i64>(tile) * kTileBytes + j * 512 + lane_idx() * 16, num_bytes, v);
  }
}

/// Whether this lane has payload in a tile; who has none neither sends nor waits.
DEVICE bool has_share(i64 num_bytes, int tile) {
  return static_cast<i64>(tile) * kTileBytes + lane_idx() * 16 < num_bytes;
}

/// Where this lane's packets of a tile lie: those of `src` in a region.
DEVICE u8* packets_at(const CollectiveCall& call, u64 region, u64 tag, Stage stage, int src, int tile) {
  const u64 row = ((tag & 1) * kNumStages + static_cast<u64>(stage)) * kNumRanks + static_cast<u64>(src);
  return reinterpret_cast<u8*>(region + call.packets_offset + row * call.packets_stride) +
         static_cast<i64>(tile) * kTilePacketBytes + lane_idx() * 16;
}

DEVICE void send_tile(u8* to, u64 tag, const Tile& t) {
#pragma unroll
  for (int j = 0; j < kTilePackets; ++j)
    st_relaxed_sys_128(to + j * 512, {{t.word[3 * j], t.word[3 * j + 1], t.word[3 * j + 2], static_cast<u32>(tag)}});
}

/// The tiles of `kGroup` ranks, from `base` on.
struct TileGroup {
  Tile tile[ROOM(kGroup, 4)];
};

/// Waits for this lane's packets of a tile from each of the ranks in `sources`, which belong to the group. False when
/// they do not come.
DEVICE bool receive_group(const CollectiveCall& call, const Meeting& s, Stage stage, int base, u32 sources, int tile,
                          TileGroup& group) {
  const u8* from[ROOM(kGroup, 4)];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) from[i] = packets_at(call, call.own, s.tag, stage, base + i, tile);
  int missing = __ffs(static_cast<int>(sources >> base)) - 1 + base;
  perhaps_stall(s.tag, call.rank, 3);
  return wait_until(call, s, missing, s.tag, kWaitPackets, [&](u64& got) {
    bool is_there = true;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (base + i >= kNumRanks || !is_in(sources, base + i)) continue;
#pragma unroll
      for (int j = 0; j < kTilePackets; ++j) {
        const Vec16 v = ld_relaxed_sys_128(from[i] + j * 512);
#pragma unroll
        for (int w = 0; w < 3; ++w) group.tile[i].word[3 * j + w] = v.word[w];
        if (v.word[3] == static_cast<u32>(s.tag)) continue;
        is_there = false;
        missing = base + i;
        got = v.word[3];
      }
    }
    return is_there;
  });
}

/// Receives a tile from each source and makes the output of it, in rank order: `store(src, tile)` of each row, and of
/// zeros for each of `absent`; or of their sum, as of this rank's row. False when a wait failed.
template <bool kIsPlaced, class Store>
DEVICE bool take_rows(const CollectiveCall& call, const Meeting& s, u32 sources, u32 absent, int tile, const Tile& own,
                      Store store) {
  Accumulator<4 * kTileVecs> sum;
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kGroup) {
    TileGroup group;
    const u32 others = (sources & ~(1u << call.rank)) >> base & ((1u << kGroup) - 1);
    if (others && !receive_group(call, s, kScatter, base, others << base, tile, group)) return false;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int src = base + i;
      if (src >= kNumRanks) continue;
      if (!is_in(sources, src)) {
        if (kIsPlaced && is_in(absent, src)) store(src, Tile{});
        continue;
      }
      const Tile row = src == call.rank ? own : group.tile[i];
      if (kIsPlaced)
        store(src, row);
      else
        sum.add(row);
    }
  }
  perhaps_stall(s.tag, call.rank, 6);
  if (!kIsPlaced) store(call.rank, sum.result());
  return true;
}
