// Delays for stress tests: some warps stand still at places where others wait for them or race with them.
//
// Which warps, and for how long, is a hash of call, rank, block, warp and place, so that each call has its own pattern
// and a pattern can be had again. `kStallOneIn` is a generated constant; in ordinary builds it is 0 and nothing stays.
#pragma once
#include "../ptx/memory.cuh"
#include "work.cuh"

constexpr u32 kMaxStallNs = 20000;  // longer than a small call takes, so that everybody else gets ahead

/// All lanes of a warp, or some: the hash is the same for all.
DEVICE void perhaps_stall(u64 tag, int rank, u32 place) {
#ifndef __CUDACC__
  emulation::pause(place);
#endif
  if (kStallOneIn == 0) return;
  u64 hash = (tag * 8 + static_cast<u64>(rank)) << 24 ^ blockIdx.x << 16 ^ static_cast<u64>(warp_idx()) << 8 ^ place;
  hash = (hash ^ hash >> 31) * 0x9E3779B97F4A7C15ull;  // a multiplicative hash: neighbours must differ
  hash = (hash ^ hash >> 29) * 0xBF58476D1CE4E5B9ull;
  hash ^= hash >> 32;
  if (hash % (kStallOneIn + (kStallOneIn == 0))) return;
  stall_ns(static_cast<u32>(hash >> 20) % kMaxStallNs);
}
