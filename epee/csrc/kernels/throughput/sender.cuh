// The sender of a dispatch, one warp: bulk-loads a token's row into shared memory once and bulk-stores it to its row at
// every destination (in the expert layout, at every other rank), with what travels beside it: expert ids, weights,
// scales, source index. `kStages` chunks are in flight. It waits for nobody but its own loads and stores.
//
// Slot of the receive region (offsets in the params): rows | topk_idx | topk_weights | scales | src_token. In the
// expert layout the topk_idx field holds i32 rows of the result instead.
#pragma once
#include "../../common/call.cuh"
#include "../../common/experts.cuh"
#include "../../common/load.cuh"
#include "../../common/work.cuh"

constexpr int kPublishTokens = 4;   // a stream's progress is told every so many tokens,
constexpr int kPublishPending = 2;  // leaving so many rows in flight, of wide rows as many chunks
constexpr u64 kStreamTagBits = 24;  // of a progress word, at the top
constexpr u32 kPauseNs = 200;       // between two looks of publishers and expanders
constexpr int kMaxSenderWarps = 16;

DEVICE u64 progress_word(u64 tag, int num_rows, bool is_done) {
  return tag << (64 - kStreamTagBits) | static_cast<u64>(num_rows) << 1 | (is_done ? 1 : 0);
}

/// Two words per (source rank, channel) in the receiver's control block: progress, first row.
DEVICE u64* stream_at(const Call& call, int owner, int src_rank, int channel) {
  return control_words(call, owner, kControlStreamsOffset) + (src_rank * kMaxChannels + channel) * 2;
}

/// A sending warp's view of its destinations; lane d holds rank d's.
struct Destination {
  u8* slot;
  i32 first_row;                    // rows of lower source ranks come before ours
  i32 num_sent;                     // rows of this channel so far
  i32 num_before[kPublishPending];  // the same, some tokens ago
};

DEVICE Destination open_destination(const DispatchParams& p) {
  Destination to = {nullptr, 0, 0, {0, 0}};
  const int d = lane_idx();
  if (d < kNumRanks) {
    const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
    to.slot = reinterpret_cast<u8*>(p.slots[d] + static_cast<u64>(grants[d]) * p.slot_bytes);
    to.first_row = reinterpret_cast<const i32*>(p.row_base)[p.num_experts + d];
  }
  return to;
}

/// Writes what travels beside a row to rank `d`, coalesced over the warp.
template <bool kExpert>
DEVICE void send_metadata(const DispatchParams& p, u8* slot, int d, i64 row, int token, i32 expert, float weight,
                          i32 expanded_row) {
  const int lane = lane_idx();
  const bool is_there = expert >= 0 && owner_of(expert, p.num_local_experts) == d;
  if (lane < p.num_topk) {
    const i64 at = row * p.num_topk + lane;
    if (kExpert)
      reinterpret_cast<i32*>(slot + p.topk_idx_offset)[at] = is_there ? expanded_row : -1;
    else
      reinterpret_cast<i64*>(slot + p.topk_idx_offset)[at] =
          is_there ? expert - first_expert_of(d, p.num_local_experts) : -1;
    if (p.weights_of) reinterpret_cast<float*>(slot + p.weights_offset)[at] = is_there ? weight : 0.0f;
  }
  if (lane == 0) reinterpret_cast<i64*>(slot + p.src_token_offset)[row] = token;
}

/// Sends the scales of a token to all its destinations; lane d holds rank d's row.
DEVICE void send_scales(const DispatchParams& p, const Destination& to, i32 row, int token) {
  const u32* from = reinterpret_cast<const u32*>(p.scales) + token * p.scale_row_stride;
#pragma unroll 1
  for (int first = 0; first < p.num_scales; first += 64) {
    const int i = first + lane_idx();
    const u32 low = i < p.num_scales ? from[i * p.scale_column_stride] : 0;
    const u32 high = i + 32 < p.num_scales ? from[(i + 32) * p.scale_column_stride] : 0;
#pragma unroll 1
    for (u32 left = __ballot_sync(~0u, row >= 0); left; left &= left - 1) {
      const int d = __ffs(left) - 1;
      const i64 row_at = __shfl_sync(~0u, row, d);
      u8* slot = reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(to.slot), d));
      u32* at = reinterpret_cast<u32*>(slot + p.scales_offset) + row_at * p.num_scales + i;
      if (i < p.num_scales) at[0] = low;
      if (i + 32 < p.num_scales) at[32] = high;
    }
  }
}

/// What the sending warps of a block have finished, for the block's publisher: rows for each rank, and bit 31 when the
/// channel is done. A sender must not publish itself: a release would make it wait for all its stores in flight.
struct Posted {
  u32 progress[kMaxSenderWarps][kMaxRanks];
};
constexpr u32 kPostedDone = 1u << 31;

DEVICE void post_progress(Posted& posted, i32 num_rows, bool is_done) {
  __syncwarp();
  if (lane_idx() < kNumRanks)
    st_release_cta(&posted.progress[warp_idx()][lane_idx()], static_cast<u32>(num_rows) | (is_done ? kPostedDone : 0));
}

/// Which tokens a warp sends: `token`, then `token + step` and so on below `end`. With `is_shared` only the first one
/// is the warp's own; the others come from a counter that all warps of the GPU share, because SMs differ in speed.
struct TokenSource {
  i32 token, step, end;
  u32* shared_counter;
  i32 first_shared;
  i32 upcoming;  // lane 0: fetched ahead of its use

  template <bool kIsShared>
  DEVICE void fetch() {
    if (kIsShared && lane_idx() == 0)
      upcoming = first_shared + static_cast<i32>(atom_add_relaxed_gpu(shared_counter, 1));
  }
  template <bool kIsShared>
  DEVICE i32 next() {
    if (!kIsShared) return token += step;
    token = __shfl_sync(~0u, upcoming, 0);
    fetch<kIsShared>();
    return token;
  }
};

/// A chunk of a token's row and the stage that it passes through.
struct Unit {
  i32 token;
  int offset;  // in the row
  int stage;
  u32 parity;  // of the stage's barrier

  DEVICE u32 num_bytes(const DispatchParams& p) const {
    return static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset));
  }
  template <int kStages, bool kIsShared>
  DEVICE Unit next(const DispatchParams& p, TokenSource& tokens) const {
    Unit unit = {token, offset + p.chunk_bytes, stage + 1, parity};
    if (unit.offset >= p.row_bytes) {
      unit.offset = 0;
      unit.token = tokens.next<kIsShared>();
    }
    if (unit.stage == kStages) {
      unit.stage = 0;
      unit.parity ^= 1;
    }
    return unit;
  }
};

/// Sends what travels beside a token's row to all its destinations; lane d holds rank d's row, lane k slot k.
template <bool kExpert>
DEVICE void send_beside(const DispatchParams& p, const Destination& to, i32 row, int token, i32 expert, float weight,
                        i32 expanded_row) {
#pragma unroll 1
  for (u32 left = __ballot_sync(~0u, row >= 0); left; left &= left - 1) {
    const int d = __ffs(left) - 1;
    u8* slot = reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(to.slot), d));
    send_metadata<kExpert>(p, slot, d, __shfl_sync(~0u, row, d), token, expert, weight, expanded_row);
  }
  if (p.num_scales) send_scales(p, to, row, token);
}

/// A token's rows at its destinations (lane d: rank d's, -1 for none), after sending what travels beside them.
template <bool kExpert>
DEVICE i32 begin_token(const DispatchParams& p, const Destination& to, int token) {
  const int lane = lane_idx();
  i32 expert = -1, expanded_row = -1;
  float weight = 0.0f;
  if (lane < p.num_topk) {
    const i64 at = static_cast<i64>(token) * p.num_topk + lane;
    expert = reinterpret_cast<const i32*>(p.expert_of)[at];
    if (p.weights_of) weight = reinterpret_cast<const float*>(p.weights_of)[at];
    if (kExpert && expert >= 0)
      expanded_row = reinterpret_cast<const i32*>(p.row_base)[expert] + reinterpret_cast<const i32*>(p.ordinals)[at];
  }
  const i64 place_at = static_cast<i64>(token) * kNumRanks + lane;
  // In the expert layout this rank's expanders read the row where it is.
  const bool is_sent = lane < kNumRanks && !(kExpert && lane == p.call.rank);
  const i32 place = is_sent ? reinterpret_cast<const i32*>(p.send_prefix)[place_at] : -1;
  // Rows beyond the capacity are dropped here; without one this keeps even a damaged handle inside the slot.
  const i32 row = place >= 0 && is_row(place + to.first_row, p.max_recv_rows) ? place + to.first_row : -1;
  send_beside<kExpert>(p, to, row, token, expert, weight, expanded_row);
  return row;
}

/// Rows [first_row, end_row) of a slot say that no expert wants them; this block's share of `num_blocks`. All threads.
/// Only used when the host does not know the count; nobody else writes there.
DEVICE void fill_tail(const DispatchParams& p, u8* slot, int first_row, int block, int num_blocks) {
  i64* topk_idx = reinterpret_cast<i64*>(slot + p.topk_idx_offset);
  const i64 end = static_cast<i64>(p.max_recv_rows) * p.num_topk;
  const i64 step = static_cast<i64>(num_blocks) * blockDim.x;
#pragma unroll 1
  for (i64 i = static_cast<i64>(first_row) * p.num_topk + block * static_cast<i64>(blockDim.x) + threadIdx.x; i < end;
       i += step)
    topk_idx[i] = -1;
}

/// Stores a chunk at all destinations of its token. All lanes; lane 0 stores.
DEVICE void store_chunk(const DispatchParams& p, const Destination& to, i32 row, int offset, u32 num_bytes,
                        const u8* stage) {
  const u32 wanted = __ballot_sync(~0u, row >= 0);
#pragma unroll 1
  for (int k = 1; k <= kNumRanks; ++k) {
    const int d = p.call.rank + k < kNumRanks ? p.call.rank + k : p.call.rank + k - kNumRanks;
    if (!(wanted >> d & 1)) continue;  // each rank begins behind itself, so that no inlet is crowded
    const i64 row_at = __shfl_sync(~0u, row, d);
    u8* slot = reinterpret_cast<u8*>(__shfl_sync(~0u, reinterpret_cast<u64>(to.slot), d));
    if (lane_idx() == 0) bulk_store(slot + row_at * p.row_bytes + offset, stage, num_bytes);
  }
  if (lane_idx() == 0) bulk_commit();
}

/// Sends the tokens of `tokens`. One warp; `stages` has kStages chunks and barriers.
template <bool kExpert, int kStages>
DEVICE void sender(const DispatchParams& p, u64 tag, Destination to, int channel, TokenSource tokens, u8* stages,
                   u64* barriers, Posted* posted) {
  const int lane = lane_idx();
  const auto load = [&](const Unit& unit) {  // its stage was stored kStages - 1 units ago
    if (lane != 0 || unit.token >= tokens.end) return;
    bulk_wait_read<kStages - 2>();  // groups are per thread and lane 0 commits one per unit, so this counts units
    mbarrier_arrive_expect(barriers + unit.stage, unit.num_bytes(p));
    bulk_load(stages + static_cast<i64>(unit.stage) * p.chunk_bytes,
              reinterpret_cast<const u8*>(p.x) + unit.token * p.x_stride + unit.offset, unit.num_bytes(p),
              barriers + unit.stage);
  };
  tokens.fetch<!kExpert>();
  Unit unit = {tokens.token, 0, 0, 0};
  Unit ahead = unit;
  i32 row = -1;
  int num_sent = 0;
#pragma unroll 1
  for (bool is_first = true; unit.token < tokens.end; unit = ahead) {
    if (is_first) load(unit);
    is_first = false;
    ahead = unit.next<kStages, !kExpert>(p, tokens);
    load(ahead);
    if (unit.offset == 0) {
      perhaps_stall(tag, p.call.rank, 4);
      row = begin_token<kExpert>(p, to, unit.token);
      ++num_sent;
      if (kExpert) {
        if (row >= 0 && to.num_sent == 0) stream_at(p.call, lane, p.call.rank, channel)[1] = static_cast<u64>(row);
        to.num_before[1] = to.num_before[0];
        to.num_before[0] = to.num_sent;
        to.num_sent += row >= 0;
      }
    }
    if (lane == 0) wait_load(p.call, tag, barriers + unit.stage, unit.parity);
    store_chunk(p, to, row, unit.offset, unit.num_bytes(p), stages + static_cast<i64>(unit.stage) * p.chunk_bytes);
    if (kExpert && num_sent % kPublishTokens == 0 && unit.offset + p.chunk_bytes >= p.row_bytes) {
      if (lane == 0) bulk_wait<kPublishPending>();
      post_progress(*posted, to.num_before[kPublishPending - 1], false);
    }
  }
  if (kExpert) {
    if (lane == 0) bulk_wait<0>();
    post_progress(*posted, to.num_sent, true);
  }
  __syncwarp();
}
