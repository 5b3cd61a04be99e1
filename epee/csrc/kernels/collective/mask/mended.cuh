// Collectives of mode "mask", for rows of packet size: as in `exchange.cuh`, one crossing for all operations, but a
// rank that dies is no failure. Who then counts, and how the call is mended, says `settle.cuh`.
//
//   as there      all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, scatter
//   for all       reduce and gather: every rank gets all rows, so that all know who counted; the root alone keeps them
//   barrier       a call of no bytes: `joined` is all that crosses
// A place of the output that has no address is not written; a row that has none is not sent.
//
// Order in a warp, for each of its tiles: own tile (or the tile of all rows, and a fence) into this rank's own memory,
// packets to all; when all its tiles are sent, it takes. The first warp then waits for the words of those that send no
// row, so a call is over when every rank has begun it.
#pragma once
#include "settle.cuh"

/// Stores this rank's row, or all its rows, where it or others may need it, then sends the tile to all other takers.
DEVICE void send_masked(const MaskedParams& m, const Meeting& s, u32 takers, int tile, const Tile& own) {
  const CollectiveParams& p = m.base;
  const u64 own_at = p.inputs[p.call.rank];
  const auto row_for = [&](int d) {
    return p.inputs[d] == own_at ? own : load_tile(reinterpret_cast<const u8*>(p.inputs[d]), p.num_bytes, tile);
  };
  if (m.is_one_row) {
    send_tile(packets_at(p.call, p.call.own, s.tag, kScatter, p.call.rank, tile), s.tag, own);
  } else {
#pragma unroll 1
    for (int d = 0; d < kNumRanks; ++d)
      if (is_in(static_cast<u32>(p.call.takers), d) && p.inputs[d] != 0)
        send_tile(kept_at(m, p.call.own, s.tag, d, tile), s.tag, row_for(d));
    perhaps_stall(s.tag, p.call.rank, 4);
    fence_acq_rel_sys();
  }
#pragma unroll
  for (int n = 1; n < kNumRanks; ++n) {
    const int d = rank_behind(p.call.rank, n);
    if (!is_in(takers, d) || p.inputs[d] == 0) continue;
    perhaps_stall(s.tag, p.call.rank, 5);
    send_tile(packets_at(p.call, s.peer[d], s.tag, kScatter, p.call.rank, tile), s.tag, row_for(d));
  }
}

/// Ends the call, settled first where this block is the one to do it. All threads.
template <bool kIsPlaced>
DEVICE void close_masked(const MaskedParams& m, Meeting& s, Settling& z) {
  const CollectiveCall& call = m.base.call;
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool has_met = s.is_open && s.has_deaths && !has_failed(call, s.tag);
    z.is_mine = has_met && atom_exch_relaxed_gpu(own_words(call, kRegionSettledOffset), s.tag) != s.tag;
    if (blockIdx.x == 0 && !z.is_mine) tell_counted(m, s.tag, s.active);
  }
  __syncthreads();
  if (z.is_mine) settle<kIsPlaced>(m, s, z);
  close_call<true>(call, s);
}

/// What this block does of a call; where it is the only one of a grid that makes it, the others have its number. All
/// threads.
template <bool kIsPlaced>
DEVICE void make_masked(const MaskedParams& m, Meeting& s, Settling& z) {
  const CollectiveParams& p = m.base;
  const u8* own_row = reinterpret_cast<const u8*>(p.inputs[p.call.rank]);
  const u32 senders = senders_of(p), me = 1u << p.call.rank;
  const int num = num_tiles(p.num_bytes);
  const bool has_row = (senders & me) && own_row != nullptr;
  Tile first = {};
  if (has_row && first_tile() < num)
    first = load_tile(own_row, p.num_bytes, first_tile());  // on its way while the call opens
  if (num == 0) fence_acq_rel_sys();  // a barrier: what kernels wrote before is visible where `joined` is
  const bool is_open = open_call<false, kMends>(p.call, s, 1);
  allow_next_kernel();
  const u32 takers = p.call.takers & s.active;
  const auto own = [&](int tile) {
    return tile == first_tile() || !has_row ? first : load_tile(own_row, p.num_bytes, tile);
  };
  if (is_open && (senders & me)) {
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step())
      if (has_share(p.num_bytes, tile)) send_masked(m, s, takers, tile, own(tile));
  }
  if (is_open && (takers & me)) {
    const u32 absent = lost_of(m, 0, s.active);
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step()) {
      const auto store = [&](int src, const Tile& row) { store_row(p, src, tile, row); };
      if (has_share(p.num_bytes, tile) &&
          !take_rows<kIsPlaced>(p.call, s, senders & s.active, absent, tile, own(tile), store))
        break;  // a wait has failed, or met a death
    }
  }
  if (is_open && blockIdx.x == 0) await_words(m, s, s.active);
  close_masked<kIsPlaced>(m, s, z);
}
