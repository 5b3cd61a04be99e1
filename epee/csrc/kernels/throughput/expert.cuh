// Dispatch into the expert layout: a row crosses once per destination rank and is expanded there, in the same kernel.
//
// Positions. `layout.cuh` has run before: all ranks know all counts, so `row_base[expert]` (padding included) plus the
// ordinal of (token, k) is the row of the result. Nothing depends on the order in which rows arrive.
//
// sender (sender.cuh): one warp for each channel, a contiguous piece of the tokens. Its rows for other ranks arrive in
//   (source, token) order in the receiver's slot, which serves as staging, and beside each the rows of the result.
// publisher: one warp of a sending block; it writes the receivers' `streams` (a progress word with the tag, and the
//   first row), which say how many rows of a channel are whole. Its release waits for stores in flight; the senders
//   must not. A stream's last word has bit 0 set.
// expander (all warps of the blocks behind the senders): copies each row, loaded once, to all its offsets: rows of
//   peers as the streams say that they are whole; while none is, rows of this rank's own tokens, read from `x` itself
//   (a counter hands them out; they are neither sent nor staged); and then its share of the padding. Neighbouring
//   streams are watched by warps of different blocks: all SMs store, whatever the number of channels. Where there are
//   more warps than streams, several warps watch one stream and take its rows in turn.
//
// Only expanders wait for other ranks, each until its streams have ended, its time-out or the report of a death: then
// the call fails here and the result holds some of its rows only. A peer that is late may write into the slot until it
// has joined a later call (`call.cuh`).
//
// When all expanders are done, all channels of all ranks are, so block 0 need only wait for its own rank's blocks; then
// it clears the counter. Expanders wait for senders; these have lower block numbers, so they have their places first
// and wait for nobody.
#pragma once
#include "sender.cuh"

/// One warp of a sending block: passes on what the senders post until all their channels are done.
DEVICE void publisher(const DispatchParams& p, u64 tag, int first_channel, int num_senders, Posted& posted) {
  CONSTANT int kLanesPerSender = kNumRanks;
  CONSTANT int kSenders = 32 / kLanesPerSender;
  CONSTANT int kTurns = (kMaxSenderWarps + kSenders - 1) / kSenders;
  const int d = lane_idx() % kLanesPerSender;
  const bool is_told = is_in(active_ranks(p.call), d) && d != p.call.rank;
  // In registers: what this lane has told. Several lanes serve a sender, one for each rank.
  u32 told[ROOM(kTurns, kMaxSenderWarps)];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) told[i] = 0;
  bool is_open = true;
  while (__ballot_sync(~0u, is_open)) {
    perhaps_stall(tag + told[0], p.call.rank, 9);
    is_open = false;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int sender = i * kSenders + lane_idx() / kLanesPerSender;
      if (sender >= num_senders || lane_idx() >= kSenders * kLanesPerSender || told[i] & kPostedDone) continue;
      const u32 now = ld_acquire_cta(&posted.progress[sender][d]);
      if (now != told[i] && is_told)
        st_release_sys(stream_at(p.call, d, p.call.rank, first_channel + sender),
                       progress_word(tag, static_cast<int>(now & ~kPostedDone), now & kPostedDone));
      told[i] = now;
      is_open |= !(now & kPostedDone);
    }
    sleep_ns(kPauseNs);
  }
}

/// A warp's stages in shared memory, used in turn; lane 0 loads into them and stores from them.
template <int kStages>
struct Ring {
  u8* stages;
  u64* barriers;
  u32 num_uses;

  DEVICE u8* stage(const DispatchParams& p) const {
    return stages + static_cast<i64>(num_uses % kStages) * p.chunk_bytes;
  }
  DEVICE u64* barrier() const { return barriers + num_uses % kStages; }
};

/// Starts the load of a row's chunk into the next stage. One lane.
template <int kStages>
DEVICE void load_chunk(const DispatchParams& p, const Ring<kStages>& ring, const u8* row, int offset) {
  const u32 num_bytes = static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset));
  bulk_wait_read<kStages - 1>();  // one group for each use: the stage may still be on its way out
  fence_proxy_async();  // the row was written by another GPU, acquired by an ordinary load, and is read in bulk now
  mbarrier_arrive_expect(ring.barrier(), num_bytes);
  bulk_load(ring.stage(p), row + offset, num_bytes, ring.barrier());
}

/// Copies a row, whose first chunk is being loaded, to rows `to` of the result (lane k: of slot k, -1 for none). One
/// warp.
template <int kStages>
DEVICE void store_row(const DispatchParams& p, u64 tag, Ring<kStages>& ring, const u8* row, i32 to) {
  const u32 wanted = __ballot_sync(~0u, to >= 0);
#pragma unroll 1
  for (int offset = 0; offset < p.row_bytes; offset += p.chunk_bytes) {
    const u32 num_bytes = static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset));
    if (lane_idx() == 0) {
      if (offset) load_chunk(p, ring, row, offset);
      wait_load(p.call, tag, ring.barrier(), ring.num_uses / kStages & 1);
    }
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const i64 row_at = __shfl_sync(~0u, to, __ffs(left) - 1);
      if (lane_idx() == 0)
        bulk_store(reinterpret_cast<u8*>(p.out_x) + row_at * p.row_bytes + offset, ring.stage(p), num_bytes);
    }
    if (lane_idx() == 0) bulk_commit();
    ++ring.num_uses;
  }
}

/// Copies the scales of a row, `stride` elements apart, to rows `to` of the result as above. One warp.
DEVICE void store_scales(const DispatchParams& p, const i32* scales, i64 stride, i32 to) {
  const u32 wanted = __ballot_sync(~0u, to >= 0);
#pragma unroll 1
  for (int first = 0; first < p.num_scales; first += 64) {
    const int i = first + lane_idx();
    const i32 low = i < p.num_scales ? ld_relaxed_sys(scales + i * stride) : 0;
    const i32 high = i + 32 < p.num_scales ? ld_relaxed_sys(scales + (i + 32) * stride) : 0;
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const i64 row_at = __shfl_sync(~0u, to, __ffs(left) - 1);
      i32* at = reinterpret_cast<i32*>(p.out_scales) + row_at * p.num_scales + i;
      if (i < p.num_scales) at[0] = low;
      if (i + 32 < p.num_scales) at[32] = high;
    }
  }
}

/// Writes what is beside row `to` of the result; -1 instead of the row, with a report, when it cannot exist.
DEVICE i32 store_source(const DispatchParams& p, u64 tag, i32 to, float weight, int src_rank, i64 token) {
  if (to >= p.max_expanded_rows || to < -1) {
    report_failure(p.call, tag, {kBadRow, src_rank, static_cast<u64>(p.max_expanded_rows), static_cast<u64>(to), 0});
    return -1;
  }
  if (to >= 0) {
    reinterpret_cast<float*>(p.out_weights)[to] = p.weights_of ? weight : 1.0f;
    reinterpret_cast<i64*>(p.out_src_rank)[to] = src_rank;
    reinterpret_cast<i64*>(p.out_src_k)[to] = lane_idx();
    reinterpret_cast<i64*>(p.out_src_token)[to] = token;
  }
  return to;
}

/// Expands a row that a peer has staged. One warp.
template <int kStages>
DEVICE void expand_staged(const DispatchParams& p, u64 tag, const u8* slot, int src_rank, i64 row,
                          Ring<kStages>& ring) {
  const u8* from = slot + row * p.row_bytes;
  if (lane_idx() == 0) load_chunk(p, ring, from, 0);
  i32 to = -1;
  if (lane_idx() < p.num_topk) {
    const i64 at = row * p.num_topk + lane_idx();
    to = ld_relaxed_sys(reinterpret_cast<const i32*>(slot + p.topk_idx_offset) + at);
    float weight = 1.0f;  // all loads at once
    if (p.weights_of) weight = ld_relaxed_sys(reinterpret_cast<const float*>(slot + p.weights_offset) + at);
    const u64 token = ld_relaxed_sys(reinterpret_cast<const u64*>(slot + p.src_token_offset) + row);
    to = store_source(p, tag, to, weight, src_rank, static_cast<i64>(token));
  }
  __syncwarp();
  perhaps_stall(tag + static_cast<u64>(row), p.call.rank, 10);
  store_row(p, tag, ring, from, to);
  if (p.num_scales) store_scales(p, reinterpret_cast<const i32*>(slot + p.scales_offset) + row * p.num_scales, 1, to);
}

/// Expands a token of this rank, if experts of this rank want it: from `x` itself. One warp.
template <int kStages>
DEVICE void expand_own(const DispatchParams& p, u64 tag, int token, Ring<kStages>& ring) {
  i32 to = -1;
  if (lane_idx() < p.num_topk) {
    const i64 at = static_cast<i64>(token) * p.num_topk + lane_idx();
    const i32 expert = reinterpret_cast<const i32*>(p.expert_of)[at];
    const i32 ordinal = reinterpret_cast<const i32*>(p.ordinals)[at];
    const float weight = p.weights_of ? reinterpret_cast<const float*>(p.weights_of)[at] : 1.0f;
    if (expert >= 0 && owner_of(expert, p.num_local_experts) == p.call.rank) {
      to = reinterpret_cast<const i32*>(p.row_base)[expert] + ordinal;
      to = store_source(p, tag, to, weight, p.call.rank, token);
    }
  }
  if (!__ballot_sync(~0u, to >= 0)) return;
  perhaps_stall(tag + static_cast<u64>(token), p.call.rank, 10);
  const u8* from = reinterpret_cast<const u8*>(p.x) + token * p.x_stride;
  if (lane_idx() == 0) load_chunk(p, ring, from, 0);
  store_row(p, tag, ring, from, to);
  if (p.num_scales)
    store_scales(p, reinterpret_cast<const i32*>(p.scales) + token * p.scale_row_stride, p.scale_column_stride, to);
}

/// Rows behind the last one say that they are nobody's; a share of `num_threads`. Only used when the host does not know
/// their number.
DEVICE void fill_expanded_tail(const DispatchParams& p, int thread, int num_threads) {
#pragma unroll 1
  for (int row = reinterpret_cast<const i32*>(p.recv_info)[kRecvInfoExpanded] + thread; row < p.max_expanded_rows;
       row += num_threads) {
    reinterpret_cast<float*>(p.out_weights)[row] = 0.0f;
    reinterpret_cast<i64*>(p.out_src_rank)[row] = -1;
    reinterpret_cast<i64*>(p.out_src_token)[row] = -1;
    reinterpret_cast<i64*>(p.out_src_k)[row] = -1;
  }
}

/// A warp's share of the rows between an expert's last row and its alignment: `row` and every `num_parts`-th behind it
/// below `end`, then those of the next items. `num_parts` warps share an expert's padding.
struct Padding {
  int item, num_parts;
  i64 row, end;
};

/// Goes on to the next item. All lanes.
DEVICE void open_padding(const DispatchParams& p, int num_warps, Padding& left) {
  const int num_counters = p.num_experts + kNumRanks;
  const i32* matrix = reinterpret_cast<const i32*>(p.count_matrix);
  const int expert = first_expert_of(p.call.rank, p.num_local_experts) + left.item % p.num_local_experts;
  i32 first = reinterpret_cast<const i32*>(p.row_base)[expert];
  i32 count = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) {
    const i32 here = matrix[src * num_counters + expert];
    count += here;
    if (src >= p.call.rank) first += here;
  }
  left.row = first + left.item / p.num_local_experts;
  left.end = first + round_up(count, p.expert_alignment) - count;
  left.item += num_warps;
}

/// Writes a row of padding: zeros, and -1 as source. False when none is left. One warp.
DEVICE bool fill_padding(const DispatchParams& p, int num_warps, const u8* zeros, Padding& left) {
  while (left.row >= left.end) {
    if (left.item >= left.num_parts * p.num_local_experts) return false;
    open_padding(p, num_warps, left);
  }
  const i64 row = left.row;
  left.row += left.num_parts;
  if (lane_idx() == 0) {
    bulk_wait_read<0>();  // more in flight would only delay the rows
    for (int offset = 0; offset < p.row_bytes; offset += p.chunk_bytes)
      bulk_store(reinterpret_cast<u8*>(p.out_x) + row * p.row_bytes + offset, zeros,
                 static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset)));
    bulk_commit();
    reinterpret_cast<float*>(p.out_weights)[row] = 0.0f;
    reinterpret_cast<i64*>(p.out_src_rank)[row] = -1;
    reinterpret_cast<i64*>(p.out_src_token)[row] = -1;
    reinterpret_cast<i64*>(p.out_src_k)[row] = -1;
  }
  for (int s = lane_idx(); s < p.num_scales; s += 32) reinterpret_cast<u32*>(p.out_scales)[row * p.num_scales + s] = 0;
  __syncwarp();
  return true;
}

/// How many rows rank `src_rank` may have at `first_row` and behind it in our slot; 0 when that row is not one of its.
DEVICE i32 rows_from(const DispatchParams& p, int src_rank, i32 first_row) {
  const i32* counts = reinterpret_cast<const i32*>(p.count_matrix) + p.num_experts + p.call.rank;
  i32 begin = 0;
#pragma unroll 1
  for (int src = 0; src < src_rank; ++src) begin += counts[src * (p.num_experts + kNumRanks)];
  const i32 end = begin + counts[src_rank * (p.num_experts + kNumRanks)];
  return first_row < begin || first_row > end ? 0 : end - first_row;
}

/// Which streams a warp watches: `first`, and every `num_warps`-th from there, a lane each. Where there are more warps
/// than streams, `num_shares` warps watch the same one, and each expands every `num_shares`-th of its rows.
struct Watch {
  int first, share, num_shares;
};

constexpr int kMaxShares = 8;

DEVICE int num_peers() { return max(1, kNumRanks - 1); }

/// The peer and the channel of a stream. Neighbouring streams are of different peers.
DEVICE int peer_of(const DispatchParams& p, int stream) { return (p.call.rank + 1 + stream % num_peers()) % kNumRanks; }
DEVICE int channel_of(int stream) { return stream / num_peers(); }

DEVICE Watch choose_streams(const DispatchParams& p, const i32* grants, int warp, int num_warps) {
  int num_channels = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src)
    if (src != p.call.rank) num_channels = max(num_channels, grants[kMaxRanks + src]);
  const int num_streams = num_channels * num_peers();
  if (2 * num_streams > num_warps || num_streams == 0) return {warp, 0, 1};
  const int num_shares = min(kMaxShares, num_warps / num_streams);
  const int share = warp / num_streams;
  return {share < num_shares ? warp % num_streams : kMaxChannels * num_peers(), share, num_shares};
}

/// Watches up to 32 streams and expands their rows until all are finished, and meanwhile tokens of this rank. One warp
/// of `num_warps`. False when none of them is in use: then none of those behind them is, either.
template <int kStages>
DEVICE bool expand_streams(const DispatchParams& p, u64 tag, const i32* grants, const Watch& watch, int num_warps,
                           TokenSource& own, Padding& padding, const u8* zeros, Ring<kStages>& ring) {
  const int stream = watch.first + lane_idx() * num_warps;
  const int peer = peer_of(p, stream);
  bool is_open = kNumRanks > 1 && channel_of(stream) < grants[kMaxRanks + peer];  // kMaxChannels at most
  if (watch.num_shares > 1 && lane_idx() > 0) is_open = false;
  if (has_failed(p.call, tag)) is_open = false;  // each group of streams would wait for its own time-out
  i32 first_row = 0, num_done = 0, most = 0;
  if (!__ballot_sync(~0u, is_open)) return false;
  const u8* slot =
      reinterpret_cast<const u8*>(p.slots[p.call.rank] + static_cast<u64>(grants[p.call.rank]) * p.slot_bytes);
  u32 last_news = static_cast<u32>(global_time_ns() >> 20);  // about milliseconds
  // not `bounded_wait`: what has come is worked on between two polls, and each lane's wait ends by itself
  for (u32 polls = 1; __ballot_sync(~0u, is_open); ++polls) {
    i32 num_ready = num_done;
    bool is_finished = false;
    if (is_open) {
      const u64* word = stream_at(p.call, p.call.rank, peer, channel_of(stream));
      const u64 progress = ld_acquire_sys(word);
      if (progress >> (64 - kStreamTagBits) == (tag & ((1ull << kStreamTagBits) - 1))) {
        is_finished = progress & 1;
        num_ready = static_cast<i32>(progress >> 1 & 0x7FFFFFFF);
        if (num_ready > 0 && num_done == 0) {
          first_row = static_cast<i32>(ld_relaxed_sys(word + 1));
          most = rows_from(p, peer, first_row);
        }
        // a peer's words are numbers of rows of ours: they are checked before anything is read by them
        if (num_ready < num_done || num_ready > most) {
          report_failure(p.call, tag, {kBadRow, peer, static_cast<u64>(most), progress, 0});
          num_ready = num_done;
          is_finished = true;
        }
      }
    }
    __syncwarp();
    u32 ready = __ballot_sync(~0u, num_ready > num_done);
    const bool is_news = ready != 0;
    for (; ready; ready &= ready - 1) {
      const int from = __ffs(ready) - 1;
      const i32 base = __shfl_sync(~0u, first_row, from);
      const i32 begin = __shfl_sync(~0u, num_done, from);
      const i32 end = __shfl_sync(~0u, num_ready, from);
      const int src = __shfl_sync(~0u, peer, from);
      const i32 behind = begin % watch.num_shares;  // of the share whose turn is next
      const i32 mine = begin + (watch.share - behind + watch.num_shares) % watch.num_shares;
      for (i32 row = mine; row < end; row += watch.num_shares) expand_staged(p, tag, slot, src, base + row, ring);
    }
    num_done = num_ready;
    if (is_finished) is_open = false;
    if (is_news) {
      last_news = static_cast<u32>(global_time_ns() >> 20);
    } else if (own.token < own.end) {
      expand_own(p, tag, own.token, ring);
      own.next<true>();
    } else if (!fill_padding(p, num_warps, zeros, padding)) {
      sleep_ns(kPauseNs);  // hundreds of warps poll
    }
    if (polls % kPollsPerLook) continue;
    const u64 now = global_time_ns();
    const u64 silent_ns = static_cast<u64>(static_cast<u32>(now >> 20) - last_news) << 20;
    if (is_open && must_stop(p.call, tag, now - silent_ns, peer, tag, static_cast<u64>(num_done), 2)) is_open = false;
  }
  return true;
}

/// Expands a share of all rows. One warp of `num_warps`. The peers choose how many channels they have, so there may be
/// more streams than can be watched at once; no sender waits for that, as each row has its place in the slot.
template <int kStages>
DEVICE void expander(const DispatchParams& p, u64 tag, int warp, int num_warps, const u8* zeros, Ring<kStages> ring) {
  const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
  u32* counter = reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset));
  TokenSource own = {warp, 0, p.num_tokens, counter, num_warps, 0};
  own.fetch<true>();
  Padding padding = {warp, max(1, num_warps / p.num_local_experts), 0, 0};
  if (p.fill_tail) fill_expanded_tail(p, warp * 32 + lane_idx(), num_warps * 32);
  Watch watch = choose_streams(p, grants, warp, num_warps);
#pragma unroll 1
  while (expand_streams(p, tag, grants, watch, num_warps, own, padding, zeros, ring)) {
    if (watch.num_shares > 1) break;
    watch.first += 32 * num_warps;
  }
#pragma unroll 1
  for (; own.token < own.end; own.next<true>()) expand_own(p, tag, own.token, ring);
  while (fill_padding(p, num_warps, zeros, padding)) {}
  if (lane_idx() == 0) bulk_wait<0>();
  __syncwarp();
}

/// Blocks below `num_sender_blocks` send (half of the warps, with the memory of two each; one more publishes), the
/// others expand. Behind the stages of all warps lies a chunk of zeros.
template <int kStages>
DEVICE void dispatch_by_expert(const DispatchParams& p) {
  u8* shared = dynamic_shared();
  __shared__ u64 barriers[kStages / 2 * kMaxSenderWarps];
  __shared__ Posted posted;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int num_senders = num_warps / 2;
  const int block = static_cast<int>(blockIdx.x);
  if (threadIdx.x < kMaxSenderWarps * kMaxRanks) posted.progress[threadIdx.x / kMaxRanks][threadIdx.x % kMaxRanks] = 0;
  u8* zeros = shared + static_cast<i64>(num_warps) * (kStages / 2) * p.chunk_bytes;
  for (int i = static_cast<int>(threadIdx.x) * 16; i < p.chunk_bytes; i += static_cast<int>(blockDim.x) * 16)
    *reinterpret_cast<Vec16*>(zeros + i) = Vec16{{0, 0, 0, 0}};
  fence_proxy_async();  // before the barrier in the next line
  init_barriers(barriers, num_warps * kStages / 2);
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  if (!has_failed(p.call, tag)) {
    if (block < p.num_sender_blocks) {
      const int channel = block * num_senders + warp_idx();
      const Range tokens = piece(kNumRanks > 1 ? p.num_tokens : 0, p.num_sender_blocks * num_senders, channel);
      if (warp_idx() < num_senders)
        sender<true, kStages>(p, tag, open_destination(p), channel, {tokens.begin, 1, tokens.end, nullptr, 0, 0},
                              shared + static_cast<i64>(warp_idx()) * kStages * p.chunk_bytes,
                              barriers + warp_idx() * kStages, &posted);
      else if (warp_idx() == num_senders)
        publisher(p, tag, block * num_senders, num_senders, posted);
    } else {
      const int num_blocks = static_cast<int>(gridDim.x) - p.num_sender_blocks;
      // neighbouring warps are on different SMs, so that few streams are not the work of few SMs
      const int warp = warp_idx() * num_blocks + block - p.num_sender_blocks;
      u8* stages = shared + static_cast<i64>(warp_idx()) * (kStages / 2) * p.chunk_bytes;
      expander<kStages / 2>(p, tag, warp, num_blocks * num_warps, zeros,
                            {stages, barriers + warp_idx() * (kStages / 2), 0});
    }
  }
  announce_block(p.call, tag, kControlDispatchDoneOffset, 0);
  if (block != 0) return;
  await_blocks(p.call, tag, kControlDispatchDoneOffset, nullptr, false, 1);  // every stream is done: the peers are, too
  if (threadIdx.x == 0) *reinterpret_cast<u32*>(control_at(p.call, p.call.rank, kControlNextTokenOffset)) = 0;
  finish_call(p.call, tag);
}

namespace epee {

__global__ void __launch_bounds__(512, 1) dispatch_throughput_expert_2(const __grid_constant__ DispatchParams p) {
  dispatch_by_expert<2>(p);
}

__global__ void __launch_bounds__(512, 1) dispatch_throughput_expert_4(const __grid_constant__ DispatchParams p) {
  dispatch_by_expert<4>(p);
}

}  // namespace epee
