// The chunks of one call: what its warps share, wait for and count. Words and order: `words.cuh`.
//
// A flow is the part of a stream that belongs to the call. Warps take records of outgoing flows one at a time; a warp
// holds one record of each flow, and works on whichever has a free slot. So a flow whose slots are full keeps no other
// one from its place: a combine's sums leave in the order of records, and are read in the order of tokens.
//
// Roles, warps of each block: workers (packers, pullers, summers), one announcer, one mirror. Any block that is
// resident does all of the work: none waits for another to have a place. A worker that has no more work of its role
// does that of the other one, where its stages allow it.
//   worker    counts records in the block's shared memory when their stores are complete (out) or their loads (in)
//   announcer    adds these counts to those of the grid, where a slot has a counter for the call: a slot has one chunk
//                at a time, so a count says which chunk is complete. Who completes one stores the word. A release by a
//                warp that moves rows would wait for all of its stores under way
//   mirror    copies words from `copies` into the block's shared memory, as long as the block has workers
//   watcher   the mirror of the block that comes first: copies the proxy's words into `copies` as well, until the call
//             ends; looks for ABORT and LOST
// The announcer of the last block to end ends the call: reports the island's ranks that this one is done with their
// memory, waits for the same from them, and advances the numbers.
#pragma once
#include "../../common/load.cuh"
#include "words.cuh"

/// How long a refusal waits for a slot; longer than a proxy that is alive needs.
constexpr u64 kTellNs = 1000000000;

/// One flow of a call: number of its first chunk and that chunk's slot, where the slots lie, records, and its outlet or
/// inlet (-1: rows for this island).
struct Flow {
  u64 first;
  u64 data;
  i32 total;
  i32 link;
  u32 first_slot;
  u32 slot_bytes;
};

/// What the warps of a block share, in its dynamic memory.
struct Progress {
  Flow *out, *in;
  u64 *freed, *arrived;     // by flow and slot: the block's copies of the proxy's words
  u32 *out_rows, *in_rows;  // by flow and slot: records that the announcer has not seen yet
  u32* ended;               // workers
  u64 first;                // of the epoch's chunks
  int num_out, num_in, num_workers;
  u32 out_unit, flags;  // bytes of an outgoing record; of the chunk words
};

/// Bytes of `Progress` in front of the stages; equal to `progress_bytes` in `epee/gpu/hosts.py`.
DEVICE u32 progress_bytes(const HostCall& h, int num_out, int num_in) {
  const u32 num_flows = static_cast<u32>(num_out + num_in);
  const u32 bytes = num_flows * (static_cast<u32>(sizeof(Flow)) + 12 * static_cast<u32>(h.num_slots)) + 4;
  return (bytes + 127) / 128 * 128;
}

DEVICE const u64* freed_copy(const HostCall& h, int outlet) {
  return state_words(h, kStateCopiesOffset) + outlet * h.num_slots;
}
DEVICE const u64* arrived_copy(const HostCall& h, int inlet) {
  return state_words(h, kStateCopiesOffset) + kMaxOutWords + inlet * h.num_slots;
}

/// Copies the words of the call's flows from the grid's copies into the block's: those of thread `thread` of `count`.
DEVICE void mirror(const HostCall& h, const Progress& progress, int thread, int count) {
  const int num_out = progress.num_out * h.num_slots, num_words = num_out + progress.num_in * h.num_slots;
#pragma unroll 1
  for (int i = thread; i < num_words; i += count) {
    const bool is_out = i < num_out;
    const int at = is_out ? i : i - num_out, flow = at / h.num_slots, slot = at % h.num_slots;
    const int link = is_out ? progress.out[flow].link : progress.in[flow].link;
    if (link < 0) continue;
    const u64* word = is_out ? freed_copy(h, link) : arrived_copy(h, link);
    if (ld_relaxed_sys(word + slot) != progress.freed[i])
      st_release_cta(progress.freed + i, ld_acquire_gpu(word + slot));
  }
}

/// Makes the block's `Progress`, with no record counted, at the start of the dynamic memory; `fill` gives the flows.
/// All threads.
template <class Fill>
DEVICE const Progress& make_progress(const HostCall& h, int num_out, int num_in, int num_workers, u32 out_unit,
                                     u32 flags, Fill fill) {
  const HostRoutes& routes = routes_of(h);
  __shared__ Progress shared;  // for callers whose threads have no registers left for a copy
  Progress progress;
  progress.out = reinterpret_cast<Flow*>(dynamic_shared());
  progress.in = progress.out + num_out;
  progress.freed = reinterpret_cast<u64*>(progress.in + num_in);
  progress.arrived = progress.freed + num_out * h.num_slots;
  progress.out_rows = reinterpret_cast<u32*>(progress.arrived + num_in * h.num_slots);
  progress.in_rows = progress.out_rows + num_out * h.num_slots;
  progress.ended = progress.in_rows + num_in * h.num_slots;
  progress.first = routes.first;
  progress.num_out = num_out;
  progress.num_in = num_in;
  progress.num_workers = num_workers;
  progress.out_unit = out_unit;
  progress.flags = flags;
  if (threadIdx.x == 0) shared = progress;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i <= (num_out + num_in) * h.num_slots; i += static_cast<int>(blockDim.x)) {
    progress.out_rows[i] = 0;
    if (i < (num_out + num_in) * h.num_slots) progress.freed[i] = 0;
  }
#pragma unroll 1
  for (int i = thread; i < num_out + num_in; i += static_cast<int>(blockDim.x)) {
    Flow flow = {0, 0, 0, -1, 0, 0};
    const bool is_out = i < num_out;
    fill(is_out, is_out ? i : i - num_out, flow);
    if (flow.link >= 0) {
      flow.first = state_words(h, is_out ? kStateNextOutOffset : kStateNextInOffset)[flow.link];
      flow.data = is_out ? routes.outlets[flow.link].data : routes.inlets[flow.link].data;
      flow.first_slot = static_cast<u32>(flow.first % static_cast<u64>(h.num_slots));
    }
    flow.slot_bytes = static_cast<u32>(routes.slot_bytes);
    progress.out[i] = flow;
  }
  __syncthreads();
  mirror(h, progress, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  __syncthreads();
  return shared;
}

/// The chunk of a flow that has a record, and the slot of a chunk; both counted from the beginning of the call. Numbers
/// of 32 bits: a division of longer ones in each step would be among the longest things in it.
DEVICE u32 chunk_of(const HostCall& h, i32 record) {
  return static_cast<u32>(record) / static_cast<u32>(h.chunk_records);
}
DEVICE u32 slot_of(const HostCall& h, const Flow& flow, u32 k) {
  return (flow.first_slot + k) % static_cast<u32>(h.num_slots);
}

/// Records of chunk k of a flow.
DEVICE i32 chunk_length(const HostCall& h, const Flow& flow, i32 k) {
  return min(h.chunk_records, flow.total - k * h.chunk_records);
}

/// Whether the slot of chunk k may be filled: the proxy has read what lay there. What this thread stores then comes
/// after.
DEVICE bool is_free(const HostCall& h, const Progress& progress, const Flow& flow, u32 k) {
  const u64 slots = static_cast<u64>(h.num_slots), chunk = flow.first + k;
  if (flow.link < 0 || chunk < progress.first + slots) return true;
  const u64 index = static_cast<u64>(&flow - progress.out) * slots + slot_of(h, flow, k);
  return ld_acquire_cta(progress.freed + index) == chunk + 1 - slots;
}

/// Whether chunk k of a flow has come; its bytes may then be read. A chunk of another size fails the call.
DEVICE bool has_arrived(const HostCall& h, u64 tag, const Progress& progress, const Flow& flow, u32 k) {
  const u64 chunk = flow.first + k;
  const u64 num_bytes = static_cast<u64>(chunk_length(h, flow, static_cast<i32>(k))) * progress.out_unit;
  const u64 want = chunk_word(chunk, num_bytes, progress.flags);
  const u64 index = static_cast<u64>(&flow - progress.in) * static_cast<u64>(h.num_slots) + slot_of(h, flow, k);
  const u64 word = ld_acquire_cta(progress.arrived + index);
  if (word != want && word >> kChunkSizeBits == chunk + 1)
    report_failure(h.call, tag, {kMismatch, routes_of(h).inlets[flow.link].rank, want, word, 34});
  return word == want;
}

/// Where a record lies in the slots of its flow.
DEVICE u8* record_at(const HostCall& h, const Progress& progress, const Flow& flow, i32 record) {
  const u32 k = chunk_of(h, record), within = static_cast<u32>(record) - k * static_cast<u32>(h.chunk_records);
  return reinterpret_cast<u8*>(flow.data + static_cast<u64>(slot_of(h, flow, k)) * flow.slot_bytes) +
         static_cast<u64>(within) * progress.out_unit;
}

/// Polls until `poll()`, which is the same in the whole warp. The whole warp; false after a report.
template <class Poll>
DEVICE bool warp_wait(const HostCall& h, u64 tag, int rank, u64 where, Poll poll) {
  perhaps_stall(tag, h.call.rank, 2);
  const u64 start = global_time_ns();
  return bounded_wait<kPollsPerLook>(poll, [&] {
    const bool is_over = lane_idx() == 0 && must_stop(h, tag, start, rank, 0, 0, where);
    return __shfl_sync(~0u, static_cast<int>(is_over), 0) != 0;
  });
}

/// A record to work on; `flow` is -1 for none.
struct Record {
  int flow;
  i32 index;
};

/// The records that a warp has taken and not worked on yet: thread f holds that of flow f.
struct Claims {
  i32 next;
  u32 seen;  // behind the chunk that was last found to have a slot
  int last;  // flow

  /// Takes the first ones. The whole warp.
  DEVICE Claims(const HostCall& h, const Progress& progress) : next(0x7FFFFFFF), seen(0), last(31) {
    if (lane_idx() < progress.num_out) next = take(h);
  }
  DEVICE i32 take(const HostCall& h) const {
    u32* cursor = reinterpret_cast<u32*>(state_counters(h, kStateCursorsOffset)) + lane_idx();
    return static_cast<i32>(atom_add_relaxed_gpu(cursor, 1));
  }

  /// The record of a flow that has a free slot, of the flows in turn: rows for this island go through the same copy
  /// engine as records, which stands still while the link is full. So they are spread over the whole call. None while
  /// there are only such that must wait, or (`is_over`) no more records. The whole warp.
  DEVICE Record find(const HostCall& h, const Progress& progress, bool& is_over) {
    const int lane_id = lane_idx();
    const bool is_flow = lane_id < progress.num_out;
    const Flow& flow = progress.out[is_flow ? lane_id : 0];
    const bool is_one = is_flow && next < flow.total;
    const u32 k = is_one ? chunk_of(h, next) : 0;
    const bool is_ready = is_one && (k + 1 == seen || is_free(h, progress, flow, k));
    if (is_ready) seen = k + 1;
    is_over = __ballot_sync(~0u, is_one) == 0;
    __syncwarp();  // one thread has acquired the slot that all of them fill
    const u32 ready = __ballot_sync(~0u, is_ready);
    if (!ready) return {-1, 0};
    const u32 later = ready & ~((2u << last) - 1);
    last = __ffs(static_cast<int>(later ? later : ready)) - 1;
    const Record found = {last, __shfl_sync(~0u, next, last)};
    if (lane_id == last) next = take(h);  // ahead of its use, for its latency
    return found;
  }

  /// The same, waiting while there are records that have no slot. `flow` is -1 when all is done, or after a report.
  DEVICE Record await(const HostCall& h, u64 tag, const Progress& progress) {
    bool is_over = false;
    Record found = find(h, progress, is_over);
    if (found.flow >= 0 || is_over) return found;
    const u32 waiting = __ballot_sync(~0u, lane_idx() < progress.num_out && next < progress.out[lane_idx()].total);
    const int link = progress.out[__ffs(static_cast<int>(waiting)) - 1].link;
    warp_wait(h, tag, routes_of(h).outlets[link].rank, 35, [&] {
      found = find(h, progress, is_over);
      return found.flow >= 0 || is_over;
    });
    return found;
  }
};

/// Counts records whose stores, or loads, are complete. One thread, after the whole warp have come to a `__syncwarp`.
DEVICE void count_out(const HostCall& h, const Progress& progress, const Record& record) {
  if (record.flow < 0 || progress.out[record.flow].link < 0) return;
  const u32 slot = slot_of(h, progress.out[record.flow], chunk_of(h, record.index));
  red_add_release_cta(progress.out_rows + record.flow * h.num_slots + slot, 1);
}
DEVICE void count_in(const HostCall& h, const Progress& progress, int flow, u32 k, u32 num_records) {
  if (num_records)
    red_add_release_cta(progress.in_rows + flow * h.num_slots + slot_of(h, progress.in[flow], k), num_records);
}

/// A worker's end. The whole warp; its bulk stores are complete.
DEVICE void end_worker(const Progress& progress) {
  __syncwarp();
  if (lane_idx() == 0) red_add_release_cta(progress.ended, 1);
}

/// Adds what a block has counted in a slot to the counter of the grid; true, with the chunk, when that completes one.
DEVICE bool add_rows(const HostCall& h, const Flow& flow, u32 slot, u32* rows, u32* counter, i32& k) {
  const u32 count = atom_exch_acquire_cta(rows, 0);
  if (!count) return false;
  const i32 now = static_cast<i32>(atom_add_acq_rel_gpu(counter, count) + count);
  const u32 slots = static_cast<u32>(h.num_slots);
  const i32 use = (now - 1) / h.chunk_records;
  k = static_cast<i32>((slot + slots - flow.first_slot) % slots) + use * h.num_slots;
  return now - use * h.chunk_records == chunk_length(h, flow, k);
}

/// One pass of the announcer. Threads look at slots of their own.
DEVICE void announce_chunks(const HostCall& h, const Progress& progress) {
  const HostRoutes& routes = routes_of(h);
  u32* out_done = reinterpret_cast<u32*>(state_counters(h, kStateOutDoneOffset));
  u32* in_done = reinterpret_cast<u32*>(state_counters(h, kStateInDoneOffset));
  i32 k;
#pragma unroll 1
  for (int i = lane_idx(); i < progress.num_out * h.num_slots; i += 32) {
    const Flow& flow = progress.out[i / h.num_slots];
    const u32 slot = static_cast<u32>(i % h.num_slots);
    if (!add_rows(h, flow, slot, progress.out_rows + i, out_done + i, k)) continue;
    st_release_sys(reinterpret_cast<u64*>(routes.outlets[flow.link].posted) + slot,
                   chunk_word(flow.first + static_cast<u32>(k),
                              static_cast<u64>(chunk_length(h, flow, k)) * progress.out_unit, progress.flags));
  }
#pragma unroll 1
  for (int i = lane_idx(); i < progress.num_in * h.num_slots; i += 32) {
    const Flow& flow = progress.in[i / h.num_slots];
    const u32 slot = static_cast<u32>(i % h.num_slots);
    if (!add_rows(h, flow, slot, progress.in_rows + i, in_done + i, k)) continue;
    st_release_sys(reinterpret_cast<u64*>(routes.inlets[flow.link].taken) + slot * kNumRanks,
                   flow.first + static_cast<u32>(k) + 1);
  }
}

/// Posts the refusal of one outlet behind the chunks of this call, `next` being the first, that the proxy finds one
/// after the other. One thread; no other warp of the grid posts any more.
DEVICE void post_refusal(const HostCall& h, const Outlet& at, u64 next, u64 code) {
  const HostRoutes& routes = routes_of(h);
  const u64 slots = static_cast<u64>(h.num_slots), start = global_time_ns();
  const u64 limit = h.call.timeout_ns < kTellNs ? h.call.timeout_ns : kTellNs;
  u64* posted = reinterpret_cast<u64*>(at.posted);
  u64 end = 0;  // behind the last chunk that is posted; those that are not lie among the last `slots`
#pragma unroll 1
  for (u64 slot = 0; slot < slots; ++slot) {
    const u64 behind = ld_relaxed_sys(posted + slot) >> kChunkSizeBits;
    end = behind > end ? behind : end;
  }
  u64 chunk = end > next + slots ? end - slots : next;
  while (ld_relaxed_sys(posted + chunk % slots) >> kChunkSizeBits > chunk) ++chunk;
  const u64* freed = reinterpret_cast<const u64*>(at.freed) + chunk % slots;
  const bool is_free = bounded_wait<kPollsPerLook>(
      [&] { return chunk < routes.first + slots || ld_acquire_sys(freed) == chunk + 1 - slots; },
      [&] {
        return global_time_ns() - start > limit ||
               ld_relaxed_sys(reinterpret_cast<const u64*>(routes.aborts[h.call.rank])) != 0;
      });
  if (!is_free) return;  // nobody reads there: the partner has failed, too, or waits for the time-out
  u64* data = reinterpret_cast<u64*>(at.data + chunk % slots * routes.slot_bytes);
  data[0] = code;
  data[1] = 0;
  st_release_sys(posted + chunk % slots, chunk_word(chunk, kRefusalBytes, 0));
}

/// Tells the island, and with `ends_streams` other hosts, that this rank has given the call up, and why. One warp, when
/// all workers of the grid have ended.
DEVICE void give_up(const HostCall& h, u64 tag, u64 code, bool ends_streams) {
  const int lane_id = lane_idx();
  if (lane_id < kNumRanks && lane_id != h.call.rank)
    st_release_sys(state_words(h, lane_id, kStateGaveUpOffset) + tag % kGaveUpRooms * kMaxLocal + h.call.rank,
                   tag << 8 | code);
  u64* broken = state_words(h, kStateBrokenOffset);
  if (!ends_streams || *broken == kPartnersTold) return;
  __syncwarp();
#pragma unroll 1
  for (int i = lane_id; i < routes_of(h).num_outlets; i += 32)
    post_refusal(h, routes_of(h).outlets[i], state_words(h, kStateNextOutOffset)[i], code);
  __syncwarp();
  if (lane_id == 0) *broken = kPartnersTold;
}

/// Fails the call where another rank has given it up.
DEVICE void report_gave_up(const HostCall& h, u64 tag, int rank, u64 code, u64 where) {
  if (has_failed(h.call, tag)) return;
  const FailureCode failure = code == kGaveUpCode ? kPeerGaveUp : kRefused;
  report_failure(h.call, tag, {failure, rank, 0, code, where});
}

/// Looks whether the neighbour at this thread's position has given the call up.
DEVICE void check_neighbour(const HostCall& h, u64 tag) {
  const int position = lane_idx();
  if (position >= kNumRanks || position == h.call.rank) return;
  const u64 word = ld_acquire_sys(state_words(h, kStateGaveUpOffset) + tag % kGaveUpRooms * kMaxLocal + position);
  if (word >> 8 >= tag) report_gave_up(h, tag, rank_at(routes_of(h), h.host, position), word & 0xFF, 44);
}

/// Whether a word that has arrived is a partner's refusal: then the call fails.
DEVICE bool is_refusal(const HostCall& h, u64 tag, const Inlet& at, int slot, u64 word) {
  const HostRoutes& routes = routes_of(h);
  if ((word & ((1ull << kChunkSizeBits) - 1)) != kRefusalBytes || word >> kChunkSizeBits <= routes.first) return false;
  const u64 code = ld_relaxed_sys(reinterpret_cast<const u64*>(at.data + slot * routes.slot_bytes));
  report_gave_up(h, tag, at.rank, code, 45);
  return true;
}

/// Advances the numbers of the streams behind a call, one thread for each; `count(is_out, link)` gives the chunks of
/// a link in this call. The whole warp.
template <class Count>
DEVICE void advance(const HostCall& h, Count count) {
  const HostRoutes& routes = routes_of(h);
#pragma unroll 1
  for (int i = lane_idx(); i < routes.num_outlets; i += 32) state_words(h, kStateNextOutOffset)[i] += count(true, i);
#pragma unroll 1
  for (int i = lane_idx(); i < routes.num_inlets; i += 32) state_words(h, kStateNextInOffset)[i] += count(false, i);
}

/// Ends the call, in the last block to end. One warp. `refusal`: why this rank has not begun it, 0 if it has;
/// `is_alone`: that no other rank knows it, and partners must be told. `count` as of `advance`.
template <class Count>
DEVICE void end_call(const HostCall& h, u64 tag, const Progress& progress, u64 refusal, u64 flags_offset, Count count,
                     bool is_alone = false) {
  const bool has_begun = refusal == 0;
  const int lane_id = lane_idx(), rank = h.call.rank;
  if (has_begun && !has_failed(h.call, tag) && lane_id < kNumRanks && lane_id != rank) {
    perhaps_stall(tag, rank, 5);
    st_release_sys(control_words(h.call, lane_id, flags_offset) + rank * kMaxBlocks, tag);
    wait_word(h, tag, local_words(h.call, flags_offset) + lane_id * kMaxBlocks, tag,
              rank_at(routes_of(h), h.host, lane_id), 36);
  }
  __syncwarp();
  // one thread's look for all: the watcher may report while they look
  const bool is_good = __shfl_sync(~0u, static_cast<int>(!has_failed(h.call, tag)), 0) != 0;
  if (is_good) advance(h, count);
  if (!is_good)
    give_up(h, tag, has_begun ? kGaveUpCode : refusal, has_begun || is_alone || refusal == kBrokenStreamsCode);
  if (lane_id < progress.num_out) state_counters(h, kStateCursorsOffset)[lane_id] = 0;
  for (int i = lane_id; i < progress.num_out * h.num_slots; i += 32) state_counters(h, kStateOutDoneOffset)[i] = 0;
  for (int i = lane_id; i < progress.num_in * h.num_slots; i += 32) state_counters(h, kStateInDoneOffset)[i] = 0;
  if (lane_id == 0) *state_counters(h, kStateNextUnitOffset) = *state_counters(h, kStateNumEndedOffset) = 0;
  __syncwarp();
  if (lane_id == 0) {
    *local_words(h.call, kControlSeqOffset) = tag;
    st_release_gpu(state_words(h, kStateEndedOffset), tag);
  }
}

/// The announcer: as long as the block has workers. The whole warp; true in the last block to end. Workers end when
/// their waits do, so this wait has a bound, too.
DEVICE bool announcer(const HostCall& h, u64 tag, const Progress& progress) {
  const bool has_ended = bounded_wait_here(h.call.timeout_ns + kOwnBlocksTimeoutNs, [&] {
    const bool is_last = ld_acquire_cta(progress.ended) == static_cast<u32>(progress.num_workers);
    announce_chunks(h, progress);
    return is_last;
  });
  if (!has_ended) report_failure(h.call, tag, {kTimeout, my_rank(h), 0, 0, 37});
  __syncwarp();
  u32 before = 0;
  if (lane_idx() == 0)
    before = atom_add_acq_rel_gpu(reinterpret_cast<u32*>(state_counters(h, kStateNumEndedOffset)), 1);
  return __shfl_sync(~0u, before, 0) == gridDim.x - 1;
}

/// The last warp of a block, until the block's workers have ended: keeps its copies of the words.
DEVICE void keep_mirror(const HostCall& h, const Progress& progress) {
  bounded_wait_here(h.call.timeout_ns + 2 * kOwnBlocksTimeoutNs, [&] {
    mirror(h, progress, lane_idx(), 32);
    return ld_acquire_cta(progress.ended) == static_cast<u32>(progress.num_workers);
  });
}

/// The watcher, one warp of the grid, until the call has ended. Threads look at words of their own.
DEVICE void watcher(const HostCall& h, u64 tag, const Progress& progress) {
  const HostRoutes& routes = routes_of(h);
  const int num_out = routes.num_outlets * h.num_slots, num_words = num_out + routes.num_inlets * h.num_slots;
  u32 turn = 0;
  bounded_wait_here(h.call.timeout_ns + 2 * kOwnBlocksTimeoutNs, [&] {
#pragma unroll 4
    for (int i = lane_idx(); i < num_words; i += 32) {
      const bool is_out = i < num_out;
      const int link = (is_out ? i : i - num_out) / h.num_slots, slot = (is_out ? i : i - num_out) % h.num_slots;
      const u64 at = is_out ? routes.outlets[link].freed : routes.inlets[link].arrived;
      u64* copy = const_cast<u64*>(is_out ? freed_copy(h, link) : arrived_copy(h, link)) + slot;
      const u64 word = ld_acquire_sys(reinterpret_cast<const u64*>(at) + slot);
      if (word == ld_relaxed_sys(copy) || (!is_out && is_refusal(h, tag, routes.inlets[link], slot, word))) continue;
      st_release_gpu(copy, word);
    }
    mirror(h, progress, lane_idx(), 32);
    if (turn++ % kWatchEndsEvery == 0) {
      check_neighbour(h, tag);
      for (int i = lane_idx(); i < routes.num_inlets; i += 32) check_inlet(h, tag, i);
    }
    return ld_acquire_gpu(state_words(h, kStateEndedOffset)) == tag;
  });
}

/// Whether this block has the watcher: the first to come. One thread.
DEVICE bool is_watching(const HostCall& h, u64 tag) {
  return atom_exch_relaxed_gpu(state_words(h, kStateWatchedOffset), tag) != tag;
}
