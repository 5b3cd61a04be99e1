// Small collectives, in one crossing: each rank sends each other rank a row, in packets; what comes is reduced into one
// row of the output or placed into one each.
//
//   all_reduce       all get the same row                  reduced
//   reduce_scatter   rank d gets row d of the input        reduced
//   all_gather       all get the same row                  placed, rank s's as row s
//   all_to_all       rank d gets row d of the input        placed, rank s's as row s
//   broadcast        all get the root's row, but the root  placed
//   reduce           the root gets a row of each           reduced
//   gather           the root gets a row of each           placed, rank s's as row s
//   scatter          rank d gets row d of the root's input placed
// Rows are where `inputs` and `outputs` say, all of `num_bytes`.
//
// A warp sends a tile of each row and then waits for the same tile from the others: it has read what it sends before it
// writes, so in and out may be the same memory where they are the same row. Why memory may be reused says
// `call.cuh`; packets need no other order.
#include "packets.cuh"

/// Sends a tile of their rows to all other takers; `own` is the tile of this rank's own row.
DEVICE void send_rows(const CollectiveParams& p, const Meeting& s, u32 takers, int tile, const Tile& own) {
#pragma unroll
  for (int n = 1; n < kNumRanks; ++n) {
    const int next = p.call.rank + n;
    const int d = next < kNumRanks ? next : next - kNumRanks;  // first the next rank, so that no inlet is crowded
    if (!is_in(takers, d)) continue;
    u8* to = packets_at(p.call, s.peer[d], s.tag, kScatter, p.call.rank, tile);
    const u8* row = reinterpret_cast<const u8*>(p.inputs[d]);
    send_tile(to, s.tag, p.inputs[d] == p.inputs[p.call.rank] ? own : load_tile(row, p.num_bytes, tile));
  }
}

template <bool kIsPlaced>
DEVICE void exchange(const CollectiveParams& p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  const u8* own_row = reinterpret_cast<const u8*>(p.inputs[p.call.rank]);
  const int num = num_tiles(p.num_bytes);
  Tile first = {};
  const bool is_source = is_in(static_cast<u32>(p.call.sources), p.call.rank);  // others have no row of their own
  if (is_source && first_tile() < num)
    first = load_tile(own_row, p.num_bytes, first_tile());  // on its way while the call opens
  const bool is_open = open_call(p.call, s, 1);
  allow_next_kernel();
  const u32 sources = p.call.sources & s.active, takers = p.call.takers & s.active;
  const u32 me = 1u << p.call.rank;
  if (is_open && (sources & me)) {
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step())
      if (has_share(p.num_bytes, tile))
        send_rows(p, s, takers, tile, tile == first_tile() ? first : load_tile(own_row, p.num_bytes, tile));
  }
  if (is_open && (takers & me)) {
#pragma unroll 1
    for (int tile = first_tile(); tile < num; tile += tile_step()) {
      const auto store = [&](int src, const Tile& row) {
        store_tile(reinterpret_cast<u8*>(p.outputs[src]), p.num_bytes, tile, row);
      };
      if (has_share(p.num_bytes, tile) &&
          !take_rows<kIsPlaced>(p.call, s, sources, 0, tile,
                                tile == first_tile() || !is_source ? first : load_tile(own_row, p.num_bytes, tile),
                                store))
        break;
    }
  }
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_exchange_reduced(const __grid_constant__ CollectiveParams p) {
  exchange<false>(p);
}

__global__ void __launch_bounds__(kExchangeThreads, 1)
    collective_exchange_placed(const __grid_constant__ CollectiveParams p) {
  exchange<true>(p);
}

/// All ranks meet. One warp; what kernels of this stream wrote before is visible to those behind it on all ranks.
__global__ void __launch_bounds__(32, 1) collective_barrier(const __grid_constant__ CollectiveParams p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  open_call<true>(p.call, s, 0);
  close_call(p.call, s);
}

}  // namespace epee
