// All ranks of a buffer meet on the device. One block; thread r signals and awaits rank r.
//
// `barrier` in a rank's control block has a word for each peer: the tag of the last barrier that the peer has reached,
// and which calls have failed there before. A barrier is a call like any other and all ranks must make it. Who
// dispatches or combines instead is told in the words that those wait for, and tells it in the word of refusals, which
// a dispatch and a combine send anyway. A peer may have reached a later barrier already; then that word says whether it
// has made this one. Then the word that it has sent to those who combine, which eight later calls leave alone, says
// which calls had failed before this one.
#pragma once
#include "../common/call.cuh"

enum OtherOp : int { kDispatchOp = 1, kCombineOp };  // `gpu/params.OP_NAMES`

/// Whether rank `peer` has said that it makes another call than this barrier; reports it.
DEVICE bool makes_other_call(const Call& call, u64 tag, int peer) {
  const u64 word = ld_relaxed_sys(counts_row(call, call.rank, peer, tag) + kRefusal);
  const u64 code = word & 0xFFFFFFFF;
  if (word >> 32 != (tag & 0xFFFFFFFF) || code == kBarrierCode) return false;
  const u64 op = code == kOtherCallCode ? kCombineOp : kDispatchOp;
  report_failure(call, tag, {kRefused, peer, op, code ? code : kOtherCallCode, 6});
  return true;
}

/// Waits until rank `peer` is here; afterwards this thread sees what the peer's stream had done before its barrier.
/// False, with a report, when the peer does not come or has not seen the same calls fail.
DEVICE bool wait_arrival(const Call& call, u64 tag, u64 mine, int peer) {
  const u64* word = local_words(call, kControlBarrierOffset) + peer;
  const u64 start = global_time_ns();
  u64 got;
  const bool is_here = bounded_wait<kPollsPerLook>(
      [&] { return has_reached(got = ld_acquire_sys(word), tag); },
      [&] { return makes_other_call(call, tag, peer) || must_stop(call, tag, start, peer, tag, got >> 16, 6); });
  if (!is_here || got == mine) return is_here;
  u64 theirs = got & 0xFFFF;
  if (got >> 16 != mine >> 16) {  // it is in a later call; its word of this one is remembered
    const u64 word = ld_relaxed_sys(call_word(call, call.rank, kControlCombineReadyOffset, peer, tag));
    if (word >> 32 != (tag & 0xFFFFFFFF) || (word & 0xFFFF) != (kRefusedSlot << 8 | kBarrierCode)) {
      if (!makes_other_call(call, tag, peer)) report_failure(call, tag, {kRefused, peer, 0, kGaveUpCode, 6});
      return false;
    }
    theirs = word >> 16 & 0xFFFF;
    if (theirs == (mine & 0xFFFF)) return true;
  }
  report_failure(call, tag, {kMismatch, peer, mine & 0xFFFF, theirs, kLosses});
  return false;
}

namespace epee {

__global__ void __launch_bounds__(32, 1) barrier(const __grid_constant__ BarrierParams p) {
  wait_previous_kernel();
  const u64 tag = current_tag(p.call);
  const int peer = static_cast<int>(threadIdx.x);
  perhaps_stall(tag, p.call.rank, 3);
  if (peer < kNumRanks && is_in(active_ranks(p.call), peer)) {
    const u64 word = barrier_word(tag, losses_of(p.call));
    st_release_sys(control_words(p.call, peer, kControlBarrierOffset) + p.call.rank, word);
    // behind the word that everybody waits for: these are for a peer that makes another call
    st_relaxed_sys(counts_row(p.call, peer, p.call.rank, tag) + kRefusal, tag << 32 | kBarrierCode);
    st_relaxed_sys(call_word(p.call, peer, kControlCombineReadyOffset, p.call.rank, tag),
                   tag << 32 | (word & 0xFFFF) << 16 | kRefusedSlot << 8 | kBarrierCode);
    wait_arrival(p.call, tag, word, peer);
  }
  finish_call(p.call, tag);
}

}  // namespace epee
