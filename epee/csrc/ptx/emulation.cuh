// CUDA's execution model on a CPU: a block is an OS thread, a CUDA thread is a fiber of it, `__shared__` is
// thread-local, `__syncthreads` and the warp functions are fiber barriers.
//
// Used by tests only: it runs the kernels' own sources in real rank processes and finds errors of protocol and of
// indexing. It cannot find memory-model errors, missing proxy fences or blocks that are not co-resident.
#pragma once
#include <emmintrin.h>
#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

#include <functional>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static thread_local

/// Tests set these: microseconds that a thread stands still each time it comes to a place of `common/stall.cuh`; entry
/// 0 is for all blocks but the first, before they begin. A library has its own.
extern "C" {
unsigned emulated_pause_us[16];
}

namespace emulation {

inline void pause(unsigned place) {
  const unsigned us = emulated_pause_us[place % 16];
  const timespec time = {us / 1000000, static_cast<long>(us % 1000000) * 1000};
  if (us) nanosleep(&time, nullptr);
}

struct Dim3 {
  unsigned x, y, z;
};

/// Counts arrivals; `phase` tells the waiting that all have come. One OS thread runs all fibers of a block, so plain
/// integers do.
struct Barrier {
  unsigned count = 0, phase = 0;
};

/// What the lanes of a warp share: their barrier, and a word each for shuffles and votes.
struct Warp {
  Barrier barrier;
  uint64_t slot[32];
};

/// A CUDA thread.
struct Fiber {
  ucontext_t context;
  Dim3 index;
  bool done;
  char* stack;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];  // 0 is __syncthreads, the others are named
  ucontext_t scheduler;
  unsigned current = 0, num_threads = 0;
};

constexpr size_t kStackBytes = 64 << 10;

inline thread_local Block* block;
inline thread_local Dim3 block_idx, block_dim, grid_dim;
inline thread_local uint8_t* dynamic_shared;
inline thread_local const std::function<void()>* body;

inline Fiber& self() { return block->fibers[block->current]; }

/// Lets the block's other fibers run. Every loop that waits for another thread must come here, or it waits for ever.
inline void yield() { swapcontext(&self().context, &block->scheduler); }

inline void wait_at(Barrier& barrier, unsigned num_threads) {
  const unsigned phase = barrier.phase;
  if (++barrier.count == num_threads) {
    barrier.count = 0;
    ++barrier.phase;
  } else {
    while (barrier.phase == phase) yield();
  }
}

inline void fiber_main() {
  (*body)();
  self().done = true;
  yield();
}

/// Runs all fibers of a block in turn until each has ended.
inline void run_block(unsigned index, unsigned grid, unsigned num_threads, size_t shared_bytes) {
  Block mine;
  mine.num_threads = num_threads;
  mine.fibers.resize(num_threads);
  mine.warps.resize((num_threads + 31) / 32);
  block = &mine;
  block_idx = {index, 0, 0};
  block_dim = {num_threads, 1, 1};
  grid_dim = {grid, 1, 1};
  const size_t padded_bytes = (shared_bytes + 127) / 128 * 128 + 128;
  dynamic_shared = static_cast<uint8_t*>(aligned_alloc(128, padded_bytes));
  memset(dynamic_shared, 0xA5, padded_bytes);  // shared memory holds garbage at first, as on the GPU
  for (unsigned t = 0; t < num_threads; ++t) {
    Fiber& fiber = mine.fibers[t];
    fiber.index = {t, 0, 0};
    fiber.done = false;
    fiber.stack = static_cast<char*>(malloc(kStackBytes));
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  for (unsigned left = num_threads; left;) {
    for (unsigned t = 0; t < num_threads; ++t) {
      Fiber& fiber = mine.fibers[t];
      if (fiber.done) continue;
      mine.current = t;
      swapcontext(&mine.scheduler, &fiber.context);
      if (fiber.done) {
        --left;
        free(fiber.stack);
      }
    }
    sched_yield();  // the fibers may all be waiting for another block or another process
  }
  free(dynamic_shared);
}

/// Runs a grid to its end: all blocks at once, as if the GPU had room for them.
template <class F>
void launch(unsigned grid, unsigned num_threads, size_t shared_bytes, F kernel) {
  const std::function<void()> call = kernel;
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < grid; ++index)
    threads.emplace_back([&call, index, grid, num_threads, shared_bytes] {
      if (index) pause(0);
      body = &call;
      run_block(index, grid, num_threads, shared_bytes);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace emulation

#define threadIdx (emulation::self().index)
#define blockIdx (emulation::block_idx)
#define blockDim (emulation::block_dim)
#define gridDim (emulation::grid_dim)

inline emulation::Warp& emulated_warp() { return emulation::block->warps[threadIdx.x / 32]; }

inline void __syncthreads() { emulation::wait_at(emulation::block->barriers[0], blockDim.x); }

inline void __syncwarp(unsigned = ~0u) { emulation::wait_at(emulated_warp().barrier, 32); }

// The warp functions ignore their mask: the kernels call them with all lanes.
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  emulation::Warp& warp = emulated_warp();
  memcpy(&warp.slot[threadIdx.x % 32], &value, sizeof value);
  __syncwarp();
  T result;
  memcpy(&result, &warp.slot[source & 31], sizeof result);
  __syncwarp();
  return result;
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ lanes);
}

inline unsigned __ballot_sync(unsigned, bool predicate) {
  emulation::Warp& warp = emulated_warp();
  warp.slot[threadIdx.x % 32] = predicate;
  __syncwarp();
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= static_cast<unsigned>(warp.slot[lane] & 1) << lane;
  __syncwarp();
  return result;
}

inline unsigned __match_any_sync(unsigned, int value) {
  emulation::Warp& warp = emulated_warp();
  warp.slot[threadIdx.x % 32] = static_cast<unsigned>(value);
  __syncwarp();
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane)
    result |= static_cast<unsigned>(warp.slot[lane] == static_cast<unsigned>(value)) << lane;
  __syncwarp();
  return result;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __fadd_rn(float a, float b) {
  volatile float result = a + b;  // volatile: g++ must not contract the caller's product and this sum
  return result;
}
inline float __fmul_rn(float a, float b) {
  volatile float result = a * b;
  return result;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, 4);
  return bits;
}

#define __global__
