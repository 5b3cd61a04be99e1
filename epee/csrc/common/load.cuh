// Bulk loads with a bounded wait.
#pragma once
#include "../ptx/bulk.cuh"
#include "call.cuh"

/// What follows when a bulk load takes longer than a try: a wait with the clock. It always ends in practice; the bound
/// is there because every wait has one.
DEVICE_COLD bool wait_load_timed(const Call& call, u64 tag, u64* barrier, u32 parity) {
  if (bounded_wait_here(call.timeout_ns + kGridTimeoutNs, [&] { return mbarrier_try_wait(barrier, parity); }))
    return true;
  report_failure(call, tag, {kTimeout, call.rank, 0, 0, 9});
  return false;
}

/// A wait for a bulk load of this SM. False after a report. The first try, which the hardware itself draws out, looks
/// at no clock: that one is far away, and most rows are there by then.
DEVICE bool wait_load(const Call& call, u64 tag, u64* barrier, u32 parity) {
  return mbarrier_try_wait(barrier, parity) || wait_load_timed(call, tag, barrier, parity);
}

/// Makes the mbarriers of the block. All threads.
DEVICE void init_barriers(u64* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) mbarrier_init(barriers + i, 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();
}
