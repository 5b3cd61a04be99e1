// What the collectives share: the lent region, the call's number, who takes part, bounded waits, the end of a call.
//
// Region of a rank (offsets from the Python `Layout`). Peers write what is marked *; each such word or byte has one
// writer, named by its index:
//   joined  *[number % 4][rank]           number of a call that the rank has begun << 24 | its signature (below)
//   places  *[number % 4][rank][2]        where in its pool the rank's input for us, and its output, begin
//   gone    *[rank]                       a call that the rank has lost since the ranks met last, and for what
//                                         (`loss_of`), else 0
//   left    *[rank]                       mode "mask": not 0 when the rank has left the group, all its calls behind it
//   flags   *[stage][lane][rank]          how far the rank has written its chunks (`pipeline.cuh`)
//   credits *[stage][lane][rank]          how far it has read ours
//   packets *[parity][stage][rank][bytes] payload of small and middle calls (`packets.cuh`)
//   chunks  *[stage][lane][slot][rank][bytes] payload of large calls
//   pools, pool_bytes                     local: where this GPU sees the pools of all ranks (0: none), and their sizes
//   peers, tags, view, news, failed       local: where this GPU sees the regions of all ranks (0: none); the number of
//                                         the last call; a bit for each rank that takes part; what was seen last in
//                                         the host's memory (`wait.cuh`); the last call that failed, as in `gone`,
//                                         and that was reported
//   expected [number % 4][rank]           local: the word that `joined` must have when the rank makes the same call
//   out, settled, got                     local, of mode "mask" (`mask/settle.cuh`)
//   ballot, ballots                       local, of large calls there (`mask/tries.cuh`)
//
// Number of a call (tag). All ranks make the same calls in the same order, so all count alike, in device memory: a
// replayed graph has a new number each time. Each block has a copy of its own in `tags`, which it reads when it begins
// and, when it ends, writes together with those of blocks that this grid does not have; so no block can see the number
// move under it, and nothing is counted at the end of a call.
//
// Reuse of memory. `joined[p] >= n` here says that rank p has begun call n, hence that its call n - 1 has ended: it
// reads nothing of earlier calls, and none of its stores of an earlier call are under way. Each call says so to all
// active ranks first thing, whether it has data for them or not. Packets lie in one of two halves, by the number's
// parity: call n writes to rank p behind `joined[p] >= n - 1`, so p has ended call n - 2, which used this half before.
// That word came with, or in front of, p's part of call n - 1, so as a rule nobody waits for it. Chunks have one home
// only: there call n writes behind `joined[p] >= n`. Both hold when calls fail, because nobody writes without having
// seen the word.
//
// Facts. 23 bits made of what all ranks must agree on in a call (operation, dtype, reduction, root) and of the bytes
// that go from the writer of the word to its reader, which both know; below them a bit which says that `places` have
// been written before. So no two different calls are paired: a call that
// waits for `joined` of its own number compares at once, any other one when it ends, as far as the words have come, and
// in the next call, in front of which they have. Four words a rank, for four calls: a rank can be two calls ahead.
//
// A call that is lost here may have ended well elsewhere, and the ranks may then stand before different steps. So who
// loses one tells all (`gone`), makes no other, and lets everybody's next call fail, until the hosts have met
// (`machine.py`), emptied the words and agreed on a number above all. In front of `gone` goes the word of the call,
// whichever block is first: who finds that a rank has gone finds at the same time whether its call was another one.
//
// Cause. A death is heard of at different times: one rank's host has told its kernels, another one's will in a while.
// So is another call than one's own: a rank's word of it may have come to one peer, and be under way to another. So
// whoever loses a call for one of these says whose death it was, or whose call, in the word that tells of the loss; who
// loses a call for that word reports the cause, not the rank that told it, and says the same in turn. The first failure
// of a call on a GPU decides, in one atomic (`report_failure`): all its blocks tell the peers, and its host, the same.
//
// Everything that decides who takes part is read from memory (tags, peers, view), so a graph replays into the view of
// its day. The host sets view and peers, and on all ranks alike a tag above all calls made and `joined` to match, while
// no call is in flight anywhere; ranks outside the view are not written to, not awaited, not read. Their bytes in
// gathered results stay as they were.
//
// A wait ends with a report when the time is over, the host aborts, a rank of the view is known to be dead, or the peer
// has begun a later call (it gave this one up); without one when the call failed elsewhere on this GPU. A call that has
// failed goes on to its end without moving more payload, so numbers stay in step. What of the output was written
// before is lost. Nothing traps. Calls of mode "mask" differ: there a death is no failure (`mask/settle.cuh`,
// `mask/tries.cuh`).
#pragma once
#include "../../common/chunks.cuh"
#include "../../common/report.cuh"
#include "../../common/stall.cuh"
#include "../../common/wait.cuh"
#include "../../common/work.cuh"

/// Polls between two looks at the clock and at words of this GPU's memory.
constexpr u32 kPollsPerGlance = 64 < kMostPolls ? 64 : kMostPolls;

/// Which wait a report is about; the host has the words for them.
enum WaitPlace : u64 {
  kWaitJoined = 1,
  kWaitPackets,
  kWaitFlag,
  kWaitCredit,
  kWaitBarrier,
  kWaitFacts,
  kWaitBlocks,
  kWaitLoad
};
/// First and second crossing of a payload: from its source, and from who has reduced or relays it.
enum Stage : int { kScatter = 0, kGather, kNumStages };

constexpr int kFactsBits = 24;
constexpr u64 kFactsMask = (1ull << kFactsBits) - 1;
constexpr u64 kPlaced = 1;  // of a word `joined`: `places` lie in front of it
constexpr int kCauseBits = 8;
constexpr u64 kCauseMask = (1ull << kCauseBits) - 1;
constexpr u64 kOtherCall = 1ull << (kCauseBits - 1);

/// What the death of a rank is for a call: a failure; noted, and what waits for others goes on, as the call mends
/// itself; noted, and the call ends, as it is but a try. In mode "mask" a rank that has left is as one that is dead.
enum OnDeath : u32 { kFails = 0, kMends, kTries };

/// A block's view of the call.
struct Meeting {
  u64 peer[kMaxRanks];  // regions of all ranks
  u64 tag;
  u32 active;              // ranks that take part, this one always
  u32 is_open;             // all have come so far that the call can go on
  i32 lost_at;             // the first step of this block whose wait has failed since
  u32 on_death;            // `OnDeath`
  mutable u32 has_deaths;  // a wait of this block has met one that is no failure
};

DEVICE u64* own_words(const CollectiveCall& call, u64 offset) { return reinterpret_cast<u64*>(call.own + offset); }
DEVICE bool is_in(u32 ranks, int rank) { return ranks >> rank & 1; }

/// The n-th rank behind this one, so that all send to different ones at a time.
DEVICE int rank_behind(int rank, int n) { return rank + n < kNumRanks ? rank + n : rank + n - kNumRanks; }

/// A word of `joined`: call `tag`, in which `bytes` go from its writer to its reader. Its last bit is for `kPlaced`.
DEVICE u64 word_of(const CollectiveCall& call, u64 tag, i64 bytes) {
  const u64 facts = (call.signature + static_cast<u64>(bytes)) * 0x9E3779B97F4A7C15ull >> (64 - kFactsBits);
  return tag << kFactsBits | (facts & ~kPlaced);
}
DEVICE u64* joined_at(u64 region, u64 tag, int rank) {
  return reinterpret_cast<u64*>(region + kRegionJoinedOffset) + tag % 4 * kMaxRanks + rank;
}
DEVICE u64* expected_at(const CollectiveCall& call, u64 tag, int rank) {
  return own_words(call, kRegionExpectedOffset) + tag % 4 * kMaxRanks + rank;
}

/// A word of `gone`, and of `failed`: the call that was lost, and why.
DEVICE u64 loss_of(u64 tag, u64 cause) { return tag << kCauseBits | cause; }
/// The cause: 1 + the rank that is dead, with `kOtherCall` the rank that makes another call; 0: none that others share.
DEVICE u64 cause_of(u32 code, int peer) {
  const u64 number = static_cast<u64>(peer) + 1;
  return code == kPeerDead ? number : code == kMismatch ? kOtherCall | number : 0;
}

/// Whether a call has failed on this GPU.
DEVICE bool has_failed(const CollectiveCall& call, u64 tag) {
  return ld_relaxed_sys(own_words(call, kRegionFailedOffset)) >> kCauseBits == tag;
}

constexpr int kNumMarks = 8;  // a launch makes two calls at most

/// Marks a call as failed, and tells the host; the first failure of a call wins.
DEVICE_COLD void report_words(const CollectiveCall& call, u64 tag, u32 code, int peer, u64 expected, u64 got,
                              u64 where) {
  u64* words = own_words(call, kRegionFailedOffset);
  const u64 loss = loss_of(tag, cause_of(code, peer));
  u64 before = ld_relaxed_sys(words), found = 0;
#pragma unroll 1
  for (int i = 0; i < kNumMarks; ++i, before = found) {  // again where another block has marked another call
    if (before >> kCauseBits == tag) return;
    found = atom_cas_relaxed_gpu(words, before, loss);
    if (found == before) break;
  }
  if (found != before) return;
  add_report(words + 1, reinterpret_cast<u64*>(call.report), tag, static_cast<u64>(call.op) << 32 | code, peer,
             expected, got, where);
}
DEVICE void report_failure(const CollectiveCall& call, u64 tag, const Failure& f) {
  report_words(call, tag, f.code, f.peer, f.expected, f.got, f.where);
}

/// The word that a rank must have sent for call `of`: this one, `tag`, or the one before.
DEVICE u64 expected_of(const CollectiveCall& call, u64 tag, u64 of, int rank) {
  return of == tag ? word_of(call, tag, call.out_bytes[rank]) : ld_relaxed_sys(expected_at(call, of, rank));
}
/// Whether the word of a rank for call `of` has come and is of another call than ours.
DEVICE bool is_other_call(const CollectiveCall& call, u64 tag, u64 of, int rank) {
  const u64 word = ld_relaxed_sys(joined_at(call.own, of, rank));
  return word >> kFactsBits == of && (word & ~kPlaced) != expected_of(call, tag, of, rank);
}
DEVICE void report_other_call(const CollectiveCall& call, u64 tag, u64 of, int rank) {
  const u64 word = ld_relaxed_sys(joined_at(call.own, of, rank));
  const u64 expected = expected_of(call, tag, of, rank);
  report_failure(call, tag, {kMismatch, rank, expected & kFactsMask, word & kFactsMask, kWaitFacts});
}
/// Why a rank has lost a call, as far as its words say: one of its last two is another than ours. 0: they do not say.
DEVICE_COLD u64 other_call_of_leaver(const CollectiveCall& call, u64 tag, int rank) {
  ld_acquire_sys(own_words(call, kRegionGoneOffset) + rank);  // in front of which its words have come
  if (is_other_call(call, tag, tag, rank)) return tag;
  return is_other_call(call, tag, tag - 1, rank) ? tag - 1 : 0;
}

/// Reports that a rank has lost a call: the cause that it, or another one that has, gives; else that it has given up.
DEVICE_COLD void report_gone(const CollectiveCall& call, u64 tag, u32 active, int rank, u64 where) {
  u32 code = kPeerGaveUp;
  int blamed = rank;
#pragma unroll 1
  for (int n = 0; n < kNumRanks && code == kPeerGaveUp; ++n) {
    const int teller = rank_behind(rank, n);
    if (!is_in(active, teller) || teller == call.rank) continue;
    const u64 cause = ld_relaxed_sys(own_words(call, kRegionGoneOffset) + teller) & kCauseMask;
    const int named = static_cast<int>(cause & ~kOtherCall) - 1;
    if (named < 0 || named >= kNumRanks) continue;  // none, or whatever was written there
    const bool is_other_call = cause & kOtherCall, is_me = named == call.rank;
    if (is_me && !is_other_call) continue;
    code = is_other_call ? kMismatch : kPeerDead;
    blamed = is_me ? teller : named;
  }
  report_words(call, tag, code, blamed, tag, 0, where);
}

constexpr u32 kFailedElsewhere = 0xFF;  // of this call, on this GPU

/// Of some ranks those that have left the group: their packets and words are as final as those of the dead.
DEVICE u32 left_ranks(const CollectiveCall& call, u32 ranks) {
  u32 left = 0;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank)
    if (is_in(ranks, rank) && ld_acquire_sys(own_words(call, kRegionLeftOffset) + rank)) left |= 1u << rank;
  return left;
}

/// Why a wait for `peer` must end, 0 when it may go on: a `FailureCode` with the rank to blame above it, or
/// `kFailedElsewhere`. `start` is when the wait was first looked at.
DEVICE_COLD u32 why_stop(const CollectiveCall& call, u64 tag, u32 active, u32 on_death, int peer, u64 start) {
  const u64 now = global_time_ns();
  const HostState news =
      latest_news(reinterpret_cast<u64*>(call.abort), own_words(call, kRegionNewsOffset), start, now);
  const u32 needed = on_death == kMends ? 1u << peer : active;
  const u32 left = on_death == kFails ? 0 : left_ranks(call, needed);
  const u32 dead = (dead_ranks(news) | left) & needed & ~(1u << call.rank);
  const u32 blamed = static_cast<u32>(dead ? __ffs(static_cast<int>(dead)) - 1 : peer) << 8;
  if (has_failed(call, tag)) return kFailedElsewhere;
  if (dead) return kPeerDead | blamed;
  if (is_aborted(news)) return kAborted | blamed;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (!is_in(active, rank) || rank == call.rank) continue;
    const bool has_gone = ld_acquire_sys(own_words(call, kRegionGoneOffset) + rank);  // its words have come before
    if (is_other_call(call, tag, tag, rank)) return kMismatch | static_cast<u32>(rank) << 8;
    if (has_gone) return kPeerGaveUp | static_cast<u32>(rank) << 8;
  }
  return now - start > call.timeout_ns ? kTimeout | blamed : 0;
}

/// Polls until `poll(got)` is true; `got` is what a report shows beside `want`, `peer` who is missing, both of which a
/// poll may change. False when the wait had to end; what a rank stored before it died or went on counts. A death that
/// is no failure (`OnDeath`) is noted in `s`, without a report.
template <class Poll>
DEVICE bool wait_until(const CollectiveCall& call, const Meeting& s, const int& peer, u64 want, WaitPlace where,
                       Poll poll) {
  u64 start = 0, got = 0;
  u32 stop = 0;
  const auto must_end = [&] {
    if (start == 0) start = global_time_ns();  // most waits end before they have to know the time
    stop = why_stop(call, s.tag, s.active, s.on_death, peer, start);
    return stop != 0;
  };
  if (bounded_wait<kPollsPerGlance, kPollAgain>([&] { return poll(got); }, must_end)) return true;
  if (stop == kFailedElsewhere) return false;
  const FailureCode code = static_cast<FailureCode>(stop & 0xFF);
  const int blamed = static_cast<int>(stop >> 8);
  if (code == kPeerDead && s.on_death != kFails)
    s.has_deaths = 1;
  else if (code == kMismatch)
    report_other_call(call, s.tag, s.tag, blamed);
  else if (code == kPeerGaveUp)
    report_gone(call, s.tag, s.active, blamed, where);
  else
    report_failure(call, s.tag, {code, blamed, want, got, where});
  return false;
}

/// Waits until a word that counts up has reached `want`; acquires.
DEVICE bool wait_count(const CollectiveCall& call, const Meeting& s, int peer, const u64* word, u64 want,
                       WaitPlace where) {
  perhaps_stall(s.tag, call.rank, 2);
  return wait_until(call, s, peer, want, where, [&](u64& got) { return (got = ld_acquire_sys(word)) >= want; });
}

/// Tells nothing but that a rank has begun.
struct NothingToTell {
  DEVICE u64 operator()(int, u64, u64) const { return 0; }
};

/// Reads number and view, tells the others that this rank has begun (`release` also publishes what it did before; so
/// does a `tell(rank, region, tag)`, which stores more words for a rank first, where it returns `kPlaced`), and waits
/// until all have begun the call `behind` calls ago, which must have been the same for them. All threads; false in all
/// of them when the call is lost, as it is when the root (-1: none) takes no part, or somebody has lost one
/// before. In mode "mask" nobody waits for who is dead, and ranks that calls have left out take no part.
template <bool kRelease = false, OnDeath kOnDeath = kFails, class Tell = NothingToTell>
DEVICE bool open_call(const CollectiveCall& call, Meeting& s, u64 behind, const Tell& tell = {}) {
  if (warp_idx() == 0) {
    const int lane = lane_idx();
    const int rank = lane < kNumRanks ? lane : call.rank;
    const u64 peer = ld_relaxed_sys(own_words(call, kRegionPeersOffset) + rank);
    const u64 view = ld_relaxed_sys(own_words(call, kRegionViewOffset));
    const u64 tag = ld_relaxed_sys(own_words(call, kRegionTagsOffset) + blockIdx.x) + 1;
    const u64 gone = ld_relaxed_sys(own_words(call, kRegionGoneOffset) + rank);
    const u64* joined = joined_at(call.own, tag - behind, rank);
    const u64 out = kOnDeath != kFails ? ld_relaxed_sys(own_words(call, kRegionOutOffset)) : 0;
    const bool is_member = lane < kNumRanks && peer != 0 && (rank == call.rank || ((view & ~out) >> rank & 1));
    const bool is_peer = is_member && rank != call.rank;
    const u32 active = __ballot_sync(~0u, is_member);
    const u32 leavers = __ballot_sync(~0u, is_member && gone != 0);
    if (lane < kNumRanks) s.peer[lane] = peer;
    if (is_peer && gone != 0 && !is_in(leavers, call.rank)) {  // else this rank has lost a call, and said so
      if (const u64 of = other_call_of_leaver(call, tag, rank)) report_other_call(call, tag, of, rank);
    }
    __syncwarp();
    if (lane == 0) {
      s.tag = tag;
      s.active = active;
      s.lost_at = kNeverLost;
      s.on_death = kOnDeath;
      s.has_deaths = 0;
      s.is_open = (call.root < 0 || is_in(active, call.root)) && !leavers;
      if (leavers && !is_in(leavers, call.rank))
        report_gone(call, tag, active, __ffs(static_cast<int>(leavers)) - 1, kWaitJoined);
      else if (!leavers && !s.is_open)
        report_failure(call, tag, {kPeerDead, call.root, tag, active, kWaitJoined});
      else if (leavers)  // the host knows
        st_relaxed_sys(own_words(call, kRegionFailedOffset),
                       loss_of(tag, ld_relaxed_sys(own_words(call, kRegionGoneOffset) + call.rank) & kCauseMask));
    }
    __syncwarp();
    if (is_peer && blockIdx.x == 0) {
      perhaps_stall(tag, call.rank, 1);
      st_relaxed_sys(expected_at(call, tag, rank), word_of(call, tag, call.out_bytes[rank]));
      const u64 told = tell(rank, peer, tag);
      u64* word = joined_at(peer, tag, call.rank);
      if (kRelease || told)
        st_release_sys(word, word_of(call, tag, call.in_bytes[rank]) | told);
      else
        st_relaxed_sys(word, word_of(call, tag, call.in_bytes[rank]));
    }
    if (is_peer && !leavers) {
      const u64 least = (tag - behind) << kFactsBits;
      bool is_open = wait_count(call, s, rank, joined, least, behind ? kWaitJoined : kWaitBarrier);
      if (kOnDeath != kFails && !is_open) is_open = !has_failed(call, tag);  // it is dead
      for (u64 of = tag - 1; is_open && of <= tag - behind; ++of) {
        if (!is_other_call(call, tag, of, rank)) continue;
        report_other_call(call, tag, of, rank);
        is_open = false;
      }
      if (!is_open) s.is_open = 0;
    }
  }
  __syncthreads();
  return s.is_open;
}

/// Writes the number of a call to this block's own copy of it, and to those of blocks that the grid does not have. All
/// threads; in mode "mask" the block's own copy is released.
template <bool kIsMasked>
DEVICE void write_number(const CollectiveCall& call, u64 tag) {
  u64* tags = own_words(call, kRegionTagsOffset);
  if (kIsMasked && threadIdx.x == 0) st_release_gpu(tags + blockIdx.x, tag);
  const u32 first = (threadIdx.x + (kIsMasked && threadIdx.x == 0 ? blockDim.x : 0)) * gridDim.x + blockIdx.x;
#pragma unroll 1
  for (u32 i = first; i < kMaxBlocks; i += blockDim.x * gridDim.x) tags[i] = tag;
}

/// Ends the call for this block: the next one has the next number. All threads. A rank that has lost the call says so.
/// In mode "mask" the block's own copy of the number is released: what it has written of the output stands.
template <bool kIsMasked = false>
DEVICE void close_call(const CollectiveCall& call, const Meeting& s) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  const bool is_peer = peer < kNumRanks && peer != call.rank && is_in(s.active, peer);
  const bool is_other = is_peer && blockIdx.x == 0 && s.is_open && is_other_call(call, s.tag, s.tag, peer);
  write_number<kIsMasked>(call, s.tag);
  if (is_peer && is_other) report_other_call(call, s.tag, s.tag, peer);
  if (warp_idx() != 0) return;
  __syncwarp();
  const u64 loss = ld_relaxed_sys(own_words(call, kRegionFailedOffset));
  if (loss >> kCauseBits != s.tag) return;
  if (peer == call.rank) st_relaxed_sys(own_words(call, kRegionGoneOffset) + peer, loss);
  if (!is_peer) return;
  st_relaxed_sys(joined_at(s.peer[peer], s.tag, call.rank), word_of(call, s.tag, call.in_bytes[peer]));
  st_release_sys(reinterpret_cast<u64*>(s.peer[peer] + kRegionGoneOffset) + call.rank, loss);
}
