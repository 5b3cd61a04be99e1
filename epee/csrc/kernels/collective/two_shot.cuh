// Collectives of middle size, in two crossings of a share of the row each, in packets.
//
// The row is cut into as many shares of tiles as there are owners. Sources send each owner its share; it reduces what
// comes (of one source: takes it as it is), keeps the result if it is a taker, and sends it to the other takers.
//   all_reduce   sources, owners and takers are all
//   broadcast    source is the root, owners and takers are the others
// A warp does a tile at a time: first all that it sends of the input, then what it owns, then what it takes from the
// others. Nobody waits before it has sent its part of the step before, so there is no cycle. In and out may be the same
// memory: a tile is overwritten behind the owner's packets, which were made from ours.
//
// Tiles are numbered through the shares: tile `t` is tile `t % share` of the `t / share`-th owner.
#include "packets.cuh"

struct Shares {
  u32 sources, owners, takers;
  int num_owners, tiles;  // in a share; the last ones may have fewer, or none
};

DEVICE Shares shares_of(const CollectiveParams& p, u32 active) {
  Shares r;
  r.sources = p.call.sources & active;
  r.owners = r.takers = p.call.takers & active;
  r.num_owners = __popc(r.owners);
  r.tiles = r.num_owners ? (num_tiles(p.num_bytes) + r.num_owners - 1) / r.num_owners : 0;
  return r;
}

/// Which rank owns share `n`: the n-th bit of `owners`.
DEVICE int owner_of(u32 owners, int n) {
#pragma unroll
  for (int i = 0; i < kNumRanks - 1; ++i)
    if (i < n) owners &= owners - 1;
  return __ffs(static_cast<int>(owners)) - 1;
}
DEVICE int share_of(u32 owners, int rank) { return __popc(owners & ((1u << rank) - 1)); }

/// Sends this rank's part of every other owner's share.
DEVICE void scatter(const CollectiveParams& p, const Meeting& s, const Shares& w) {
  const u8* in = reinterpret_cast<const u8*>(p.inputs[p.call.rank]);
  const int mine = is_in(w.owners, p.call.rank) ? share_of(w.owners, p.call.rank) : -1;
#pragma unroll 1
  for (int i = first_tile(); i < w.num_owners * w.tiles; i += tile_step()) {
    const int turn = i / w.tiles + mine + 1;  // the share behind one's own first
    const int share = turn < w.num_owners ? turn : turn - w.num_owners;
    const int tile = i % w.tiles;
    if (share == mine || !has_share(p.num_bytes, share * w.tiles + tile)) continue;
    const int owner = owner_of(w.owners, share);
    send_tile(packets_at(p.call, s.peer[owner], s.tag, kScatter, p.call.rank, tile), s.tag,
              load_tile(in, p.num_bytes, share * w.tiles + tile));
  }
}

/// Reduces one tile of this rank's own share. False when a wait failed.
DEVICE bool reduce_tile(const CollectiveParams& p, const Meeting& s, const Shares& w, int tile, int whole,
                        Tile& result) {
  Accumulator<4 * kTileVecs> sum;
  Tile own = {};
  if (is_in(w.sources, p.call.rank))
    own = load_tile(reinterpret_cast<const u8*>(p.inputs[p.call.rank]), p.num_bytes, whole);
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kGroup) {
    TileGroup group;
    const u32 others = (w.sources & ~(1u << p.call.rank)) >> base & ((1u << kGroup) - 1);
    if (others && !receive_group(p.call, s, kScatter, base, others << base, tile, group)) return false;
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (base + i < kNumRanks && is_in(w.sources, base + i)) {
        const Tile row = base + i == p.call.rank ? own : group.tile[i];
        sum.add(row);
      }
  }
  result = sum.result();
  return true;
}

/// What an owner does. False when a wait failed.
DEVICE bool own_share(const CollectiveParams& p, const Meeting& s, const Shares& w) {
  const int mine = share_of(w.owners, p.call.rank);
#pragma unroll 1
  for (int tile = first_tile(); tile < w.tiles; tile += tile_step()) {
    const int whole = mine * w.tiles + tile;
    if (!has_share(p.num_bytes, whole)) continue;
    Tile result;
    if (!reduce_tile(p, s, w, tile, whole, result)) return false;
#pragma unroll
    for (int n = 1; n < kNumRanks; ++n) {
      const int next = p.call.rank + n;
      const int d = next < kNumRanks ? next : next - kNumRanks;
      if (!is_in(w.takers, d)) continue;
      send_tile(packets_at(p.call, s.peer[d], s.tag, kGather, p.call.rank, tile), s.tag, result);
    }
    store_tile(reinterpret_cast<u8*>(p.outputs[p.call.rank]), p.num_bytes, whole, result);
  }
  return true;
}

/// What a taker does: the same tile of all other shares at once. False when a wait failed.
DEVICE bool take_shares(const CollectiveParams& p, const Meeting& s, const Shares& w) {
  u8* out = reinterpret_cast<u8*>(p.outputs[p.call.rank]);
#pragma unroll 1
  for (int tile = first_tile(); tile < w.tiles; tile += tile_step()) {
#pragma unroll
    for (int base = 0; base < kNumRanks; base += kGroup) {
      TileGroup group;
      u32 others = 0;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int owner = base + i;
        if (owner >= kNumRanks || owner == p.call.rank || !is_in(w.owners, owner)) continue;
        if (has_share(p.num_bytes, share_of(w.owners, owner) * w.tiles + tile)) others |= 1u << owner;
      }
      if (others && !receive_group(p.call, s, kGather, base, others, tile, group)) return false;
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (base + i < kNumRanks && is_in(others, base + i))
          store_tile(out, p.num_bytes, share_of(w.owners, base + i) * w.tiles + tile, group.tile[i]);
    }
  }
  return true;
}

namespace epee {

__global__ void __launch_bounds__(kTwoShotThreads, 1) collective_two_shot(const __grid_constant__ CollectiveParams p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  const bool is_open = open_call(p.call, s, 1);
  allow_next_kernel();
  const Shares w = shares_of(p, s.active);
  if (is_open) {
    if (is_in(w.sources, p.call.rank)) scatter(p, s, w);
    const bool is_owner = is_in(w.owners, p.call.rank);
    if (!is_owner || own_share(p, s, w))
      if (is_in(w.takers, p.call.rank)) take_shares(p, s, w);
  }
  close_call(p.call, s);
}

}  // namespace epee
