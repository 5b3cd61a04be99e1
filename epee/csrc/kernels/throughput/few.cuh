// Dispatch of few tokens into the rank layout in one kernel: counting, exchange and movement.
//
// With few tokens the link is busy for half of the time only; the rest is latency. Here every block reads the whole
// routing, which is small, so no block waits for another one's counts, and rows are loaded while counts are exchanged.
//   coordinator  block 0: counts, sends this rank's row of words, collects the rows of all ranks, writes the handle and
//                what the host waits for. Moves nothing: all ranks wait for its words.
//   mover        every other block: a token for each of its moving warps at a time. Waits for the few words from which
//                the places follow (headers, tokens per rank), then stores its rows where they stay.
// The end is that of dispatch.cuh. A rank may take either way in a call; the peers see no difference.
//
// Movers wait for the coordinators of all ranks; these have the first place in their grids and wait for nobody before
// they have sent their words.
#pragma once
#include "entries.cuh"
#include "exchange.cuh"
#include "sender.cuh"

struct FewShared {
  u64 barriers[kMaxFewWarps];
  u64 slot[kMaxRanks];       // granted by rank d, as this GPU addresses it
  i32 first_row[kMaxRanks];  // rows of lower source ranks there
  i32 num_recv;
  u32 is_good;
  u16 ranks[kMaxFewTokens];  // bit d: the token goes to rank d
};

/// A token on its way: its place among this rank's rows for rank d (lane d; -1 for none), expert and weight of slot k
/// (lane k).
struct Traveller {
  i32 place, expert;
  float weight;
};

/// Where every token goes, into `ranks`; with `counters` also what `read_entries` does then. One block, all threads.
DEVICE void find_ranks(const LayoutParams& p, u64 tag, u32 active, FewShared& s, i32* counters) {
  const int per_warp = 32 / p.lanes_per_token;
  const int step = static_cast<int>(blockDim.x / 32) * per_warp;
#pragma unroll 1
  for (int first = warp_idx() * per_warp; first < p.num_tokens; first += step) {
    const Entry entry = read_entries(p, tag, active, first, p.num_tokens, counters);
    if (entry.is_first) s.ranks[entry.token] = static_cast<u16>(entry.ranks);
  }
  __syncthreads();
}

DEVICE void load_row(const DispatchParams& p, int token, u8* stage, u64* barrier) {
  mbarrier_arrive_expect(barrier, static_cast<u32>(p.row_bytes));
  bulk_load(stage, reinterpret_cast<const u8*>(p.x) + token * p.x_stride, static_cast<u32>(p.row_bytes), barrier);
}

/// What of a token is known before the exchange; keeps its places in the handle. One warp.
DEVICE Traveller prepare(const LayoutParams& p, const FewShared& s, int token) {
  const int lane = lane_idx();
  Traveller t = {0, -1, 0.0f};
  if (lane < p.num_topk && p.topk_idx) {
    const i64 at = static_cast<i64>(token) * p.num_topk + lane;
    if (p.topk_weights) t.weight = reinterpret_cast<const float*>(p.topk_weights)[at];
    t.expert = max(load_expert(p, token, lane), -1);
  }
#pragma unroll 1
  for (int first = 0; first < token; first += 32) {
    const u32 ranks = first + lane < token ? s.ranks[first + lane] : 0;
#pragma unroll
    for (int d = 0; d < kNumRanks; ++d) {
      const int going = __popc(__ballot_sync(~0u, ranks >> d & 1));
      if (lane == d) t.place += going;
    }
  }
  if (lane >= kNumRanks || !(s.ranks[token] >> lane & 1)) t.place = -1;
  if (lane < kNumRanks) reinterpret_cast<i32*>(p.send_prefix)[static_cast<i64>(token) * kNumRanks + lane] = t.place;
  return t;
}

/// Reads and checks one word of all active ranks: header words, then the tokens that they send to each rank. One thread
/// for each word. False when the call fails; what is wrong with a word, or an overflow, the coordinator reports.
DEVICE bool learn_word(const FewParams& p, u64 tag, u32 active, u32 losses, FewShared& s, int idx) {
  const int d = idx - kNumHeaderWords;  // negative for a header word
  PerRank values;
  if (!collect(p.layout, tag, active, d < 0 ? idx : kCountsHeaderWords + p.layout.num_experts + d, values))
    return false;
  bool is_good = true;
  if (d < 0) {
    const i32 wanted = wanted_word(p.layout, losses, idx);
#pragma unroll
    for (int src = 0; src < kNumRanks; ++src) {
      is_good = is_good && (is_good_word(idx, wanted, values[src]) || !is_in(active, src));
      if (idx == kGrant) s.slot[src] = p.payload.slots[src] + static_cast<u64>(values[src]) * p.payload.slot_bytes;
    }
    return is_good;
  }
  i32 before = 0, sum = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    before += src < p.layout.call.rank ? values[src] : 0;
    sum += values[src];
    is_good = is_good && values[src] >= 0 && values[src] <= max_count(p.layout);
  }
  s.first_row[d] = before;
  if (d == p.layout.call.rank) s.num_recv = sum;
  return is_good && (sum <= p.layout.max_recv_rows || may_drop(p.layout));
}

/// Learns where rows go. One block, all threads.
DEVICE bool learn_places(const FewParams& p, u64 tag, u32 active, u32 losses, FewShared& s) {
  const int idx = static_cast<int>(threadIdx.x);
  if (idx < kNumHeaderWords + kNumRanks && !learn_word(p, tag, active, losses, s, idx)) s.is_good = 0;
  __syncthreads();
  return s.is_good;
}

/// Sends a token to all its destinations, its row first: that is what takes long. One warp.
DEVICE void send_token(const FewParams& p, u64 tag, const Destination& to, int token, const Traveller& t,
                       const u8* stage, u64* barrier, u32 parity) {
  // `learn_places` has checked the sums, unless rows may be dropped, or somebody overwrites the routing meanwhile.
  const i32 place = t.place < 0 ? -1 : t.place + to.first_row;
  const i32 row = is_row(place, p.layout.max_recv_rows) ? place : -1;
  perhaps_stall(tag, p.layout.call.rank, 4);
  if (lane_idx() == 0) wait_load(p.layout.call, tag, barrier, parity);
  store_chunk(p.payload, to, row, 0, static_cast<u32>(p.payload.row_bytes), stage);
  send_beside<false>(p.payload, to, row, token, t.expert, t.weight, -1);
}

/// All threads of a block behind the coordinator's. True when its rows are at their places.
DEVICE bool mover(const FewParams& p, u64 tag, u32 active, u32 losses, FewShared& s, u8* stages) {
  const int num_movers = static_cast<int>(gridDim.x) - 1;
  const int index = static_cast<int>(blockIdx.x) - 1;
  const int step = num_movers * p.num_move_warps;
  const int num_tokens = p.layout.num_tokens;
  u8* stage = stages + static_cast<i64>(warp_idx()) * p.payload.chunk_bytes;
  u64* barrier = s.barriers + warp_idx();
  int token = warp_idx() < p.num_move_warps ? index + num_movers * warp_idx() : num_tokens;
  if (token < num_tokens && lane_idx() == 0) load_row(p.payload, token, stage, barrier);
  find_ranks(p.layout, tag, active, s, nullptr);
  Traveller t = {-1, -1, 0.0f};
  if (token < num_tokens) t = prepare(p.layout, s, token);
  const bool is_good = learn_places(p, tag, active, losses, s);
  allow_next_kernel();
  if (!is_good) {  // a block must not end while a load into its shared memory is under way
    if (token < num_tokens && lane_idx() == 0) wait_load(p.layout.call, tag, barrier, 0);
    return false;
  }
  Destination to = {nullptr, 0, 0, {0, 0}};
  if (lane_idx() < kNumRanks) to = {reinterpret_cast<u8*>(s.slot[lane_idx()]), s.first_row[lane_idx()], 0, {0, 0}};
#pragma unroll 1
  for (u32 parity = 0; token < num_tokens; parity ^= 1) {
    send_token(p, tag, to, token, t, stage, barrier, parity);
    token += step;
    if (token >= num_tokens) break;
    if (lane_idx() == 0) {
      bulk_wait_read<0>();
      load_row(p.payload, token, stage, barrier);
    }
    t = prepare(p.layout, s, token);
  }
  if (p.payload.fill_tail)
    fill_tail(p.payload, reinterpret_cast<u8*>(s.slot[p.layout.call.rank]), s.num_recv, index, num_movers);
  if (lane_idx() == 0) bulk_wait<0>();
  return true;
}

/// All threads of block 0.
DEVICE bool coordinator(const FewParams& p, u64 tag, u32 active, u32 losses, FewShared& s, i32* counters) {
  find_ranks(p.layout, tag, active, s, counters);
  send_counts(p.layout, tag, active, losses, counters, 0);
  receive_rows(p.layout, tag, active, losses, counters);
  allow_next_kernel();
  __syncthreads();
  return !has_failed(p.layout.call, tag);
}

namespace epee {

__global__ void __launch_bounds__(512, 1) dispatch_throughput_few(const __grid_constant__ FewParams p) {
  __shared__ FewShared s;
  i32* counters = reinterpret_cast<i32*>(dynamic_shared());
  const bool is_coordinator = blockIdx.x == 0;
  if (is_coordinator)
    for (int i = static_cast<int>(threadIdx.x); i <= p.layout.num_experts + kNumRanks; i += blockDim.x) counters[i] = 0;
  if (threadIdx.x == 0) s.is_good = 1;
  stage_experts(staged_experts(), p.layout.experts, p.layout.num_experts);  // before the barrier in the next line
  init_barriers(s.barriers, kMaxFewWarps);
  wait_previous_kernel();
  const Call& call = p.layout.call;
  const u64 tag = current_tag(call);
  const u32 active = active_ranks(call);
  // Early, for its latency; by those alone who ask: one word that all warps of a GPU load costs half a microsecond.
  const u32 losses = is_coordinator || warp_idx() == 0 ? losses_of(call) : 0;
  const bool is_good = is_coordinator ? coordinator(p, tag, active, losses, s, counters)
                                      : mover(p, tag, active, losses, s, dynamic_shared());
  announce_block(call, tag, kControlDispatchDoneOffset, is_good ? active : 0);
  if (!is_coordinator) return;
  const i32* grants = reinterpret_cast<const i32*>(control_at(call, call.rank, kControlGrantsOffset));
  await_blocks(call, tag, kControlDispatchDoneOffset, grants + 2 * kMaxRanks, is_good, 1);
  finish_call(call, tag);
}

}  // namespace epee
