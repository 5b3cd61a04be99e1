// Barriers of some of a block's warps.
#pragma once
#include "types.cuh"

#ifdef __CUDACC__

/// Waits until `num_threads` threads, whole warps, have come to barrier `id` (1 ... 15; 0 is `__syncthreads`); what
/// they did to the memory of the block and of the GPU before is visible to all of them after.
DEVICE void barrier_sync(int id, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

#else

DEVICE void barrier_sync(int id, int num_threads) {
  emulation::wait_at(emulation::block->barriers[id], static_cast<unsigned>(num_threads));
}

#endif
