// CUDA's execution model on a CPU: a block is an OS thread, a CUDA thread is a fiber of it, `__shared__` is
// thread-local, `__syncthreads` and the warp functions are fiber barriers.
//
// Used by tests only: it runs the kernels' own sources in real rank processes and finds errors of protocol and of
// indexing. It cannot find memory-model errors, missing proxy fences or blocks that are not co-resident.
// x86-64 only. Headers of C++ are left out: they took longer to compile than a kernel.
#pragma once
#include <emmintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define __shared__ static thread_local

/// Tests set these: microseconds that a thread stands still each time it comes to a place of `common/stall.cuh`; entry
/// 0 is for all blocks but the first, before they begin. And after how many of such comings, to one place or to any
/// (0), the process is killed; 0: never. A library has its own.
extern "C" {
unsigned emulated_pause_us[16];
unsigned emulated_die_in, emulated_die_at;
}

namespace emulation {

inline void pause(unsigned place) {
  const bool is_there = emulated_die_in && (emulated_die_at == 0 || emulated_die_at == place);
  if (is_there && __atomic_sub_fetch(&emulated_die_in, 1, __ATOMIC_RELAXED) == 0) kill(getpid(), SIGKILL);
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

/// A CUDA thread; `stack_pointer` is where it goes on.
struct Fiber {
  void* stack_pointer;
  Dim3 index;
  bool done;
};

/// What all blocks of a launch share.
struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  unsigned grid, num_threads;
  size_t shared_bytes;
  unsigned num_arrived, phase;  // of `wait_for_grid`
};

struct Block {
  Launch* launch;
  unsigned index;
  uint8_t* shared;  // its `dynamic_shared`, for the other blocks
  Fiber* fibers;
  Warp* warps;
  Barrier barriers[16];  // 0 is __syncthreads, the others are named
  void* scheduler;
  unsigned current;
  bool has_moved;  // a wait of a fiber has ended since the block's fibers had their last turn
};

constexpr size_t kStackBytes = 64 << 10;

inline thread_local Block* block;
inline thread_local Dim3 block_idx, block_dim, grid_dim;
inline thread_local uint8_t* dynamic_shared;

inline Fiber& self() { return block->fibers[block->current]; }

/// Saves where the caller is in `from` and goes on at `to`. `swapcontext` would enter the kernel each time.
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.pushsection .text
.local emulated_switch
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulated_switch, . - emulated_switch
.popsection
)");

/// Lets the block's other fibers run. Every loop that waits for another thread must come here, or it waits for ever.
inline void yield() { emulated_switch(&self().stack_pointer, block->scheduler); }

inline void note_move() { block->has_moved = true; }

inline void wait_at(Barrier& barrier, unsigned num_threads) {
  const unsigned phase = barrier.phase;
  if (++barrier.count == num_threads) {
    barrier.count = 0;
    ++barrier.phase;
    note_move();
  } else {
    while (barrier.phase == phase) yield();
  }
}

/// All threads of all blocks meet.
inline void wait_for_grid() {
  Launch& launch = *block->launch;
  const unsigned phase = __atomic_load_n(&launch.phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&launch.num_arrived, 1, __ATOMIC_ACQ_REL) == launch.grid * launch.num_threads) {
    launch.num_arrived = 0;
    __atomic_store_n(&launch.phase, phase + 1, __ATOMIC_RELEASE);
  } else {
    while (__atomic_load_n(&launch.phase, __ATOMIC_ACQUIRE) == phase) yield();
  }
}

/// The dynamic shared memory of another block; to be had between two `wait_for_grid`.
inline const uint8_t* shared_of(unsigned index) { return (block - block->index + index)->shared; }

inline void fiber_main() {
  block->launch->kernel(block->launch->params);
  self().done = true;
  yield();
}

/// Returns a stack pointer from which `emulated_switch` enters `fiber_main`: six registers, its address, and a word
/// that aligns the stack as a call would.
inline void* first_frame(char* stack) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(fiber_main);
  memset(top - 8, 0, 6 * sizeof(void*));
  return top - 8;
}

/// Memory of blocks that have ended, for the next ones: stacks of fresh pages would fault with every launch.
struct Slab {
  Slab* next;
  unsigned num_threads;
};
inline Slab* free_slabs;
inline pthread_mutex_t slabs_lock = PTHREAD_MUTEX_INITIALIZER;

inline Slab* take_slab(unsigned num_threads) {
  pthread_mutex_lock(&slabs_lock);
  Slab** at = &free_slabs;
  while (*at && (*at)->num_threads != num_threads) at = &(*at)->next;
  Slab* found = *at;
  if (found) *at = found->next;
  pthread_mutex_unlock(&slabs_lock);
  if (found) return found;
  found = static_cast<Slab*>(aligned_alloc(4096, 4096 + num_threads * kStackBytes));
  found->num_threads = num_threads;
  return found;
}

inline void give_slab(Slab* slab) {
  pthread_mutex_lock(&slabs_lock);
  slab->next = free_slabs;
  free_slabs = slab;
  pthread_mutex_unlock(&slabs_lock);
}

constexpr unsigned kIdleTurns = 16;  // in a row, before a block sleeps between two of them
constexpr unsigned kShortestNs = 20000, kMostDoublings = 6;

/// After a turn of all fibers. Where none has moved for some time all wait for another block or process, and the block
/// sleeps, twice as long after each `kIdleTurns`. A thread that yields gives up its whole slice: beside eight that
/// compute on two cores it had 200 turns a second. And threads that wake every 20 us take the processor from those that
/// they wait for: fifteen ranks that waited let a call of 50 ms of the sixteenth take 2.5 s.
inline void rest(unsigned num_idle) {
  if (num_idle < kIdleTurns) {
    if (num_idle) sched_yield();
    return;
  }
  const unsigned doublings = num_idle / kIdleTurns - 1;
  const timespec time = {0, kShortestNs << (doublings < kMostDoublings ? doublings : kMostDoublings)};
  nanosleep(&time, nullptr);
}

/// Runs all fibers of a block in turn until each has ended. A thread's main function.
inline void* run_block(void* argument) {
  block = static_cast<Block*>(argument);
  const Launch& launch = *block->launch;
  if (block->index) pause(0);
  block_idx = {block->index, 0, 0};
  block_dim = {launch.num_threads, 1, 1};
  grid_dim = {launch.grid, 1, 1};
  const size_t padded_bytes = (launch.shared_bytes + 127) / 128 * 128 + 128;
  dynamic_shared = static_cast<uint8_t*>(aligned_alloc(128, padded_bytes));
  block->shared = dynamic_shared;
  memset(dynamic_shared, 0xA5, padded_bytes);  // shared memory holds garbage at first, as on the GPU
  block->fibers = static_cast<Fiber*>(calloc(launch.num_threads, sizeof(Fiber)));
  block->warps = static_cast<Warp*>(calloc((launch.num_threads + 31) / 32, sizeof(Warp)));
  Slab* slab = take_slab(launch.num_threads);
  for (unsigned t = 0; t < launch.num_threads; ++t) {
    block->fibers[t].index = {t, 0, 0};
    block->fibers[t].stack_pointer = first_frame(reinterpret_cast<char*>(slab) + 4096 + t * kStackBytes);
  }
  unsigned num_idle = 0;  // turns in a row
  for (unsigned left = launch.num_threads; left;) {
    block->has_moved = false;
    for (unsigned t = 0; t < launch.num_threads; ++t) {
      Fiber& fiber = block->fibers[t];
      if (fiber.done) continue;
      block->current = t;
      emulated_switch(&block->scheduler, fiber.stack_pointer);
      if (fiber.done) --left;
    }
    num_idle = block->has_moved ? 0 : num_idle + 1;
    rest(num_idle);
  }
  give_slab(slab);
  free(block->warps);
  free(block->fibers);
  free(dynamic_shared);
  return nullptr;
}

/// Runs a grid to its end: all blocks at once, as if the GPU had room for them.
inline void launch(unsigned grid, unsigned num_threads, size_t shared_bytes, void (*kernel)(const void*),
                   const void* params) {
  Launch all = {kernel, params, grid, num_threads, shared_bytes, 0, 0};
  Block* blocks = static_cast<Block*>(calloc(grid, sizeof(Block)));
  pthread_t* threads = static_cast<pthread_t*>(calloc(grid, sizeof(pthread_t)));
  for (unsigned index = 0; index < grid; ++index) {
    blocks[index].launch = &all;
    blocks[index].index = index;
    if (pthread_create(&threads[index], nullptr, run_block, &blocks[index])) abort();
  }
  for (unsigned index = 0; index < grid; ++index) pthread_join(threads[index], nullptr);
  free(threads);
  free(blocks);
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
