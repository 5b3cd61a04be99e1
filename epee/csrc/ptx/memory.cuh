// Loads, stores, atomics and fences with a stated order and scope; one instruction each.
//
// `sys` is the scope of all GPUs of the host and its CPU, `gpu` that of one GPU. The emulation maps both to C++
// atomics, which is stronger than asked for.
#pragma once
#include "types.cuh"

#ifdef __CUDACC__

/// Reads a flag; what the writer did before its release is visible afterwards. Pairs with `st_release_sys`.
DEVICE u64 ld_acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

/// Publishes a flag: everything this thread has seen or done before is visible to whoever acquires it.
DEVICE void st_release_sys(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// Reads memory that other GPUs write during this kernel; never served from this SM's L1.
DEVICE u64 ld_relaxed_sys(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE i32 ld_relaxed_sys(const i32* p) {
  i32 v;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float ld_relaxed_sys(const float* p) {
  float v;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

/// Writes a word that the CPU or another GPU may be reading; gives no order.
DEVICE void st_relaxed_sys(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void st_relaxed_sys(i32* p, i32 v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

DEVICE u64 ld_acquire_gpu(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void st_release_gpu(u64* p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// A word in shared memory by which warps of a block hand over work.
DEVICE void st_release_cta(u32* p, u32 v) { asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE u32 ld_acquire_cta(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEVICE void st_release_cta(u64* p, u64 v) { asm volatile("st.release.cta.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 ld_acquire_cta(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.cta.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

/// A counter in shared memory by which warps of a block hand over work: what was done before it is added to is visible
/// to whoever takes it.
DEVICE void red_add_release_cta(u32* p, u32 v) {
  asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 atom_exch_acquire_cta(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.exch.acquire.cta.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

/// Adds and returns the old value; orders the blocks of one grid that meet at the word.
DEVICE u32 atom_add_acq_rel_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

/// Adds and returns the old value, without order: hands out work.
DEVICE u32 atom_add_relaxed_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

/// Writes `v` and returns the old value, so that exactly one thread of the GPU sees the change.
DEVICE u64 atom_exch_relaxed_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.exch.relaxed.gpu.global.b64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

/// Writes `v` if the value is `expected`, and returns the old value.
DEVICE u64 atom_cas_relaxed_gpu(u64* p, u64 expected, u64 v) {
  u64 old;
  asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(v)
               : "memory");
  return old;
}

/// Adds and returns the old value; orders the blocks of one grid that meet at the word.
DEVICE u64 atom_add_acq_rel_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

/// Sets bits, without order; later atomics of this thread at the same word see them.
DEVICE void red_or_relaxed_gpu(u64* p, u64 v) {
  asm volatile("red.or.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// Raises a word to `v` if it is lower, without order.
DEVICE void red_max_relaxed_gpu(u64* p, u64 v) {
  asm volatile("red.max.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

/// Sets bits of a word in shared memory, without order.
DEVICE void red_or_shared(u32* p, u32 v) { atomicOr(p, v); }

/// Sixteen bytes at once, without order: whoever reads them so sees all of a store or nothing of it.
DEVICE void st_relaxed_sys_128(void* p, const Vec16& v) {
  asm volatile(
      "{\n.reg .b128 q;\n.reg .b64 low, high;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
      "mov.b128 q, {low, high};\nst.relaxed.sys.global.b128 [%0], q;\n}" ::"l"(p),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
      : "memory");
}
DEVICE Vec16 ld_relaxed_sys_128(const void* p) {
  Vec16 v;
  asm volatile(
      "{\n.reg .b128 q;\n.reg .b64 low, high;\nld.relaxed.sys.global.b128 q, [%4];\nmov.b128 {low, high}, q;\n"
      "mov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(p)
      : "memory");
  return v;
}

/// Adds to a word in shared memory, without order.
DEVICE void red_add_shared(i32* p, i32 v) { atomicAdd(p, v); }

DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

/// Orders ordinary accesses before bulk copies (the async proxy) to the same memory, in every state space.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
/// The same for shared memory alone: it waits for no loads and stores of other memory.
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Sixteen bytes that are read once.
DEVICE Vec16 ld_vec16(const void* p) {
  Vec16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void st_vec16(void* p, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
               "r"(v.word[3])
               : "memory");
}

/// Nanoseconds of a clock that all SMs share; its step may be as coarse as a microsecond.
DEVICE u64 global_time_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

/// Waits until the kernels before this one in the stream have ended, their writes included. First thing in every
/// kernel: it may have been launched early, to have its blocks in place.
DEVICE void wait_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Lets the next kernel of the stream take its place beside this one; it then waits as above.
DEVICE void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/// Leaves the issue slots to other warps for about this long.
DEVICE void sleep_ns(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

/// Does nothing for this long, however long that is. For stress tests.
DEVICE void stall_ns(u32 ns) {
  for (const u64 start = global_time_ns(); global_time_ns() - start < ns;) sleep_ns(500);
}

#else

DEVICE u64 ld_acquire_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void st_release_sys(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE u64 ld_relaxed_sys(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE i32 ld_relaxed_sys(const i32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE float ld_relaxed_sys(const float* p) {
  float v;
  __atomic_load(p, &v, __ATOMIC_RELAXED);
  return v;
}
DEVICE void st_relaxed_sys(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE void st_relaxed_sys(i32* p, i32 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
DEVICE u64 ld_acquire_gpu(const u64* p) { return ld_acquire_sys(p); }
DEVICE void st_release_gpu(u64* p, u64 v) { st_release_sys(p, v); }
DEVICE void st_release_cta(u32* p, u32 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
DEVICE u32 ld_acquire_cta(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
DEVICE void st_release_cta(u64* p, u64 v) { st_release_sys(p, v); }
DEVICE u64 ld_acquire_cta(const u64* p) { return ld_acquire_sys(p); }
DEVICE void red_add_release_cta(u32* p, u32 v) { __atomic_fetch_add(p, v, __ATOMIC_RELEASE); }
DEVICE u32 atom_exch_acquire_cta(u32* p, u32 v) { return __atomic_exchange_n(p, v, __ATOMIC_ACQUIRE); }
DEVICE u32 atom_add_acq_rel_gpu(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEVICE u32 atom_add_relaxed_gpu(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
DEVICE u64 atom_exch_relaxed_gpu(u64* p, u64 v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
DEVICE u64 atom_cas_relaxed_gpu(u64* p, u64 expected, u64 v) {
  __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
DEVICE u64 atom_add_acq_rel_gpu(u64* p, u64 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
DEVICE void red_or_relaxed_gpu(u64* p, u64 v) { __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }
DEVICE void red_max_relaxed_gpu(u64* p, u64 v) {
  for (u64 old = *p; old < v && !__atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);) {}
}
DEVICE void red_or_shared(u32* p, u32 v) { *p |= v; }
// x86 moves an aligned vector register at once (all processors with AVX). In assembly, as g++ takes the intrinsics
// apart: a word is then older than the mark that is read after it.
DEVICE void st_relaxed_sys_128(void* p, const Vec16& v) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(&v));
  asm volatile("movdqa %1, %0" : "=m"(*static_cast<__m128i*>(p)) : "x"(all) : "memory");
}
DEVICE Vec16 ld_relaxed_sys_128(const void* p) {
  Vec16 v;
  __m128i all;
  asm volatile("movdqa %1, %0" : "=x"(all) : "m"(*static_cast<const __m128i*>(p)) : "memory");
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&v), all);
  return v;
}
DEVICE void red_add_shared(i32* p, i32 v) { *p += v; }
DEVICE void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
DEVICE void fence_proxy_async() {}
DEVICE void fence_proxy_async_shared() {}
DEVICE Vec16 ld_vec16(const void* p) {
  Vec16 v;
  memcpy(&v, p, 16);
  return v;
}
DEVICE void st_vec16(void* p, const Vec16& v) { memcpy(p, &v, 16); }
DEVICE u64 global_time_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<u64>(t.tv_sec) * 1000000000ull + static_cast<u64>(t.tv_nsec);
}
DEVICE void wait_previous_kernel() {}
DEVICE void allow_next_kernel() {}
DEVICE void sleep_ns(u32) { emulation::yield(); }
DEVICE void stall_ns(u32 ns) {
  const timespec pause = {0, static_cast<long>(ns / 16)};
  nanosleep(&pause, nullptr);  // the whole block stands still: its fibers share the thread, and each calls this
}

#endif
