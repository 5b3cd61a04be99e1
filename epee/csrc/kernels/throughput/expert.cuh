// Dispatch into the expert layout: a row crosses once per destination rank and is expanded there, in the same kernel.
//
// sender (sender.cuh): rows arrive in (source, token) order in the receiver's slot, which serves as staging.
//   Each sending warp is a channel with a contiguous piece of the tokens.
// publisher: one warp of a sending block tells the receivers how many rows of each of the block's channels are whole
//   (`streams`: a progress word with the tag, and the first row). Its release waits for stores in flight; the senders
//   must not.
// expander (warps of the blocks behind the senders): watches streams, copies each row to the places of its experts and
//   fills the padding with zeros. A stream's last word has bit 0 set: then the channel is finished.
//
// When all expanders are done, all channels of all ranks are, so block 0 need only wait for its own rank's blocks.
// Expanders wait for senders; these have lower block numbers, so they have their places first and wait for nobody.
#pragma once
#include "sender.cuh"

/// One warp of a sending block: passes on what the senders post until all their channels are done.
DEVICE void publisher(const DispatchParams& p, u64 tag, int first_channel, int num_senders, Posted& posted) {
  CONSTANT int kLanesPerSender = kNumRanks;
  CONSTANT int kSenders = 32 / kLanesPerSender;
  CONSTANT int kTurns = (kMaxSenderWarps + kSenders - 1) / kSenders;
  const int d = lane_idx() % kLanesPerSender;
  const bool is_told = is_in(active_ranks(p.call), d);
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

/// Copies one staged row to the places of its experts. One warp.
DEVICE void expand_row(const DispatchParams& p, u64 tag, const u8* slot, int src_rank, i64 row, u8* stage, u64* barrier,
                       u32& parity) {
  const int lane = lane_idx();
  i32 to = -1;
  if (lane < p.num_topk) {
    const i64 at = row * p.num_topk + lane;
    to = ld_relaxed_sys(reinterpret_cast<const i32*>(slot + p.topk_idx_offset) + at);
    if (to >= p.max_expanded_rows || to < -1) {
      report_failure(p.call, tag, {kBadRow, src_rank, static_cast<u64>(p.max_expanded_rows), static_cast<u64>(to), 0});
      to = -1;
    }
    if (to >= 0) {
      const float* weights = reinterpret_cast<const float*>(slot + p.weights_offset);
      reinterpret_cast<float*>(p.out_weights)[to] = p.weights_of ? ld_relaxed_sys(weights + at) : 1.0f;
      reinterpret_cast<i64*>(p.out_src_rank)[to] = src_rank;
      reinterpret_cast<i64*>(p.out_src_k)[to] = lane;
      reinterpret_cast<i64*>(p.out_src_token)[to] =
          static_cast<i64>(ld_relaxed_sys(reinterpret_cast<const u64*>(slot + p.src_token_offset) + row));
    }
  }
  // A row that no expert of this rank wants is not here: every bit of `wanted` is a copy to make.
  const u32 wanted = __ballot_sync(~0u, to >= 0);
  perhaps_stall(tag + static_cast<u64>(row), p.call.rank, 10);
#pragma unroll 1
  for (int offset = 0; offset < p.row_bytes; offset += p.chunk_bytes) {
    const u32 num_bytes = static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset));
    if (lane == 0) {
      bulk_wait_read<0>();  // the stage may still be on its way out for the row before
      fence_proxy_async();  // the row was written by another GPU, acquired by an ordinary load, and is read in bulk now
      mbarrier_arrive_expect(barrier, num_bytes);
      bulk_load(stage, slot + row * p.row_bytes + offset, num_bytes, barrier);
      wait_load(p.call, tag, barrier, parity);
    }
    parity ^= 1;
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const i32 row_at = __shfl_sync(~0u, to, __ffs(left) - 1);
      if (lane == 0)
        bulk_store(reinterpret_cast<u8*>(p.out_x) + static_cast<i64>(row_at) * p.row_bytes + offset, stage, num_bytes);
    }
    if (lane == 0) bulk_commit();
  }
#pragma unroll 1
  for (int first = 0; first < p.num_scales; first += 32) {
    const int i = first + lane;
    const i32 scale =
        i < p.num_scales ? ld_relaxed_sys(reinterpret_cast<const i32*>(slot + p.scales_offset) + row * p.num_scales + i)
                         : 0;
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const i32 row_at = __shfl_sync(~0u, to, __ffs(left) - 1);
      if (i < p.num_scales) reinterpret_cast<i32*>(p.out_scales)[static_cast<i64>(row_at) * p.num_scales + i] = scale;
    }
  }
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

/// Zeros, and -1 as source, in the rows between an expert's last row and its alignment. `stage` is left zeroed.
DEVICE void fill_padding(const DispatchParams& p, int warp, int num_warps, u8* stage) {
  const int lane = lane_idx();
  const int num_counters = p.num_experts + kNumRanks;
  const i32* matrix = reinterpret_cast<const i32*>(p.count_matrix);
  for (int i = lane * 16; i < p.chunk_bytes; i += 32 * 16) *reinterpret_cast<Vec16*>(stage + i) = Vec16{{0, 0, 0, 0}};
  fence_proxy_async();
  __syncwarp();
  const int parts = max(1, num_warps / p.num_local_experts);  // warps that share an expert's padding
#pragma unroll 1
  for (int item = warp; item < parts * p.num_local_experts; item += num_warps) {
    const int local_expert = item % p.num_local_experts;
    const int expert = p.call.rank * p.num_local_experts + local_expert;
    i32 first = reinterpret_cast<const i32*>(p.row_base)[expert];
    i32 count = 0;
    for (int src = 0; src < kNumRanks; ++src) {
      count += matrix[src * num_counters + expert];
      if (src >= p.call.rank) first += matrix[src * num_counters + expert];
    }
    const int num_padding = round_up(count, p.expert_alignment) - count;
#pragma unroll 1
    for (int i = item / p.num_local_experts; i < num_padding; i += parts) {
      const i64 row = first + i;
      if (lane == 0) {
        for (int offset = 0; offset < p.row_bytes; offset += p.chunk_bytes)
          bulk_store(reinterpret_cast<u8*>(p.out_x) + row * p.row_bytes + offset, stage,
                     static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset)));
        bulk_commit();
        reinterpret_cast<float*>(p.out_weights)[row] = 0.0f;
        reinterpret_cast<i64*>(p.out_src_rank)[row] = -1;
        reinterpret_cast<i64*>(p.out_src_token)[row] = -1;
        reinterpret_cast<i64*>(p.out_src_k)[row] = -1;
      }
      for (int s = lane; s < p.num_scales; s += 32) reinterpret_cast<u32*>(p.out_scales)[row * p.num_scales + s] = 0;
    }
  }
  if (p.fill_tail) fill_expanded_tail(p, warp * 32 + lane, num_warps * 32);
  if (lane == 0) bulk_wait<0>();
  __syncwarp();
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

/// Watches up to 32 streams (one per lane), `first_stream` and every `num_warps`-th from there, and expands their rows
/// until all are finished. One warp; `parity` is that of its barrier. False when none of them is in use: then none of
/// those behind them is, either.
DEVICE bool expand_streams(const DispatchParams& p, u64 tag, int first_stream, int num_warps, u8* stage, u64* barrier,
                           u32& parity) {
  const i32* grants = reinterpret_cast<const i32*>(control_at(p.call, p.call.rank, kControlGrantsOffset));
  const int stream = first_stream + lane_idx() * num_warps;
  // few variables live through the loop: 64 registers are all there are
  bool is_open = stream / kNumRanks < grants[kMaxRanks + stream % kNumRanks];  // kMaxChannels at most
  if (has_failed(p.call, tag)) is_open = false;  // each group of streams would wait for its own time-out
  i32 first_row = 0, num_done = 0, most = 0;
  if (!__ballot_sync(~0u, is_open)) return false;
  u32 last_news = static_cast<u32>(global_time_ns() >> 20);  // about milliseconds
  // not `bounded_wait`: what has come is worked on between two polls, and each lane's wait ends by itself
  for (u32 polls = 1; __ballot_sync(~0u, is_open); ++polls) {
    i32 num_ready = num_done;
    bool is_finished = false;
    if (is_open) {
      const u64* word = stream_at(p.call, p.call.rank, stream % kNumRanks, stream / kNumRanks);
      const u64 progress = ld_acquire_sys(word);
      if (progress >> (64 - kStreamTagBits) == (tag & ((1ull << kStreamTagBits) - 1))) {
        is_finished = progress & 1;
        num_ready = static_cast<i32>(progress >> 1 & 0x7FFFFFFF);
        if (num_ready > 0 && num_done == 0) {
          first_row = static_cast<i32>(ld_relaxed_sys(word + 1));
          most = rows_from(p, stream % kNumRanks, first_row);
        }
        // a peer's words are numbers of rows of ours: they are checked before anything is read by them
        if (num_ready < num_done || num_ready > most) {
          report_failure(p.call, tag, {kBadRow, stream % kNumRanks, static_cast<u64>(most), progress, 0});
          num_ready = num_done;
          is_finished = true;
        }
      }
    }
    __syncwarp();
    u32 ready = __ballot_sync(~0u, num_ready > num_done);
    const bool is_news = ready != 0;
    const u8* slot =
        reinterpret_cast<const u8*>(p.slots[p.call.rank] + static_cast<u64>(grants[p.call.rank]) * p.slot_bytes);
    for (; ready; ready &= ready - 1) {
      const int from = __ffs(ready) - 1;
      const i32 begin = __shfl_sync(~0u, first_row + num_done, from);
      const i32 end = __shfl_sync(~0u, first_row + num_ready, from);
      const int src = (first_stream + from * num_warps) % kNumRanks;
      for (i32 row = begin; row < end; ++row) expand_row(p, tag, slot, src, row, stage, barrier, parity);
    }
    num_done = num_ready;
    if (is_finished) is_open = false;
    if (is_news) {
      last_news = static_cast<u32>(global_time_ns() >> 20);
    } else {
      sleep_ns(kPauseNs);  // hundreds of warps poll
    }
    if (polls % kPollsPerLook) continue;
    const u64 now = global_time_ns();
    const u64 silent_ns = static_cast<u64>(static_cast<u32>(now >> 20) - last_news) << 20;
    if (is_open && must_stop(p.call, tag, now - silent_ns, stream % kNumRanks, tag, static_cast<u64>(num_done), 2))
      is_open = false;
  }
  return true;
}

/// Expands the rows of a share of all streams. One warp of `num_warps`. The peers choose how many channels they have,
/// so there may be more than can be watched at once; no sender waits for that, as each row has its place in the slot.
DEVICE void expander(const DispatchParams& p, u64 tag, int warp, int num_warps, u8* stage, u64* barrier) {
  u32 parity = 0;
#pragma unroll 1
  for (int first = warp; expand_streams(p, tag, first, num_warps, stage, barrier, parity);) first += 32 * num_warps;
  if (lane_idx() == 0) bulk_wait<0>();
  __syncwarp();
}

/// Blocks below `num_sender_blocks` send (half of the warps, with the memory of two each; one more publishes), the
/// others expand.
namespace epee {

__global__ void __launch_bounds__(1024, 1) dispatch_throughput_expert(const __grid_constant__ DispatchParams p) {
  u8* shared = dynamic_shared();
  __shared__ u64 barriers[2 * kMaxSenderWarps];
  __shared__ Posted posted;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int num_senders = num_warps / 2;
  const int block = static_cast<int>(blockIdx.x);
  if (threadIdx.x < kMaxSenderWarps * kMaxRanks) posted.progress[threadIdx.x / kMaxRanks][threadIdx.x % kMaxRanks] = 0;
  init_barriers(barriers, num_warps);
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  if (!has_failed(p.call, tag)) {
    if (block < p.num_sender_blocks) {
      const int channel = block * num_senders + warp_idx();
      const Range tokens = piece(p.num_tokens, p.num_sender_blocks * num_senders, channel);
      if (warp_idx() < num_senders)
        sender<true, 2>(p, tag, open_destination(p), channel, {tokens.begin, 1, tokens.end, nullptr, 0, 0},
                        shared + static_cast<i64>(warp_idx()) * 2 * p.chunk_bytes, barriers + warp_idx() * 2, &posted);
      else if (warp_idx() == num_senders)
        publisher(p, tag, block * num_senders, num_senders, posted);
    } else {
      const int num_expander_warps = (static_cast<int>(gridDim.x) - p.num_sender_blocks) * num_warps;
      const int warp = (block - p.num_sender_blocks) * num_warps + warp_idx();
      u8* stage = shared + static_cast<i64>(warp_idx()) * p.chunk_bytes;
      fill_padding(p, warp, num_expander_warps, stage);
      expander(p, tag, warp, num_expander_warps, stage, barriers + warp_idx());
    }
  }
  announce_block(p.call, tag, kControlDispatchDoneOffset, 0);
  if (block != 0) return;
  await_blocks(p.call, tag, kControlDispatchDoneOffset, nullptr, false, 1);  // every stream is done: the peers are, too
  finish_call(p.call, tag);
}

}  // namespace epee
