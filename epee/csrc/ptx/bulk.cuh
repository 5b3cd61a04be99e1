// One-dimensional bulk copies (the copy engine of an SM) and the mbarriers on which their loads complete.
//
// Addresses and sizes are multiples of 16 bytes. Loads go global -> shared and complete on an mbarrier; stores go
// shared -> global, are counted in the issuing thread's bulk groups, and are visible to it once its group is done.
#pragma once
#include "types.cuh"

#ifdef __CUDACC__

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

/// Prepares a barrier whose phases complete after `num_arrivals` arrivals and all announced bytes.
DEVICE void mbarrier_init(u64* b, u32 num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(num_arrivals) : "memory");
}

/// Makes initialised barriers known to the copy engine; once by the initialising thread, before a block barrier.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}

/// Arrives and announces `num_bytes` that loads will deliver in this phase.
DEVICE void mbarrier_arrive_expect(u64* b, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(num_bytes)
               : "memory");
}

/// Waits for a bounded time set by the hardware; true when the phase with this parity is complete.
DEVICE bool mbarrier_try_wait(u64* b, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(shared_address(b)), "r"(parity)
               : "memory");
  return done != 0;
}

DEVICE void bulk_load(void* shared, const void* global, u32 num_bytes, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(num_bytes), "r"(shared_address(b))
               : "memory");
}

DEVICE void bulk_store(void* global, const void* shared, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(num_bytes)
               : "memory");
}

/// Closes the group of the stores issued since the last commit.
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Until at most `kPending` of this thread's groups still read shared memory, so that older stages may be reused.
template <int kPending>
DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

/// Until at most `kPending` of this thread's groups are incomplete; the others' bytes lie at their destinations.
template <int kPending>
DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

#else

// The emulated barrier counts as the real one does; copies complete at once, or rather in the call.
struct EmulatedBarrier {
  int bytes;      // announced and not yet delivered; negative while loads run ahead of the announcement
  short missing;  // arrivals that this phase still needs
  char arrivals;  // arrivals per phase
  char phase;     // number of completed phases, modulo 2
};
static_assert(sizeof(EmulatedBarrier) == sizeof(u64), "an mbarrier has eight bytes");

DEVICE void emulated_settle(EmulatedBarrier* b) {
  if (b->missing || b->bytes) return;
  b->missing = b->arrivals;
  b->phase ^= 1;
}
DEVICE void mbarrier_init(u64* b, u32 num_arrivals) {
  *reinterpret_cast<EmulatedBarrier*>(b) = {0, static_cast<short>(num_arrivals), static_cast<char>(num_arrivals), 0};
}
DEVICE void fence_mbarrier_init() {}
DEVICE void mbarrier_arrive_expect(u64* b, u32 num_bytes) {
  auto* e = reinterpret_cast<EmulatedBarrier*>(b);
  e->bytes += static_cast<int>(num_bytes);
  --e->missing;
  emulated_settle(e);
}
DEVICE void mbarrier_arrive(u64* b) { mbarrier_arrive_expect(b, 0); }
DEVICE bool mbarrier_try_wait(u64* b, u32 parity) {
  return reinterpret_cast<EmulatedBarrier*>(b)->phase != static_cast<char>(parity);
}
DEVICE void bulk_load(void* shared, const void* global, u32 num_bytes, u64* b) {
  memcpy(shared, global, num_bytes);
  auto* e = reinterpret_cast<EmulatedBarrier*>(b);
  e->bytes -= static_cast<int>(num_bytes);
  emulated_settle(e);
}
DEVICE void bulk_store(void* global, const void* shared, u32 num_bytes) { memcpy(global, shared, num_bytes); }
DEVICE void bulk_commit() {}
template <int kPending>
DEVICE void bulk_wait_read() {}
template <int kPending>
DEVICE void bulk_wait() {
  __atomic_thread_fence(__ATOMIC_RELEASE);
}

#endif
