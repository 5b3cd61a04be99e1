// Blocks of one cluster: they run at the same time and read each other's shared memory.
//
// The emulation takes a whole grid for one cluster.
#pragma once
#include "types.cuh"

#ifdef __CUDACC__

/// All threads of all blocks of the cluster meet; memory written before is visible after, shared memory included. All
/// threads.
DEVICE void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/// The same without order of memory, as the last thing: no block ends, and with it its shared memory, while others
/// read.
DEVICE void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/// Reads what block `block` of the cluster has at the place that `p` has in this block's shared memory. Ordered by
/// `cluster_barrier`; `cluster_leave` comes behind.
DEVICE i32 ld_shared_of(const i32* p, u32 block) {
  i32 v;
  asm volatile("{\n.reg .u32 at;\nmapa.shared::cluster.u32 at, %1, %2;\nld.shared::cluster.s32 %0, [at];\n}"
               : "=r"(v)
               : "r"(static_cast<u32>(__cvta_generic_to_shared(p))), "r"(block)
               : "memory");
  return v;
}

#else

DEVICE void cluster_barrier() { emulation::wait_for_grid(); }
DEVICE void cluster_leave() { emulation::wait_for_grid(); }
DEVICE i32 ld_shared_of(const i32* p, u32 block) {
  const u8* there = emulation::shared_of(block) + (reinterpret_cast<const u8*>(p) - dynamic_shared());
  return *reinterpret_cast<const i32*>(there);
}

#endif
