// Collectives of mode "mask", for rows above packet size: tries and votes. No host waits.
//
// No rank keeps such a row where others find it, so a kernel that loses a rank cannot end the call over those who are
// left, as smaller ones do (`settle.cuh`). But nothing that a rank sends is lost before the call ends: rows are where
// they were, or in a copy that the first try has made of what it writes over (sums in place, `slots.cuh`). So what has
// lost a rank is made again without it, from the start. One call of the group is several here, with numbers of their
// own:
//
//   n      try    the rows go through slots, as in `pipeline.cuh`. A rank whose part is not whole, because a wait has
//                 met a death, writes the number to its `ballot`
//   n + 1  vote   a small call of mode "mask" (`mended.cuh`): each sends its ballot to all
//   n + 2  try    if the vote wants it, and so on
//
// Verdict, of a vote at n + 1: well, if no ballot in it has the number n; else again. Why all survivors find the same,
// and it is right:
//   - who is in a vote, and with which ballot, all survivors of it find alike: that is what a small call promises.
//   - a rank that lives and says nothing of n has all rows of all who took part in n, and its own are with all who want
//     them. So if no living rank says n, all have the rows of the same ranks, those of d included which has died
//     meanwhile, whether it voted or not: d counts, alike. It is out of the calls behind this one.
//   - else all make it again. Who took part in n is known alike (the view without `out`). Who died in front of its vote
//     is out by the vote, on all; who died behind it, by the next one: so each vote in vain costs a rank, or has heard
//     the last word of one, and there are at most 2 * ranks.
// A rank whose try has met a death does not end the tries of others: they hear of that death as well. A try is a call
// like those of mode "raise" but for deaths: it is begun by all, slots are written behind `joined` of its own number,
// so what is left of an earlier try is not met.
//
// Words, all local:
//   ballot [2]        the last try that this rank has lost; who took part in the first one of this call
//   ballots[rank][2]  those that have come in the last vote
//
// Places of the output for ranks that were in the first try and are not in the last one are filled with zeros, as parts
// of their rows may stand there. Who is in the result is written to `got` of the last vote's number.
//
// A failure (time, another call, a lost root) ends a try as a call of mode "raise": it is told to all (`gone`), so the
// vote fails on all, and `mend` does nothing more.
//
// The first try is a kernel, the first vote and all that may follow another one, `mend`, which ends behind that vote
// where the verdict is "well". Its blocks meet at the copies of the number (`tags`): the first block votes when all
// others have ended the try; they take the vote's number for theirs, and wait until its copy has it, too.
#include "mended.cuh"
#include "../slots.cuh"

CONSTANT int kMostTries = 2 * kNumRanks;
constexpr u64 kVoteTimeouts = 64;  // of one wait: what a vote takes at most, with all that it may have to mend
enum Verdict : u32 { kWell = 0, kAgain, kLost };

DEVICE u64* ballot_of(const CollectiveCall& call) { return own_words(call, kRegionBallotOffset); }

/// What the last vote says. One thread, behind it.
DEVICE Verdict verdict_of(const CollectiveCall& call, u64 vote) {
  if (has_failed(call, vote)) return kLost;
  bool is_well = true;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank)
    is_well = is_well && ld_relaxed_sys(own_words(call, kRegionBallotsOffset) + rank * 2) != vote - 1;
  return is_well ? kWell : kAgain;
}

/// Fills the places of some ranks with zeros; all threads of all blocks, a part each.
DEVICE void clear_places(const CollectiveParams& p, u32 ranks) {
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (!is_in(ranks, rank) || p.outputs[rank] == 0) continue;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x * 16;
#pragma unroll 1
    for (i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < p.call.out_bytes[rank];
         at += step)
      store_user(reinterpret_cast<u8*>(p.outputs[rank]), at, p.call.out_bytes[rank], Vec16{});
  }
}

/// A try, up to its end; `begun` took part in the first one, which may save rows. All threads.
template <bool kIsPlaced, bool kSaves>
DEVICE void make_try(const MaskedParams& m, Meeting& s, Cut& c, Outbox* box, u32 begun) {
  const CollectiveParams& p = m.base;
  const bool is_open = open_call<false, kTries>(p.call, s, 0);
  const bool is_whole = is_open && !s.has_deaths;
  __syncthreads();  // all have looked before a wait may meet a death
  if (is_whole && kIsPlaced && is_in(static_cast<u32>(p.call.takers), p.call.rank))
    clear_places(p, lost_of(m, begun & ~s.active, s.active));
  if (is_whole || (kSaves && m.saved)) move_in_chunks<kIsPlaced, kSaves>(p, s, c, box, m.saved, !is_whole);
  __syncthreads();
  if (threadIdx.x == 0 && (!is_open || s.has_deaths || s.lost_at != kNeverLost))
    st_relaxed_sys(ballot_of(p.call), s.tag);
}

template <bool kIsPlaced, bool kSaves = false>
DEVICE void try_first(const MaskedParams& m) {
  __shared__ Meeting s;
  __shared__ Cut c;
  __shared__ Outbox box;
  open_outbox(box);
  wait_previous_kernel();
  make_try<kIsPlaced, kSaves>(m, s, c, &box, 0);
  if (blockIdx.x == 0 && threadIdx.x == 0) st_relaxed_sys(ballot_of(m.base.call) + 1, s.active);
  close_call<true>(m.base.call, s);
}

/// Waits until the first block has voted. All threads of another one.
DEVICE void await_vote(const CollectiveCall& call, u64 vote) {
  write_number<true>(call, vote);
  const u64* first = own_words(call, kRegionTagsOffset);
  if (threadIdx.x != 0) return;
  if (!bounded_wait_here(kVoteTimeouts * call.timeout_ns, [&] { return ld_acquire_gpu(first) >= vote; }))
    report_failure(call, vote, {kTimeout, call.rank, vote, ld_relaxed_sys(first), kWaitBlocks});
}

template <bool kIsPlaced>
DEVICE void mend(const MendParams& q) {
  __shared__ Meeting s;
  __shared__ Cut c;
  __shared__ Settling z;
  __shared__ u32 verdict;
  const MaskedParams& m = q.again;
  const CollectiveCall& call = m.base.call;
  wait_previous_kernel();
  u64 vote = ld_relaxed_sys(own_words(call, kRegionTagsOffset) + blockIdx.x) + 1;
  const u32 begun = static_cast<u32>(ld_relaxed_sys(ballot_of(call) + 1));
  u32 active = begun;
  __syncthreads();  // before the block's copy of the number moves
#pragma unroll 1
  for (int num_tries = 1;; ++num_tries) {
    if (blockIdx.x == 0)
      make_masked<true>(q.vote, s, z);
    else
      await_vote(call, vote);
    __syncthreads();
    if (threadIdx.x == 0) verdict = verdict_of(call, vote);
    __syncthreads();
    if (verdict != kAgain || num_tries == kMostTries) break;
    make_try<kIsPlaced, false>(m, s, c, nullptr, begun);
    active = s.active;
    vote = s.tag + 1;
    if (blockIdx.x == 0) await_blocks(m, s);  // what they have lost stands in the ballot then
    close_call<true>(call, s);
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  if (verdict == kWell) tell_counted(m, vote, active);
  if (verdict == kAgain) report_failure(call, vote, {kTimeout, call.rank, kMostTries, vote, kWaitBlocks});
}

namespace epee {

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_try_reduced(const __grid_constant__ MaskedParams m) {
  try_first<false>(m);
}

/// A sum in place. One of its own, as the code that saves costs others some percent.
__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_try_saving(const __grid_constant__ MaskedParams m) {
  try_first<false, true>(m);
}

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_try_placed(const __grid_constant__ MaskedParams m) {
  try_first<true>(m);
}

__global__ void __launch_bounds__(kMendThreads, 1) collective_mend_reduced(const __grid_constant__ MendParams q) {
  mend<false>(q);
}

__global__ void __launch_bounds__(kMendThreads, 1) collective_mend_placed(const __grid_constant__ MendParams q) {
  mend<true>(q);
}

}  // namespace epee
