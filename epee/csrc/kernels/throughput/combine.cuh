// Brings rows back: every rank pulls the rows of its tokens from the peers' slots and sums them in a fixed order.
//
//   announce   block 0 tells all ranks which slot holds this rank's rows (combine_ready: tag, signature, slot and
//              number of pulling blocks in one word); every block waits for all ranks' words.
//   loader     one warp: for each of the block's pieces of work (a token's row, or a chunk of it) finds the rows,
//              sorted by rank (and by k), and bulk-loads them side by side into a stage of shared memory.
//   reducer    kReducerWarps warps: sum a stage in float32 in that order, add the biases, round once, write once.
//   copier     blocks behind `num_pull_blocks`, only when the rows lie in ordinary memory (rank layout): copy the rows
//              that peers will pull into this rank's slot, first tokens first, and tell them (`staged`) chunk by chunk,
//              while the pulling is under way. A rank's own rows are read where they are.
//   weigher    two warps, only when weights come back: sums or fetches the weights' rows.
//   A pulling block whose rows have come says so to every rank (combine_done), before it has summed the last ones;
//   block 0 waits for all of them: when the kernel ends, nobody reads this rank's slot any more. A rank that ends
//   without having heard so from everybody says that first (combine_failed): what peers pull from then on is no row.
//
// Rank layout: sum = -0 (so that a sum of one row is that row); for ranks ascending: sum += row. Expert layout: for
// ranks ascending: part = -0; for k ascending: part += weight * row (both rounded); sum += part. Then the biases. A
// token without rows begins at +0. No fused multiply-add anywhere.
#pragma once
#include "../../common/call.cuh"
#include "../../common/load.cuh"
#include "../../common/work.cuh"
#include "lanes.cuh"
#include "pieces.cuh"

constexpr int kMaxEntries = 32;
constexpr int kMaxStages = 8;
constexpr u32 kCopyingBit = 0x80;  // beside a slot: its rows arrive there during this kernel

/// The rows of one piece of work, in summing order; written by the loader, read by the reducers.
struct StageEntries {
  i32 count;
  i32 rank[kMaxEntries];
  float weight[kMaxEntries];
};

struct CombineShared {
  u64 full[kMaxStages];  // copiers use `full` and `empty` as one array, two barriers for each warp
  u64 empty[kMaxStages];
  u64 slot[kMaxRanks];     // where the rows of rank d are read
  u64 weights[kMaxRanks];  // where their weights are read
  StageEntries entries[kMaxStages];
  i32 num_blocks[kMaxRanks];  // pulling blocks of rank d
  i32 is_copying[kMaxRanks];  // whether rank d's rows are still on their way into its slot; ours are read in place
  i32 is_good;
  u32 active;  // ranks that take part
};

/// The word by which a rank joins a combine: low half of the tag, 16 bits of signature, slot (with `kCopyingBit`),
/// number of pulling blocks (behind `kRefusedSlot`: why).
DEVICE u64 ready_word(u64 tag, u64 signature, u32 slot, u32 num_blocks) {
  return tag << 32 | (signature & 0xFFFF) << 16 | slot << 8 | num_blocks;
}

/// Waits for a rank's ready word of this call. False, with a report, when it does not come.
DEVICE bool wait_ready(const Call& call, u64 tag, int rank, u64& word) {
  const u64* from = call_word(call, call.rank, kControlCombineReadyOffset, rank, tag);
  const u64 start = global_time_ns();
  const auto has_come = [&] {
    word = ld_acquire_sys(from);
    return word >> 32 == (tag & 0xFFFFFFFF);
  };
  bool is_there = false;
  const auto must_end = [&] {
    if (!has_passed(call, tag, rank)) return must_stop(call, tag, start, rank, tag, word >> 32, 3);
    is_there = has_come();  // it may have come just now, the later one behind it
    if (!is_there) report_failure(call, tag, {kRefused, rank, 0, kGaveUpCode, 3});
    return true;
  };
  return bounded_wait<kPollsPerLook>(has_come, must_end) || is_there;
}

/// Tells every active rank where this rank's rows are, or why it cannot combine (`refusal`). Threads below kNumRanks of
/// block 0. Comes before anything that needs memory: all ranks wait for this word.
DEVICE void send_ready(const CombineParams& p, u64 tag, u32 active, u64 signature, u32 refusal) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= kNumRanks || !is_in(active, peer)) return;
  perhaps_stall(tag, p.call.rank, 11);
  u32 slot = static_cast<u32>(p.slot) | (p.num_copy_blocks ? kCopyingBit : 0);
  int last = p.num_pull_blocks;
  if (refusal) {
    slot = kRefusedSlot;
    last = static_cast<int>(refusal);
  }
  st_release_sys(call_word(p.call, peer, kControlCombineReadyOffset, p.call.rank, tag),
                 ready_word(tag, signature, slot, static_cast<u32>(last)));
  if (!p.refused)  // a peer that dispatches instead need not wait
    st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + kRefusal,
                   tag << 32 | (refusal ? refusal : kOtherCallCode));
}

/// Learns from the word of rank `peer` where its rows are. One thread for each rank; false, with a report, when the
/// call fails.
DEVICE bool learn_slot(const CombineParams& p, u64 tag, u64 signature, int peer, CombineShared& s) {
  u64 word = 0;
  perhaps_stall(tag, p.call.rank, 12);
  if (!wait_ready(p.call, tag, peer, word)) return false;
  const u32 slot = word >> 8 & 0x7F;
  if (slot == kOtherCallSlot || slot == kRefusedSlot) {
    report_failure(p.call, tag, {kRefused, peer, 0, slot == kOtherCallSlot ? kOtherCallCode : word & 0xFF, 3});
    return false;
  }
  if ((word >> 16 & 0xFFFF) != signature || slot >= static_cast<u32>(p.num_slots)) {
    report_failure(p.call, tag, {kMismatch, peer, signature, word >> 16 & 0xFFFF, 3});
    return false;
  }
  if (!p.slots[peer]) {  // cudaIpc: only a graph from before the rank came back can be without its memory
    report_failure(p.call, tag, {kRefused, p.call.rank, 0, kOldHandleCode, 3});
    return false;
  }
  s.num_blocks[peer] = static_cast<i32>(word & 0xFF);
  s.is_copying[peer] = (word >> 8 & kCopyingBit) != 0 && peer != p.call.rank;
  s.weights[peer] = p.slots[peer] + slot * p.slot_bytes + p.weights_offset;
  s.slot[peer] = p.num_copy_blocks && peer == p.call.rank ? p.y : p.slots[peer] + slot * p.slot_bytes;
  return true;
}

/// Learns where the rows of all ranks are. All threads of a pulling block; true when all ranks have joined.
DEVICE bool learn_slots(const CombineParams& p, u64 tag, u64 signature, u32 refusal, CombineShared& s) {
  const int peer = static_cast<int>(threadIdx.x);
  if (threadIdx.x == 0) s.is_good = 1;
  __syncthreads();
  if (refusal) {
    if (peer == 0 && p.refused) mark_failed(p.call, tag);
    if (peer == 0 && !p.refused) report_failure(p.call, tag, {kRefused, p.call.rank, 0, refusal, 3});
    if (peer == 0) s.is_good = 0;
  } else if (peer < kNumRanks) {
    s.num_blocks[peer] = s.is_copying[peer] = 0;
    if (is_in(s.active, peer) && !learn_slot(p, tag, signature, peer, s)) s.is_good = 0;
    fence_proxy_async();  // what the peers wrote before their word is next read by bulk loads
  }
  __syncthreads();
  if (s.is_good && blockIdx.x == 0 && threadIdx.x == 0) mark_exchanged(p.call, tag);
  return s.is_good;
}

/// Waits until rank `rank` has copied the chunk of its rows that holds `place`, counted from our first row there. Each
/// lane waits for its own; `last_seen` spares it a second look.
DEVICE void wait_staged(const CombineParams& p, u64 tag, int rank, i32 place, i32& last_seen) {
  const i32 chunk = place / kStagedRows;
  if (chunk == last_seen) return;
  wait_for(p.call, tag, local_words(p.call, kControlStagedOffset) + rank * kMaxStagedChunks + chunk, tag, rank, 4);
  fence_proxy_async();
  last_seen = chunk;
}

/// Waits until all blocks of this rank, and with `from_peers` the pulling blocks of all ranks, have ended. One warp; a
/// lane looks at one block of every rank at a time, as one look takes as long as many. False, with a report, when not.
DEVICE bool await_pullers(const CombineParams& p, u64 tag, const CombineShared& s, bool from_peers) {
  const u64* flags = local_words(p.call, kControlCombineDoneOffset);
  perhaps_stall(tag, p.call.rank, 2);
  int most = static_cast<int>(gridDim.x);
  for (int rank = 0; from_peers && rank < kNumRanks; ++rank) most = max(most, s.num_blocks[rank]);
  bool has_heard = true;
#pragma unroll 1
  for (int block = lane_idx(); block < most; block += 32) {
    u32 missing = 0;
#pragma unroll
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const int count = rank == p.call.rank ? static_cast<int>(gridDim.x) : from_peers ? s.num_blocks[rank] : 0;
      const bool is_there = ld_relaxed_sys(flags + rank * kMaxBlocks + block) == tag;
      missing |= static_cast<u32>(block < count && !is_there) << rank;
    }
#pragma unroll 1
    for (; missing; missing &= missing - 1) {
      const int rank = __ffs(missing) - 1;
      if (rank == p.call.rank)
        wait_own_block(p.call, tag, flags + rank * kMaxBlocks + block);
      else
        has_heard &= wait_for(p.call, tag, flags + rank * kMaxBlocks + block, tag, rank, 5);
    }
  }
  return __ballot_sync(~0u, has_heard) == ~0u;
}

/// Ends the block's part of the call, and in block 0 the call: tells all ranks that this block pulls no more (only this
/// rank, unless it is `is_whole`), and makes sure that no peer had given up before. One warp.
///
/// The stores need no release: loads that have landed cannot be overtaken, and results are published by the kernel's
/// end.
DEVICE void end_block(const CombineParams& p, u64 tag, const CombineShared& s, bool is_whole) {
  const int lane = lane_idx();
  const int rank = p.call.rank;
  perhaps_stall(tag, rank, 5);
  const bool is_peer = lane < kNumRanks && is_in(s.active, lane);
  if (is_peer && (lane == rank || is_whole))
    st_relaxed_sys(control_words(p.call, lane, kControlCombineDoneOffset) + rank * kMaxBlocks + blockIdx.x, tag);
  if (is_whole && is_peer && has_given_up(p.call, tag, lane)) report_failure(p.call, tag, {kPeerGaveUp, lane, 0, 0, 3});
  if (blockIdx.x != 0) return;
  const bool has_heard = await_pullers(p, tag, s, is_whole);
  if (is_peer && !(is_whole && has_heard))  // before this kernel ends, and with it the rows of this rank
    tell_given_up(p.call, tag, lane);
  __syncwarp();
  if (lane == 0) *local_words(p.call, kControlSeqOffset) = tag;
}

/// One warp: keeps the stages filled. `next` is what it found for the block's first piece of work. True when all loads
/// have landed.
template <bool kExpert>
DEVICE bool loader(const CombineParams& p, u64 tag, CombineShared& s, u8* stages, int chunks, Found next) {
  const i64 stage_bytes = static_cast<i64>(p.max_entries) * p.chunk_bytes;
  i32 last_seen = -1;
  int n = 0;
  Cursor at(p, chunks), ahead(p, chunks);
  Looked looked = {};
  ahead.advance();
  if (ahead.token < p.num_tokens) looked = look_up<kExpert>(p, ahead.token);
#pragma unroll 1
  for (; at.token < p.num_tokens; ++n) {
    const int stage = at.stage;
    const Found f = next;
    // The reducers have left the stage when its `empty` has completed once for each earlier use.
    if (at.use > 0) wait_load(p.call, tag, s.empty + stage, (at.use - 1) & 1);
    const int offset = at.chunk * p.chunk_bytes;
    const u32 num_bytes = static_cast<u32>(min(p.chunk_bytes, p.row_bytes - offset));
    if (f.position >= 0) {
      s.entries[stage].rank[f.position] = f.rank;
      s.entries[stage].weight[f.position] = f.weight;
    }
    if (lane_idx() == 0) s.entries[stage].count = f.count;
    __syncwarp();
    // All bytes of the stage are announced before the first load: else `full` could complete between two of them.
    if (lane_idx() == 0) mbarrier_arrive_expect(s.full + stage, num_bytes * static_cast<u32>(f.count));
    if (f.position >= 0) {
      if (!kExpert && s.is_copying[f.rank]) wait_staged(p, tag, f.rank, f.place, last_seen);
      bulk_load(stages + stage * stage_bytes + static_cast<i64>(f.position) * p.chunk_bytes,
                reinterpret_cast<const u8*>(s.slot[f.rank]) + f.row * p.row_bytes + offset, num_bytes, s.full + stage);
    }
    __syncwarp();
    at.advance();
    ahead.advance();
    // A step ahead of its use, so that the loader does not wait for these loads once for each piece of work.
    if (at.token < p.num_tokens) next = order_rows<kExpert>(p, looked);
    if (ahead.token < p.num_tokens) looked = look_up<kExpert>(p, ahead.token);
    perhaps_stall(tag, p.call.rank, 6);
  }
  bool is_whole = true;
  for (int i = max(0, n - p.num_stages); i < n; ++i)
    is_whole &= wait_load(p.call, tag, s.full + i % p.num_stages, static_cast<u32>(i / p.num_stages) & 1);
  return __ballot_sync(~0u, is_whole) == ~0u;
}

/// Copies `num_rows` rows from ordinary memory to the slot. One lane, two stages.
DEVICE void copy_rows(const CombineParams& p, u64 tag, i64 first_row, int num_rows, u8* stages, u64* barriers, u32& n) {
  const int chunks = (p.row_bytes + p.chunk_bytes - 1) / p.chunk_bytes;
  const int num_units = num_rows * chunks;
  const u8* from = reinterpret_cast<const u8*>(p.y) + first_row * p.row_bytes;
  u8* to =
      reinterpret_cast<u8*>(p.slots[p.call.rank] + static_cast<u64>(p.slot) * p.slot_bytes) + first_row * p.row_bytes;
  const auto offset = [&](int unit) {
    return static_cast<i64>(unit / chunks) * p.row_bytes + unit % chunks * p.chunk_bytes;
  };
  const auto size = [&](int unit) {
    return static_cast<u32>(min(p.chunk_bytes, p.row_bytes - unit % chunks * p.chunk_bytes));
  };
  const auto load = [&](int unit, u32 use) {
    mbarrier_arrive_expect(barriers + use % 2, size(unit));
    bulk_load(stages + static_cast<i64>(use % 2) * p.chunk_bytes, from + offset(unit), size(unit), barriers + use % 2);
  };
  bulk_wait_read<0>();
  if (num_units > 0) load(0, n);
#pragma unroll 1
  for (int unit = 0; unit < num_units; ++unit, ++n) {
    if (unit + 1 < num_units) {
      bulk_wait_read<0>();
      load(unit + 1, n + 1);
    }
    wait_load(p.call, tag, barriers + n % 2, n / 2 & 1);
    bulk_store(to + offset(unit), stages + static_cast<i64>(n % 2) * p.chunk_bytes, size(unit));
    bulk_commit();
  }
}

/// Copies what the peers will pull, chunk by chunk, the peers in turn. One lane of each of `num_warps` warps.
DEVICE void copier(const CombineParams& p, u64 tag, u32 active, int warp, int num_warps, u8* stages, u64* barriers) {
  const int num_counters = p.num_experts + kNumRanks;
  if (is_haunted(p.call))  // a late peer may still store into this slot, until it joins this call
#pragma unroll 1
    for (int rank = 0; rank < kNumRanks; ++rank) {
      u64 word;
      if (is_in(active, rank) && !wait_ready(p.call, tag, rank, word)) return;
    }
  const i32* matrix = reinterpret_cast<const i32*>(p.count_matrix) + p.num_experts + p.call.rank;
  i32 longest = 0;
  for (int src = 0; src < kNumRanks; ++src) longest = max(longest, matrix[src * num_counters]);
  const int num_chunks = (longest + kStagedRows - 1) / kStagedRows * kNumRanks;
  u32 n = 0;
#pragma unroll 1
  for (int i = warp; i < num_chunks; i += num_warps) {
    const int src = (p.call.rank + 1 + i) % kNumRanks;
    const i32 first = i / kNumRanks * kStagedRows;
    const i32 count = matrix[src * num_counters];  // checked by the dispatch that made the handle
    if (src == p.call.rank || first >= count) continue;
    perhaps_stall(tag, p.call.rank, 8);
    i64 base = 0;
    for (int other = 0; other < src; ++other) base += matrix[other * num_counters];
    const i32 num_left = min(count - first, static_cast<i32>(p.max_rows - base - first));  // below 1: all are dropped
    copy_rows(p, tag, base + first, min(kStagedRows, num_left), stages, barriers, n);
    bulk_wait<0>();  // the rows are in the slot, seen by this thread, before the flag says so
    st_release_sys(
        control_words(p.call, src, kControlStagedOffset) + p.call.rank * kMaxStagedChunks + first / kStagedRows, tag);
  }
}

/// Sums one stage and writes the result. All reducer threads.
template <bool kExpert, int kPayload>
DEVICE void reduce_stage(const CombineParams& p, const StageEntries& entries, const u8* stage, int token, int offset,
                         int num_bytes) {
  const i64 at = static_cast<i64>(token) * p.row_bytes + offset;
  const int count = entries.count;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) * 16; i < num_bytes; i += kReducerThreads * 16) {
    Lanes<kPayload> sum = filled<kPayload>(count ? -0.0f : 0.0f);
    Lanes<kPayload> part = filled<kPayload>(-0.0f);
#pragma unroll 1
    for (int e = 0; e < count; ++e) {
      const Lanes<kPayload> row =
          unpack<kPayload>(*reinterpret_cast<const Vec16*>(stage + static_cast<i64>(e) * p.chunk_bytes + i));
      if (kExpert) {
        add_scaled<kPayload>(part, entries.weight[e], row);
        if (e + 1 == count || entries.rank[e + 1] != entries.rank[e]) {
          add<kPayload>(sum, part);
          part = filled<kPayload>(-0.0f);
        }
      } else {
        add<kPayload>(sum, row);
      }
    }
    if (p.bias_0) add<kPayload>(sum, load_bias<kPayload>(p, p.bias_0, at + i));
    if (p.bias_1) add<kPayload>(sum, load_bias<kPayload>(p, p.bias_1, at + i));
    st_vec16(reinterpret_cast<u8*>(p.out) + at + i, pack<kPayload>(sum));
  }
}

/// All reducer warps: empty the stages as they become full.
template <bool kExpert, int kPayload>
DEVICE void reducer(const CombineParams& p, u64 tag, CombineShared& s, const u8* stages, int chunks) {
  const i64 stage_bytes = static_cast<i64>(p.max_entries) * p.chunk_bytes;
#pragma unroll 1
  for (Cursor at(p, chunks); at.token < p.num_tokens; at.advance()) {
    const int stage = at.stage;
    perhaps_stall(tag, p.call.rank, 7);
    wait_load(p.call, tag, s.full + stage, at.use & 1);
    const int offset = at.chunk * p.chunk_bytes;
    reduce_stage<kExpert, kPayload>(p, s.entries[stage], stages + stage * stage_bytes, at.token, offset,
                                    min(p.chunk_bytes, p.row_bytes - offset));
    __syncwarp();
    if (lane_idx() == 0) mbarrier_arrive(s.empty + stage);
  }
}

/// Starts the loads of the weight of slot `at`, (token, k) in one number: what each rank has for it (rank layout), or
/// in `from[0]` that of the slot's row. A slot without a row gets zeros.
template <bool kExpert>
DEVICE void load_weights(const CombineParams& p, const CombineShared& s, i64 at, float* from) {
  if (kExpert) {
    const i32 expert = reinterpret_cast<const i32*>(p.expert_of)[at];
    i64 row = -1;
    if (expert >= 0)
      row = reinterpret_cast<const i32*>(p.row_base)[expert] + reinterpret_cast<const i32*>(p.ordinals)[at];
    from[0] = 0.0f;
    if (is_row(row, p.max_rows))
      from[0] = ld_relaxed_sys(reinterpret_cast<const float*>(s.weights[owner_of(expert, p.num_local_experts)]) + row);
    return;
  }
  const i64 token = at / p.num_topk;
#pragma unroll
  for (int d = 0; d < kNumRanks; ++d) {
    const i32 nth = reinterpret_cast<const i32*>(p.send_prefix)[token * kNumRanks + d];
    const i64 row = nth < 0 ? -1 : static_cast<i64>(reinterpret_cast<const i32*>(p.row_base)[p.num_experts + d]) + nth;
    from[d] = 0.0f;
    if (is_row(row, p.max_rows))
      from[d] =
          ld_relaxed_sys(reinterpret_cast<const float*>(s.weights[d]) + row * p.num_topk + (at - token * p.num_topk));
  }
}

/// The block's part of the weights. Rank layout: the sum over ranks, ascending, of the rows' weights. Expert layout:
/// the weight of each slot's row. `warp` of `num_warps` warps. While rows fill the link a trip to a peer takes long, so
/// each thread has slots of its own, and a few of them under way at once.
template <bool kExpert>
DEVICE void weigher(const CombineParams& p, CombineShared& s, int warp, int num_warps) {
  constexpr int kMost = 4;
  const int batch = kExpert || kNumRanks <= 4 ? kMost : kNumRanks <= 8 ? 2 : 1;  // more would not stay in registers
  const i64 num_slots = static_cast<i64>(p.num_tokens) * p.num_topk;
  const int step = 32 * p.num_pull_blocks * num_warps;
#pragma unroll 1
  for (i64 first = 32 * (static_cast<int>(blockIdx.x) * num_warps + warp) + lane_idx(); first < num_slots;
       first += batch * step) {
    float from[kMost][ROOM(kNumRanks, kMaxRanks)];
    const auto is_slot = [&](int b) { return b < batch && first + b * step < num_slots; };
#pragma unroll
    for (int b = 0; b < kMost; ++b)
      if (is_slot(b)) load_weights<kExpert>(p, s, first + b * step, from[b]);
#pragma unroll
    for (int b = 0; b < kMost; ++b) {
      if (!is_slot(b)) continue;
      float sum = kExpert ? from[b][0] : 0.0f;
#pragma unroll
      for (int d = 0; d < kNumRanks; ++d)
        if (!kExpert) sum = __fadd_rn(sum, from[b][d]);
      reinterpret_cast<float*>(p.out_weights)[first + b * step] = sum;
    }
  }
}

/// A pulling block. The loader ends its part of the call while the last rows are summed; with weights, which others
/// pull, the whole block must be done first.
template <bool kExpert, int kPayload>
DEVICE void pull(const CombineParams& p, u64 tag, CombineShared& s, u8* stages, int chunks, const Found& first_rows) {
  // With many tokens the next kernel's blocks would keep their places from others for too long.
  if (p.num_tokens <= kMaxFewTokens) allow_next_kernel();
  bool is_whole = true;
  if (warp_idx() < kReducerWarps)
    reducer<kExpert, kPayload>(p, tag, s, stages, chunks);
  else if (warp_idx() == kReducerWarps)
    is_whole = loader<kExpert>(p, tag, s, stages, chunks, first_rows);
  else if (p.out_weights)
    weigher<kExpert>(p, s, warp_idx() - kReducerWarps - 1, static_cast<int>(blockDim.x / 32) - kReducerWarps - 1);
  if (p.out_weights) __syncthreads();
  if (warp_idx() == kReducerWarps) end_block(p, tag, s, is_whole);
}

template <bool kExpert, int kPayload>
DEVICE void combine(const CombineParams& p) {
  u8* shared = dynamic_shared();
  __shared__ CombineShared s;
  const bool is_puller = static_cast<int>(blockIdx.x) < p.num_pull_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxStages; ++i) {
      mbarrier_init(s.full + i, 1);
      mbarrier_init(s.empty + i, is_puller ? kReducerWarps : 1);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  // The handle of a dispatch that failed here holds no numbers: this rank only tells the peers that it cannot combine.
  // So it is with one of an earlier view.
  const View view = current_view(p.call);
  const u32 active = ranks_of(p.call, view.members);
  const i32* recv_info = reinterpret_cast<const i32*>(p.recv_info);
  if (blockIdx.x == 0) perhaps_stall(tag, p.call.rank, 14);
  u64 signature = 0;  // a refusal has no handle; the first warp alone joins the call
  if (warp_idx() == 0 && !p.refused) signature = combine_signature(p.signature, losses_before(p.call, tag), recv_info);
  u32 refusal =
      p.refused ? static_cast<u32>(p.refused) : flaw_of(view.number, recv_info);  // its loads go with the others
  if (!kExpert && !refusal && is_slot_haunted(p.call, view.number, p.slot)) refusal = static_cast<u32>(kHauntedCode);
  if (threadIdx.x == 0) s.active = active;
  if (blockIdx.x == 0) send_ready(p, tag, active, signature, refusal);
  const int chunks = (p.row_bytes + p.chunk_bytes - 1) / p.chunk_bytes;
  const int first = static_cast<int>(blockIdx.x) / chunks;
  Found first_rows = {-1, -1, -1, -1, 0.0f, 0};
  if (!refusal && warp_idx() == kReducerWarps && first < p.num_tokens) first_rows = find_rows<kExpert>(p, first);
  if (is_puller && learn_slots(p, tag, signature, refusal, s)) {
    pull<kExpert, kPayload>(p, tag, s, shared, chunks, first_rows);
    return;
  }
  __syncthreads();
  if (!kExpert && !is_puller && !refusal && warp_idx() < p.num_copy_warps && lane_idx() == 0)
    copier(p, tag, s.active, (static_cast<int>(blockIdx.x) - p.num_pull_blocks) * p.num_copy_warps + warp_idx(),
           p.num_copy_blocks * p.num_copy_warps, shared + static_cast<i64>(warp_idx()) * 2 * p.chunk_bytes,
           s.full + 2 * warp_idx());
  __syncthreads();
  if (warp_idx() == 0) end_block(p, tag, s, false);
}

namespace epee {
#define COMBINE_KERNEL(name, is_expert, payload)                           \
  __global__ void __launch_bounds__(kReducerThreads + 96, 1)               \
      combine_throughput_##name(const __grid_constant__ CombineParams p) { \
    combine<is_expert, payload>(p);                                        \
  }
COMBINE_KERNEL(rank_bf16, false, kBf16)
COMBINE_KERNEL(rank_f16, false, kF16)
COMBINE_KERNEL(rank_f32, false, kF32)
COMBINE_KERNEL(expert_bf16, true, kBf16)
COMBINE_KERNEL(expert_f16, true, kF16)
COMBINE_KERNEL(expert_f32, true, kF32)
}  // namespace epee
