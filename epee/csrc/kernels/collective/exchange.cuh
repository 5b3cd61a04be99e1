// Small collectives, in one crossing: each rank sends each other rank a row, in packets; what comes is reduced into one
// row of the output or placed into one each.
//
//   all_reduce       all get the same row                  reduced
//   reduce_scatter   rank d gets row d of the input        reduced
//   all_gather       all get the same row                  placed, rank s's as row s
//   all_to_all       rank d gets row d of the input        placed, rank s's as row s
//   broadcast        all get the root's row, but the root  placed (strides 0)
//
// A warp sends a tile of each row and then waits for the same tile from the others: it has read what it sends before it
// writes, so in and out may be the same memory where they are the same row. Why memory may be reused says
// `call.cuh`; packets need no other order.
#include "packets.cuh"

/// Which ranks send in a call, and which receive. A root sends to all others; without one all do to all.
struct Parts {
  u32 sources, takers;
};
DEVICE Parts parts_of(u32 active, int root) {
  return root < 0 ? Parts{active, active} : Parts{1u << root, active & ~(1u << root)};
}

/// Sends a tile of their rows to all other takers; `own` is the tile of this rank's own row.
DEVICE void send_rows(const ExchangeParams& p, const Meeting& s, u32 takers, int tile, const Tile& own) {
#pragma unroll
  for (int n = 1; n < kNumRanks; ++n) {
    const int next = p.call.rank + n;
    const int d = next < kNumRanks ? next : next - kNumRanks;  // first the next rank, so that no inlet is crowded
    if (!is_in(takers, d)) continue;
    u8* to = packets_at(p.call, s.peer[d], s.tag, kScatter, p.call.rank, tile);
    const u8* row = reinterpret_cast<const u8*>(p.in) + d * p.in_stride;
    send_tile(to, s.tag, p.in_stride ? load_tile(row, p.num_bytes, tile) : own);
  }
}

/// Receives a tile from each source and makes the output of it. False when a wait failed.
template <bool kIsPlaced>
DEVICE bool take_rows(const ExchangeParams& p, const Meeting& s, u32 sources, int tile, const Tile& own) {
  Accumulator<4 * kTileVecs> sum;
  u8* out = reinterpret_cast<u8*>(p.out);
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kGroup) {
    TileGroup group;
    const u32 others = (sources & ~(1u << p.call.rank)) >> base & ((1u << kGroup) - 1);
    if (others && !receive_group(p.call, s, kScatter, base, others << base, tile, group)) return false;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int src = base + i;
      if (src >= kNumRanks || !is_in(sources, src)) continue;
      const Tile row = src == p.call.rank ? own : group.tile[i];
      if (!kIsPlaced)
        sum.add(row);
      else
        store_tile(out + src * p.out_stride, p.num_bytes, tile, row);
    }
  }
  if (!kIsPlaced) store_tile(out, p.num_bytes, tile, sum.result());
  return true;
}

template <bool kIsPlaced>
DEVICE void exchange(const ExchangeParams& p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  const u8* own_row = reinterpret_cast<const u8*>(p.in) + p.call.rank * p.in_stride;
  const int num = num_tiles(p.num_bytes);
  Tile first = {};
  if (first_tile() < num) first = load_tile(own_row, p.num_bytes, first_tile());  // on its way while the call opens
  const bool is_open = open_call(p.call, s, 1, p.root);
  allow_next_kernel();
  const Parts parts = parts_of(s.active, p.root);
  const u32 me = 1u << p.call.rank;
  if (is_open && (parts.sources & me)) {
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step())
      if (has_share(p.num_bytes, tile))
        send_rows(p, s, parts.takers, tile, tile == first_tile() ? first : load_tile(own_row, p.num_bytes, tile));
  }
  if (is_open && (parts.takers & me)) {
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step())
      if (has_share(p.num_bytes, tile) &&
          !take_rows<kIsPlaced>(p, s, parts.sources, tile,
                                tile == first_tile() ? first : load_tile(own_row, p.num_bytes, tile)))
        break;
  }
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_exchange_reduced(const __grid_constant__ ExchangeParams p) {
  exchange<false>(p);
}

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_exchange_placed(const __grid_constant__ ExchangeParams p) {
  exchange<true>(p);
}

/// All ranks meet. One warp; what kernels of this stream wrote before is visible to those behind it on all ranks.
__global__ void __launch_bounds__(32, 1) collective_barrier(const __grid_constant__ ExchangeParams p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  open_call<true>(p.call, s, 0, -1);
  close_call(p.call, s);
}

}  // namespace epee
