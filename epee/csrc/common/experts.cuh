// Where experts are: the only code that maps an expert to its rank.
//
// `topk_idx` names experts by id. A table in device memory, the same on all ranks (`gpu/experts.py`), gives the
// physical expert of each id: rank * num_local_experts + index at that rank. Ids are mapped once, by the code that
// reads a routing; counts, handles, messages and rows go by physical experts. Those of a rank are adjacent, so rank and
// index follow from the number without another load, and no inverse is needed.
//
// The cpu writes the table while no kernel that reads it runs or is queued. So a kernel stages it before it waits for
// the previous one, and a graph keeps its address.
#pragma once
#include "../ptx/memory.cuh"
#include "work.cuh"

constexpr int kExpertsOfVec = sizeof(Vec16) / sizeof(u16);

/// Copies the entries of `num_experts` ids, and some behind them, from the table at an address to shared memory: an id
/// is looked up for each (token, k), which must not cost a load from memory. All threads; the caller synchronises.
DEVICE void stage_experts(Vec16* staged, u64 table, int num_experts) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i * kExpertsOfVec < num_experts; i += static_cast<int>(blockDim.x))
    staged[i] = ld_vec16(reinterpret_cast<const Vec16*>(table) + i);
}

/// The physical expert of an id, `none` for one that is not below `num_experts`. Without a branch: callers look up
/// several ids at once.
DEVICE int physical_expert(const Vec16* staged, i64 id, int num_experts, int none) {
  const bool is_one = static_cast<u64>(id) < static_cast<u64>(num_experts);
  const int expert = reinterpret_cast<const u16*>(staged)[is_one ? static_cast<u32>(id) : 0];
  return is_one ? expert : none;
}

/// Where the kernels of buffers stage the table.
DEVICE Vec16* staged_experts() {
  __shared__ Vec16 table[kMaxExperts / kExpertsOfVec];
  return table;
}

/// The first physical expert of a rank; each rank has `num_local`.
DEVICE int first_expert_of(int rank, int num_local) { return rank * num_local; }

/// The rank of a physical expert.
DEVICE int owner_of(int expert, int num_local) {
  return static_cast<int>(static_cast<u32>(expert) / static_cast<u32>(num_local));
}

/// The same without a division: `factor` is 2^20 / experts of a rank, rounded up; exact below 1024.
DEVICE u32 owner_by_factor(u32 expert, int factor) { return expert * static_cast<u32>(factor) >> 20; }
