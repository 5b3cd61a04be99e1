// Shared by the latency kernels of dispatch and combine: lent region, tags, slots, bounded waits, the end of a call.
//
// Region of a rank (offsets from the Python `Layout`; two `LatencyPlaces` say where dispatch and combine have theirs).
// Peers write into it; each place has one writer, named by its index, and belongs to one of `num_slots` slots, tag
// modulo that:
//   heads     [slot][src][word]   u64, low half of the tag above and 32 bits of value below: who needs a word polls it
//   weights   [slot][src][token][k] u64 likewise (combine only)
//   flags     [slot][src][token]  u64 tag, released behind a row's bytes
//   rows      [slot][src][token]  bytes of a record
//   packets   [slot][src][token]  the same record in packets of three words and the low half of the tag, each stored
//                                 at once: for few tokens, where the trip of a flag would cost more than bytes do
// Calls of all sizes share these areas: a [slot][src] section is as long in each, and only its source writes it, so a
// late one harms nobody. An area of words with tags holds nothing else in any call, so none passes for another's.
// and locally: `peers` (where this GPU sees the regions of all ranks, 0 for none), the tags of the last calls, a word
// by which the blocks of a grid end together, `news`: what was seen last in the host's memory (`wait.cuh`), which is
// looked at while something is waited for (measured: 16 warps that looked once at the end of each call made it 20 us
// longer).
//
// Everything that decides who takes part is read from memory (tags, peers, mask, abort), so a graph replays into the
// view of its day. A tag never repeats; what waits does so for equality. A peer's word of a later call means that the
// peer has gone on without us.
//
// With F calls in flight a rank sends call n only behind its own receipt of call n - F, for which every peer that it
// still takes part with has sent, and so had received call n - 2F: hence 2F slots, and no acknowledgement. `heard` has
// the last call of each peer that has come; who is more than F behind (its calls were errors) is left out until the
// ranks agree on a view.
//
// A source is taken whole or not at all. A block that misses something of it says so in the grid's word when it ends;
// the last block to end knows what all have seen and, when they differ, does the receiving again without those
// sources: all that came lies in the slot still.
#pragma once
#include "../../common/report.cuh"
#include "../../common/stall.cuh"
#include "../../common/wait.cuh"
#include "../../common/work.cuh"

/// Polls between two looks at the clock, the mask and the news, all near.
constexpr u32 kPollsPerGlance = 64 < kMostPolls ? 64 : kMostPolls;
enum Half : int { kSendHalf = 1, kReceiveHalf = 2 };
// A head: how many tokens follow, a flag, and above them what all ranks must agree about (`LatencyConfig.kind_of`).
enum HeadFlag : u32 { kHeadExcluded = 1u << kHeadTokenBits, kHeadRefused = 2u << kHeadTokenBits };
constexpr u32 kHeadTokens = (1u << kHeadTokenBits) - 1;
constexpr int kHeadKindShift = kHeadTokenBits + 2;

/// A block's view of the call.
struct CallShared {
  u64 peer[kMaxRanks];  // regions of all ranks
  u64 send_tag, receive_tag;
  u64 deadline_ns;
  u32 wanted;   // ranks in the mask, this one always
  u32 active;   // those of them that take part: mapped, and not so far behind that their slots are in use still
  u32 mapped;   // ranks that have a region
  u32 late;     // of the active ones: those whose part does not count in this call
  u32 refused;  // of these: those that said so themselves, because of an error that passes
  u32 verdict;  // of the whole grid: left out in the low kMaxLocal bits, taken in by some block above them
  u32 is_last;
};

DEVICE u64* own_words(const LatencyCall& call, u64 offset) { return reinterpret_cast<u64*>(call.own + offset); }

DEVICE int slot_of(const LatencyPlaces& at, u64 tag) { return static_cast<int>(tag & (at.num_slots - 1)); }

/// Number of the section of (slot, source): the part of an area that one source writes in one call. Its length stays
/// for the buffer's life, whatever sizes calls have; how it is cut into tokens is the call's own.
DEVICE i64 section_of(const LatencyPlaces& at, u64 tag, int src) {
  return static_cast<i64>(slot_of(at, tag)) * kNumRanks + src;
}
DEVICE u64* head_at(const LatencyPlaces& at, u64 region, u64 tag, int src) {
  return reinterpret_cast<u64*>(region + at.heads_offset) + section_of(at, tag, src) * at.head_section;
}
DEVICE u64* flag_at(const LatencyPlaces& at, u64 region, u64 tag, int src, int token) {
  return reinterpret_cast<u64*>(region + at.flags_offset) + section_of(at, tag, src) * at.flag_section + token;
}
DEVICE u8* row_at(const LatencyPlaces& at, u64 region, u64 tag, int src, int token) {
  return reinterpret_cast<u8*>(region + at.rows_offset) + section_of(at, tag, src) * at.rows_section +
         static_cast<i64>(token) * at.row_stride;
}
DEVICE u8* packets_at(const LatencyPlaces& at, u64 region, u64 tag, int src, int token) {
  return reinterpret_cast<u8*>(region + at.packets_offset) + section_of(at, tag, src) * at.packets_section +
         static_cast<i64>(token) * at.packet_stride;
}

DEVICE u64 marked(u64 tag, u32 value) { return tag << 32 | value; }

/// The last call that a source has announced, also if it takes no part; `tag` is the call in progress.
DEVICE_COLD u64 last_head(const LatencyPlaces& at, u64 own, u64 tag, int src) {
  i32 ahead = -static_cast<i32>((tag < 0x7FFFFFFF ? tag : 0x7FFFFFFF));
#pragma unroll 1
  for (int slot = 0; slot < at.num_slots; ++slot) {
    const u64 word = ld_relaxed_sys(head_at(at, own, static_cast<u64>(slot), src));
    if (word) ahead = max(ahead, static_cast<i32>(static_cast<u32>(word >> 32) - static_cast<u32>(tag)));
  }
  return tag + static_cast<i64>(ahead);
}

/// Reads view and tags. First warp; the caller synchronises the block. No load waits for another one.
DEVICE void open_call(const LatencyCall& call, const LatencyPlaces& at, CallShared& s) {
  if (warp_idx() != 0) return;
  const int lane = lane_idx();
  const bool is_rank = lane < kNumRanks;
  const int rank = is_rank ? lane : call.rank;
  const u64 peer = ld_relaxed_sys(own_words(call, call.peers_offset) + rank);
  const i32 mark = ld_relaxed_sys(reinterpret_cast<const i32*>(call.mask) + rank);
  const u64 heard = ld_relaxed_sys(own_words(call, call.heard_offset) + rank);
  const u64 sent = ld_relaxed_sys(own_words(call, call.tags_offset));
  const u64 received = ld_relaxed_sys(own_words(call, call.tags_offset) + 1);
  const u64 send_tag = sent + 1;
  const u64 receive_tag = received + 1 + call.ahead;
  const u64 tag = call.halves & kSendHalf ? send_tag : receive_tag;
  bool is_near = rank == call.rank || tag <= heard + call.max_in_flight;
  if (!is_near) is_near = tag <= last_head(at, call.own, tag, lane) + call.max_in_flight;  // it was out for a while
  const u32 mapped = __ballot_sync(~0u, is_rank && peer != 0);
  const u32 wanted = __ballot_sync(~0u, is_rank && (rank == call.rank || mark != 0));
  const u32 near = __ballot_sync(~0u, is_near);
  if (is_rank) s.peer[lane] = peer;
  if (lane != 0) return;
  s.send_tag = send_tag;
  s.receive_tag = receive_tag;
  s.deadline_ns = global_time_ns() + call.timeout_ns;
  s.wanted = wanted;
  s.active = wanted & near & mapped;
  s.mapped = mapped;
  s.late = s.refused = 0;
}

/// Tells the host of an error; the first one of a call wins.
DEVICE_COLD void report_error(const LatencyCall& call, u64 tag, FailureCode code, int peer, u64 expected, u64 got,
                              u64 where) {
  u64* words = own_words(call, call.reported_offset);
  write_report(words, words + 1, reinterpret_cast<u64*>(call.report), tag, static_cast<u64>(call.op) << 32 | code, peer,
               expected, got, where);
}

DEVICE bool is_aborted(const LatencyCall& call) {
  return ld_relaxed_sys(reinterpret_cast<const u64*>(call.abort)) != 0;
}

/// Whether a wait for `peer` must end: the time is over, the call aborted, the peer dead or taken out of the mask
/// meanwhile. To the host a wait is as old as its call: none takes a millisecond but by waiting.
DEVICE_COLD bool must_end(const LatencyCall& call, u64 deadline_ns, int peer) {
  const u64 now = global_time_ns();
  if (now > deadline_ns) return true;
  if (peer != call.rank && ld_relaxed_sys(reinterpret_cast<const i32*>(call.mask) + peer) == 0) return true;
  const u64 start = deadline_ns - call.timeout_ns;
  const HostState news = latest_news(reinterpret_cast<u64*>(call.abort), own_words(call, call.news_offset), start, now);
  return is_aborted(news) || (dead_ranks(news) >> peer & 1);
}

// These loops are written out, and only their look is the common one: through `bounded_wait` a dispatch with packets
// took 0.5 to 0.9 us longer (2x H200, in turns), also where everything had come before. Each looks once more after it
// was told to end: this block may have stood still since it looked, and what a rank sent before it died counts.

/// Whether a wait goes on after `polls` polls: not when `must_end`, nor when the block knows that the peer is late.
DEVICE bool may_wait(const LatencyCall& call, const CallShared& s, int peer, u32 polls) {
  poll_pause();
  if (*const_cast<const volatile u32*>(&s.late) >> peer & 1) return false;
  return polls % kPollsPerGlance || !must_end(call, s.deadline_ns, peer);
}

/// Waits for a marked word, which orders nothing but itself. False when it does not come, or a later one is there.
DEVICE bool wait_marked(const LatencyCall& call, const CallShared& s, u64 tag, const u64* word, int peer, u32& value) {
  perhaps_stall(tag, call.rank, 2);
  bool goes_on = true;
  for (u32 polls = 1;; ++polls) {
    const u64 got = ld_relaxed_sys(word);
    value = static_cast<u32>(got);
    const i32 ahead = static_cast<i32>(static_cast<u32>(got >> 32) - static_cast<u32>(tag));
    if (ahead == 0) return true;
    if (!goes_on || (got && ahead > 0)) return false;
    goes_on = may_wait(call, s, peer, polls);
  }
}

/// Waits for the flag of a row; acquires. False when it does not come.
DEVICE bool wait_flag(const LatencyCall& call, const CallShared& s, u64 tag, const u64* flag, int peer) {
  perhaps_stall(tag, call.rank, 3);
  bool goes_on = true;
  for (u32 polls = 1;; ++polls) {
    const u64 got = ld_acquire_sys(flag);
    if (got == tag) return true;
    if (!goes_on || got > tag) return false;
    goes_on = may_wait(call, s, peer, polls);
  }
}

/// Waits for a packet; its last word is the mark. False when it does not come.
DEVICE bool wait_packet(const LatencyCall& call, const CallShared& s, u64 tag, const u8* from, int peer, Vec16& v) {
  bool goes_on = true;
  for (u32 polls = 1;; ++polls) {
    v = ld_relaxed_sys_128(from);
    if (v.word[3] == static_cast<u32>(tag)) return true;
    if (!goes_on) return false;
    goes_on = may_wait(call, s, peer, polls);
  }
}

/// Where a record (this rank, token) lies at the ranks that get it, 0 for others; the first one is the next rank, so
/// that no inlet is crowded.
struct RecordPlaces {
  u8* at[ROOM(kNumRanks, kMaxRanks)];
};
DEVICE RecordPlaces record_places(const LatencyCall& call, const LatencyPlaces& at, const CallShared& s, u64 tag,
                                  int token, u32 ranks, bool is_packed) {
  RecordPlaces to;
#pragma unroll
  for (int n = 0; n < kNumRanks; ++n) {
    const int next = call.rank + 1 + n;
    const int d = next < kNumRanks ? next : next - kNumRanks;
    u8* place =
        is_packed ? packets_at(at, s.peer[d], tag, call.rank, token) : row_at(at, s.peer[d], tag, call.rank, token);
    to.at[n] = ranks >> d & 1 ? place : nullptr;
  }
  return to;
}
template <bool kIsPacket>
DEVICE void store_everywhere(const RecordPlaces& to, int offset, const Vec16& v) {
#pragma unroll
  for (int n = 0; n < kNumRanks; ++n) {
    if (!to.at[n]) continue;
    if (kIsPacket)
      st_relaxed_sys_128(to.at[n] + offset, v);
    else
      st_vec16(to.at[n] + offset, v);
  }
}

/// Packet `i` of a record in shared memory. Up to two words behind the record are in the last ones: nobody looks there.
DEVICE Vec16 packet_of(const u32* words, int num_packets, int i, u64 tag) {
  return {{words[i], words[num_packets + i], words[2 * num_packets + i], static_cast<u32>(tag)}};
}

/// A row has been stored, and all threads of the block have met since: releases its flag at the ranks in `ranks`. One
/// warp. That waits until the stores have arrived, so others should have work meanwhile.
DEVICE void release_flags(const LatencyCall& call, const LatencyPlaces& at, const CallShared& s, u64 tag, int token,
                          u32 ranks) {
  const int d = lane_idx();
  perhaps_stall(tag, call.rank, 5);
  if (d < kNumRanks && (ranks >> d & 1)) st_release_sys(flag_at(at, s.peer[d], tag, call.rank, token), tag);
}

/// Waits for a head word of every source in `awaited` and understands it: this block's `late` and `refused` grow.
/// `kind` is what all ranks must agree about. Block 0 notes how long it took. One warp, a lane for each source; returns
/// its value.
DEVICE u32 learn_head(const LatencyCall& call, const LatencyPlaces& at, CallShared& s, u32 awaited, u32 kind) {
  const int src = lane_idx();
  u32 value = 0;
  if (src >= kNumRanks) return 0;
  if (!(awaited >> src & 1)) {
    if (blockIdx.x == 0 && call.waits) reinterpret_cast<u64*>(call.waits)[src] = 0;
    return 0;
  }
  const bool is_there = wait_marked(call, s, s.receive_tag, head_at(at, call.own, s.receive_tag, src), src, value);
  if (blockIdx.x == 0 && call.waits)
    reinterpret_cast<u64*>(call.waits)[src] = (global_time_ns() + call.timeout_ns - s.deadline_ns) / 1000;
  const u32 other = value >> kHeadKindShift;
  if (is_there && !(value & (kHeadExcluded | kHeadRefused)) && other == kind &&
      (value & kHeadTokens) <= static_cast<u32>(at.max_tokens))
    return value;
  red_or_shared(&s.late, 1u << src);
  if (is_there && (value & kHeadRefused)) red_or_shared(&s.refused, 1u << src);
  if (is_there && !(value & (kHeadExcluded | kHeadRefused)) && other != kind) {
    red_or_shared(&s.refused, 1u << src);
    report_error(call, s.receive_tag, kMismatch, src, kind, other, 0);
  }
  return 0;
}

/// Ends a block's part. True in the last block to end, which then knows what all blocks have seen. All threads, after
/// all memory operations. `taken`: sources whose rows this block has laid out; of these, `s.late` do not count. Blocks
/// may see different sources take part at all, so who does not is left out like any other. The word has the number of
/// blocks that have ended (16 bits), of those that did not have all (16), and what these have left out and taken (16
/// each).
DEVICE bool end_block(const LatencyCall& call, CallShared& s, u32 taken, u64 word_offset) {
  static_assert(2 * kMaxLocal <= 32, "the ranks of both kinds share half of the word");
  CONSTANT u32 kAll = (1u << kNumRanks) - 1;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64* word = own_words(call, word_offset);
    const u32 left_out = kAll & ~(taken & ~s.late);
    if (left_out) red_or_relaxed_gpu(word, static_cast<u64>(left_out | taken << kMaxLocal) << 32);
    const u64 seen = atom_add_acq_rel_gpu(word, left_out ? 0x10001 : 1);
    const u32 num_bad = (static_cast<u32>(seen) >> 16) + (left_out != 0);
    s.is_last = (seen & 0xFFFF) == gridDim.x - 1;
    s.verdict = static_cast<u32>(seen >> 32) | (num_bad < gridDim.x ? kAll << kMaxLocal : 0);
    if (s.is_last) *word = 0;
  }
  __syncthreads();
  return s.is_last;
}

/// What counts in the end, and whether blocks have differed, so that the last one must do all again.
DEVICE u32 counted_sources(const CallShared& s) {
  return (s.verdict >> kMaxLocal & ~s.verdict) & ((1u << kNumRanks) - 1);
}
DEVICE bool has_differed(const CallShared& s) { return (s.verdict & s.verdict >> kMaxLocal) != 0; }

/// Takes silent sources out of the mask and tells the host, or in a strict call reports them. Threads below kNumRanks.
DEVICE_COLD void finish_without(const LatencyCall& call, u64 tag, u32 missing, u32 refused) {
  const int src = static_cast<int>(threadIdx.x);
  const u32 silent = missing & ~refused;
  const bool was_aborted = is_aborted(call);  // what came whole is good, also in the last moment
  const bool is_taken_out = (silent >> src & 1) && src != call.rank && !was_aborted && !call.is_strict;
  if (is_taken_out) reinterpret_cast<i32*>(call.mask)[src] = 0;
  if (src != 0) return;
  u64* lost = reinterpret_cast<u64*>(call.lost);  // grows until the host has looked
  if (was_aborted)
    report_error(call, tag, kAborted, call.rank, 0, 0, 0);
  else if (call.is_strict && silent)
    report_error(call, tag, kTimeout, __ffs(silent) - 1, tag, silent, 0);
  else if (call.is_strict)
    report_error(call, tag, kRefused, __ffs(missing) - 1, tag, 0, 0);
  else
    st_relaxed_sys(lost, marked(tag, static_cast<u32>(ld_relaxed_sys(lost)) | missing));
}

/// The last block's last act: writes `got`, moves the tags on, and says which of the sources in `awaited` are missing.
/// A send phase alone marks nothing as received: its receive phase may never run. All threads.
DEVICE void finish_call(const LatencyCall& call, const CallShared& s, u32 counted, u32 awaited, u64 out_got) {
  const int src = static_cast<int>(threadIdx.x);
  if (src >= kNumRanks) return;
  if (call.halves & kReceiveHalf) {
    if (out_got) reinterpret_cast<u8*>(out_got)[src] = static_cast<u8>(counted >> src & 1);
    if (counted >> src & 1) red_max_relaxed_gpu(own_words(call, call.heard_offset) + src, s.receive_tag);
  } else {
    if (out_got) reinterpret_cast<u8*>(out_got)[src] = 0;
    if (call.waits) reinterpret_cast<u64*>(call.waits)[src] = 0;
  }
  u64* tags = own_words(call, call.tags_offset);
  if (src == 0 && (call.halves & kSendHalf)) tags[0] = s.send_tag;
  if (!(call.halves & kReceiveHalf)) return;
  if (src == 0) tags[1] = s.receive_tag - 1 - call.ahead + call.advance;
  if (awaited & ~counted) finish_without(call, s.receive_tag, awaited & ~counted, s.refused);
}
