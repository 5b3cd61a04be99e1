// Chunks of a payload that move through slots: who waits, who moves and who lets go are warps of their own.
#pragma once
#include "../ptx/block_barrier.cuh"
#include "wait.cuh"

constexpr i32 kNeverLost = 0x7FFFFFFF;

/// Runs the chunks of a role, up to `lost_at`, which an await sets that has failed. The first warp does
/// `await(k, rank)`, a thread for each of `num_ranks`, chunk after chunk; the second does `release(k, rank)` likewise,
/// and the others `move(k, thread, num_threads)` in between. So a release, which waits until all stores of its chunk
/// are at their places, costs the movers nothing, and none is ever held up by a wait for the next chunk, from which a
/// cycle through the ranks could come. All threads.
template <class Await, class Move, class Release>
DEVICE void run_chunks(i32& lost_at, int num_chunks, int num_ranks, Await await, Move move, Release release) {
  constexpr int kReady = 1, kMoved = 2;  // barriers: chunk k may be moved; has been moved
  const int thread = static_cast<int>(threadIdx.x), num_movers = static_cast<int>(blockDim.x) - 64;
  const auto is_lost = [&](int k) { return k >= *const_cast<const volatile i32*>(&lost_at); };
  if (thread >= 64) {
#pragma unroll 1
    for (int k = 0, is_last = 0; k < num_chunks && !is_last; ++k) {
      barrier_sync(kReady, num_movers + 32);
      is_last = is_lost(k);
      if (!is_last) move(k, thread - 64, num_movers);
      barrier_sync(kMoved, num_movers + 32);
    }
  } else if (thread >= 32) {
#pragma unroll 1
    for (int k = 0; k < num_chunks; ++k) {
      barrier_sync(kMoved, num_movers + 32);
      if (is_lost(k)) break;
      if (thread < 32 + num_ranks) release(k, thread - 32);
      __syncwarp();
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < num_chunks; ++k) {
      if (thread < num_ranks) await(k, thread);
      __syncwarp();
      barrier_sync(kReady, num_movers + 32);
      if (is_lost(k)) break;
    }
  }
}
