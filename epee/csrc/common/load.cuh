// Bulk loads with a bounded wait.
#pragma once
#include "../ptx/bulk.cuh"
#include "call.cuh"

/// A wait for a bulk load of this SM. It always ends in practice; the bound is there because every wait has one.
/// False after a report.
DEVICE bool wait_load(const Call& call, u64 tag, u64* barrier, u32 parity) {
  const u64 start = global_time_ns();
  while (!mbarrier_try_wait(barrier, parity)) {
    if (global_time_ns() - start > call.timeout_ns + kGridTimeoutNs) {
      report_failure(call, tag, {kTimeout, call.rank, 0, 0, 9});
      return false;
    }
  }
  return true;
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
