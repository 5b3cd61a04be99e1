// What every kernel of a buffer shares: the control block, the tag of the call, bounded waits, reports.
//
// Control block (one per rank, `kControl...Offset` from the Python `Layout` that also sizes it). Each flag has one
// writer and one reader, holds the tag of the last call for which it was set, and is compared for equality: tags count
// calls, so they never repeat within a buffer's life. `seq` is a word in device memory that block 0 of a call's last
// kernel advances, so that a captured graph has a new tag at every replay.
//
//   written by peers: counts (two parities), dispatch_done and combine_done (a flag for
//                     each block), combine_ready, combine_failed (the peer gave this combine up; both for each of the
//                     last calls, as a rank whose calls fail runs ahead of a slow reader), barrier, streams (progress
//                     of a sender, expert layout only), staged (progress of a copy)
//   written locally:  view and haunted (by the host), news, seq, failed (tag of the last call that failed, and a sum
//                     over all that have), exchanged (tag of the last call that all ranks were seen to join),
//                     reported, grid words, grants, scratch
//
// View. Who takes part is read from memory, so that a graph replays into the view of its day: the first word of `view`
// has a bit for each active rank (of 64), the second one the number of the view and `kSomeHaunted`. The host writes
// them (`Machine.set_view`) while no call is in flight on any member, together with `seq`, which all members set to the
// same number above every call that any of them has made: so no word of an earlier call passes for one of a later call.
// A rank that is not active is neither written to, nor awaited, nor read: its words have places of their own, so it
// cannot be taken for somebody else, whatever it stores. A handle knows the view that it was made in and serves in no
// other. `haunted` has a bit for each slot that a rank which was left out may still write; the host lends none of them,
// but a graph names its slot in every replay.
//
// News (`wait.cuh`). Threads that wait for peers look at `news` every `kPollsPerLook` polls. A call with a dead rank in
// its view cannot end well, so any wait for a peer ends then, also one for a living rank, which may have given up
// already; the report names the dead one.
//
// Every params struct starts with a `Call` (generated from `gpu/params.Call`): control blocks of all ranks as this
// GPU addresses them, host memory for reports and for the abort word, the time-out per wait, rank and operation.
//
// A kernel of a failed call moves no payload, but advances `seq` like any other, so ranks stay in step. A peer that is
// late may still be in the failed call and store into what this rank granted there. It has left it when it joins a
// later call; until then (`is_haunted`) nothing may be put into such memory for others to read.
//
// A call may fail on one rank and end well on another, which goes on to its next step while the first makes this one
// again. So ranks compare in every call which earlier calls of the view have failed (`losses_of`), and differ from then
// on until the view changes: no two different calls are paired. Who failed alike goes on.
#pragma once
#include "report.cuh"
#include "stall.cuh"
#include "wait.cuh"

/// What a dispatch leaves in its handle, and tells a waiting host: whether the handle's numbers may be used.
enum HandleState : int { kHandleGood = 1, kHandleBad };

DEVICE u8* control_at(const Call& call, int rank, u64 offset) {
  return reinterpret_cast<u8*>(call.control[rank] + offset);
}
DEVICE u64* control_words(const Call& call, int rank, u64 offset) {
  return reinterpret_cast<u64*>(control_at(call, rank, offset));
}
DEVICE u64* local_words(const Call& call, u64 offset) { return control_words(call, call.rank, offset); }

/// The tag of the call in progress. Any thread, any time before `finish_call` of this kernel.
DEVICE u64 current_tag(const Call& call) { return *local_words(call, kControlSeqOffset) + 1; }

/// The view of the call in progress.
struct View {
  u64 members;
  u64 number;  // 32 bits; `kSomeHaunted` stands above them
};
DEVICE u64* view_words(const Call& call) { return local_words(call, kControlViewOffset); }

/// Both words, in one load. Any thread, any time.
DEVICE View current_view(const Call& call) {
  const Vec16 v = ld_relaxed_sys_128(view_words(call));
  return {v.word[0] | static_cast<u64>(v.word[1]) << 32, v.word[2] | static_cast<u64>(v.word[3]) << 32};
}
DEVICE u64 view_number(const Call& call) { return ld_relaxed_sys(view_words(call) + 1); }

/// A bit for each rank of this NVLink domain that takes part; this one always does.
DEVICE u32 ranks_of(const Call& call, u64 members) { return static_cast<u32>(members) | 1u << call.rank; }
DEVICE u32 active_ranks(const Call& call) { return ranks_of(call, ld_relaxed_sys(view_words(call))); }

DEVICE bool is_in(u32 ranks, int rank) { return ranks >> rank & 1; }

/// The words in front of a rank's counts in a dispatch. A rank that combines instead sends `kRefusal` alone.
enum HeaderWord : int {
  kHandleInUse = 0,
  kSignature,
  kLosses,
  kGrant,
  kRefusal,
  kChannels,
  kBlocks,
  kTokens,
  kNumHeaderWords
};
constexpr u64 kOtherCallCode = 2;     // as refusal: the rank makes another kind of call
constexpr u64 kOtherCallSlot = 0x7E;  // the same in place of a combine's slot
constexpr u64 kBadHandleCode = 4;     // as refusal of a combine: the dispatch had failed there
constexpr u64 kBrokenGridCode = 5;    // as refusal: the rank's own blocks did not meet
constexpr u64 kOldHandleCode = 6;     // as refusal: the handle is of an earlier view there
constexpr u64 kBarrierCode = 8;       // as refusal: the rank makes a barrier
constexpr u32 kRefusedSlot = 0x7F;    // in place of a combine's slot: the code stands below
constexpr u64 kHauntedCode = 7;       // as refusal: a rank that was left out may still write what the call would grant
constexpr u64 kGaveUpCode = 3;        // as refusal: the rank has left this call without waiting for us

/// Why a handle cannot be used in the view of a number, 0 when it can. `recv_info` is its own.
DEVICE u32 flaw_of(u64 view_number, const i32* recv_info) {
  const i32 state = recv_info[0];
  const i32 number = recv_info[1];  // both loads at once
  if (state != kHandleGood) return static_cast<u32>(kBadHandleCode);
  return static_cast<u32>(number) == static_cast<u32>(view_number) ? 0 : static_cast<u32>(kOldHandleCode);
}

/// What all ranks of a combine must agree on, 16 bits: the host's facts, and above them the low bits of the number of
/// the dispatch that made the handle. The kernels count that: a graph has a new one at every replay, and is the peer of
/// ranks that make the same calls without it. It stands for the shape as well, which was compared then. Two bits
/// of `losses_before` are added where they hide no two handles that are less than 32 calls apart.
DEVICE u64 combine_signature(u64 facts, u32 losses, const i32* recv_info) {
  return (facts | static_cast<u64>(static_cast<u32>(recv_info[kRecvInfoCall]) + ((losses & 3) << 5))
                      << kCombineFactBits) &
         0xFFFF;
}

/// Whether a rank that was left out of the view may still write into a slot of ours.
DEVICE bool is_slot_haunted(const Call& call, u64 view_number, int slot) {
  if (!(view_number & kSomeHaunted)) return false;
  return ld_relaxed_sys(local_words(call, kControlHauntedOffset) + slot / 64) >> (slot % 64) & 1;
}

/// Whether a word that a peer stamps with its calls shows a later call than `tag`: it has given this one up.
DEVICE bool is_later(u64 word, u64 tag) {
  return static_cast<i32>(static_cast<u32>(word >> 32) - static_cast<u32>(tag)) > 0;
}

DEVICE u64* counts_row(const Call& call, int owner, int src_rank, u64 tag) {
  const u64 row = (tag & 1) * kMaxRanks + static_cast<u64>(src_rank);
  return control_words(call, owner, kControlCountsOffset) + row * kCountsRowWords;
}

/// The word of rank `src_rank` for call `tag` in the memory of `owner`: later calls of that rank do not overwrite it
/// before the `kRememberedCalls`-th.
DEVICE u64* call_word(const Call& call, int owner, u64 offset, int src_rank, u64 tag) {
  return control_words(call, owner, offset) + tag % kRememberedCalls * kMaxRanks + static_cast<u64>(src_rank);
}

/// Whether rank `peer` has given up combine `tag`, or is so far ahead that it must have.
DEVICE bool has_given_up(const Call& call, u64 tag, int peer) {
  return ld_acquire_sys(call_word(call, call.rank, kControlCombineFailedOffset, peer, tag)) >= tag;
}

/// Tells rank `peer` that this rank has left combine `tag` without having heard from everybody: what is pulled from it
/// from then on is no row.
DEVICE void tell_given_up(const Call& call, u64 tag, int peer) {
  st_release_sys(call_word(call, peer, kControlCombineFailedOffset, call.rank, tag), tag);
}

/// What a call adds to the sum of those that have failed: squares, that other calls hardly sum up to, and odd ones, so
/// that the low bits tell one call from none.
DEVICE u32 loss_of(u64 tag) {
  const u32 odd = 2 * static_cast<u32>(tag) + 1;
  return odd * odd;
}

/// What all ranks must agree on in a call: which calls of the view have failed before, 0 for none. When this one has
/// failed here already, that is in it: then it fails on all.
DEVICE u32 losses_of(const Call& call) {
  return static_cast<u32>(ld_relaxed_sys(local_words(call, kControlFailedOffset) + 1) >> 32);
}

/// The same without this call. Two bits of the sum only count: with this call in it, failed in another block already, a
/// rank that has lost one call less would look like one that has lost as many.
DEVICE u32 losses_before(const Call& call, u64 tag) {
  const u64 losses = ld_relaxed_sys(local_words(call, kControlFailedOffset) + 1);
  return static_cast<u32>(losses >> 32) - (static_cast<u32>(losses) == static_cast<u32>(tag) ? loss_of(tag) : 0);
}

/// The word by which a rank tells a peer that it has come to barrier `tag`: 48 bits of the tag, 16 of `losses_of`.
DEVICE u64 barrier_word(u64 tag, u32 losses) { return tag << 16 | (losses & 0xFFFF); }

/// Whether a barrier's word is of call `tag` or a later one.
DEVICE bool has_reached(u64 word, u64 tag) { return static_cast<i64>(word - (tag << 16)) >= 0; }

/// Whether a rank is in a later call. It tells of its calls in turn: then its word of this one has come, or never will.
DEVICE bool has_passed(const Call& call, u64 tag, int rank) {
  bool is_any = false;
#pragma unroll 1
  for (u64 i = 0; i < kRememberedCalls; ++i)
    is_any |= is_later(ld_acquire_sys(call_word(call, call.rank, kControlCombineReadyOffset, rank, i)), tag);
  return is_any;
}

/// Whether an earlier kernel or block of this call failed.
DEVICE bool has_failed(const Call& call, u64 tag) {
  return ld_relaxed_sys(local_words(call, kControlFailedOffset)) == tag;
}

/// All ranks have joined this call, so they have left all earlier ones: the host may lend their slots again. One
/// thread.
DEVICE void mark_exchanged(const Call& call, u64 tag) {
  st_relaxed_sys(local_words(call, kControlExchangedOffset), tag);
  if (call.ordinal) st_relaxed_sys(reinterpret_cast<u64*>(call.exchanged), call.ordinal);
}

/// Whether a peer may still be in a call that failed here: no call since has been joined by all.
DEVICE bool is_haunted(const Call& call) {
  const u64 failed = ld_relaxed_sys(local_words(call, kControlFailedOffset));
  return failed != 0 && ld_relaxed_sys(local_words(call, kControlExchangedOffset)) <= failed;
}

/// Marks a call as failed, and adds it to the sum that `losses_of` returns; below the sum stands the low half of the
/// call's tag. The first thread alone writes it: calls fail one after the other.
DEVICE void mark_failed(u64* failed, u64 tag) {
  if (atom_exch_relaxed_gpu(failed, tag) == tag) return;
  const u64 losses = ld_relaxed_sys(failed + 1) >> 32;
  st_relaxed_sys(failed + 1, losses + loss_of(tag) << 32 | static_cast<u32>(tag));
}

/// Marks the call as failed without telling this rank's host, which knows already.
DEVICE void mark_failed(const Call& call, u64 tag) { mark_failed(local_words(call, kControlFailedOffset), tag); }

/// The same, and tells the host; the first report of a call wins. `control` is this rank's control block.
DEVICE_COLD void report_loss(u8* control, u64* reports, u64 tag, u64 code_and_op, i64 peer, u64 expected, u64 got,
                             u64 where) {
  mark_failed(reinterpret_cast<u64*>(control + kControlFailedOffset), tag);
  add_report(reinterpret_cast<u64*>(control + kControlReportedOffset), reports, tag, code_and_op, peer, expected, got,
             where);
}
DEVICE void report_failure(const Call& call, u64 tag, const Failure& failure) {
  report_loss(control_at(call, call.rank, 0), reinterpret_cast<u64*>(call.report), tag,
              static_cast<u64>(call.op) << 32 | failure.code, failure.peer, failure.expected, failure.got,
              failure.where);
}

/// How many polls pass between two looks at the clock and the news. Hundreds of warps that looked every 64 polls cost
/// more than half of the link (measured), so about a millisecond it is.
constexpr u32 kPollsPerLook = 1024 < kMostPolls ? 1024 : kMostPolls;
constexpr u32 kFailedElsewhere = 1 << 8;

/// Why waits that began at `start` must end, 0 when they may go on: a `FailureCode`, with the first dead rank of the
/// view above it, or `kFailedElsewhere`.
DEVICE u32 why_stop(const Call& call, u64 tag, u64 start) {
  const u64 now = global_time_ns();
  const HostState news =
      latest_news(reinterpret_cast<u64*>(call.abort), local_words(call, kControlNewsOffset), start, now);
  const u32 dead = dead_ranks(news) & active_ranks(call) & ~(1u << call.rank);
  if (dead) return kPeerDead | static_cast<u32>(__ffs(static_cast<int>(dead)) - 1) << 16;
  if (is_aborted(news)) return kAborted;
  if (now - start > call.timeout_ns) return kTimeout;
  return has_failed(call, tag) ? kFailedElsewhere : 0;
}

/// Whether a wait for `peer` that began at `start` must end: the time is over, the call aborted, a rank of the view
/// dead (these are reported, with the other arguments), or the call has failed elsewhere.
DEVICE bool must_stop(const Call& call, u64 tag, u64 start, int peer, u64 want, u64 got, u64 where) {
  const u32 why = why_stop(call, tag, start);
  if (!why) return false;
  const FailureCode code = static_cast<FailureCode>(why & 0xFF);
  if (code == kPeerDead) peer = static_cast<int>(why >> 16);
  if (code) report_failure(call, tag, {code, peer, want, got, where});
  return true;
}

/// Waits until `*word == want`; acquires at system scope. False when `must_stop` ends the wait. `where` says which wait
/// it was.
DEVICE bool wait_for(const Call& call, u64 tag, const u64* word, u64 want, int peer, u64 where) {
  perhaps_stall(tag, call.rank, 2);
  const u64 start = global_time_ns();
  u64 got;
  return bounded_wait<kPollsPerLook>([&] { return (got = ld_acquire_sys(word)) == want; },
                                     [&] { return must_stop(call, tag, start, peer, want, got, where); });
}

/// Waits until a block of this very grid has announced itself, also when the call has failed or is aborted: a block
/// that began behind the end of its call would take part in the next one. Blocks end when their own waits do, so this
/// is bounded by them, and by the time until the GPU has a place for the block.
DEVICE void wait_own_block(const Call& call, u64 tag, const u64* flag) {
  if (!bounded_wait_here(call.timeout_ns + kOwnBlocksTimeoutNs, [&] { return ld_acquire_sys(flag) == tag; }))
    report_failure(call, tag, {kTimeout, call.rank, tag, *flag, 8});
}

/// All blocks of the grid meet; memory written before is visible after, on this GPU. Needs co-resident blocks.
/// Called by all threads. `word` counts arrivals and is zero again afterwards; `gate` receives the tag. A launch that
/// starts all blocks together makes the bound of this wait a formality; passing it fails the call.
DEVICE void grid_barrier(const Call& call, u64 tag, u64 word_offset, u64 gate_offset) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32* word = reinterpret_cast<u32*>(control_at(call, call.rank, word_offset));
    u64* gate = local_words(call, gate_offset);
    if (atom_add_acq_rel_gpu(word, 1) == gridDim.x - 1) {
      *word = 0;
      st_release_gpu(gate, tag);
    } else if (!bounded_wait_here(kGridTimeoutNs, [&] { return ld_acquire_gpu(gate) == tag; })) {
      report_failure(call, tag, {kTimeout, call.rank, tag, *gate, 7});
    }
  }
  __syncthreads();
}

/// This block has done its part of the call: tells this rank so, and all other ranks in `peers`. All threads, after all
/// memory operations of the block; what they wrote is visible to whoever waits for it in `await_blocks`.
DEVICE void announce_block(const Call& call, u64 tag, u64 flags_offset, u32 peers) {
  __syncthreads();
  allow_next_kernel();  // its blocks take their places while this one's last signals are under way
  perhaps_stall(tag, call.rank, 1);
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < kNumRanks && (is_in(peers, peer) || peer == call.rank))
    st_release_sys(control_words(call, peer, flags_offset) + call.rank * kMaxBlocks + blockIdx.x, tag);
}

/// Waits until the blocks of all ranks have announced themselves: all blocks of this rank, `num_blocks[r]` of rank r
/// when `from_peers`. One block, all threads.
DEVICE void await_blocks(const Call& call, u64 tag, u64 flags_offset, const i32* num_blocks, bool from_peers,
                         u64 where) {
  const u64* flags = local_words(call, flags_offset);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kNumRanks * kMaxBlocks; i += static_cast<int>(blockDim.x)) {
    const int rank = i % kNumRanks;  // neighbours wait for different ranks: most threads have one flag at most
    const int block = i / kNumRanks;
    const int count = rank == call.rank ? static_cast<int>(gridDim.x) : from_peers ? num_blocks[rank] : 0;
    const u64* flag = flags + rank * kMaxBlocks + block;
    if (block >= count) continue;
    if (rank == call.rank)
      wait_own_block(call, tag, flag);
    else
      wait_for(call, tag, flag, tag, rank, where);
  }
  __syncthreads();
}

/// Ends the call: the next kernel has the next tag. One block, all threads, when all blocks of the rank are done.
DEVICE void finish_call(const Call& call, u64 tag) {
  __syncthreads();
  if (threadIdx.x == 0) *local_words(call, kControlSeqOffset) = tag;
}
