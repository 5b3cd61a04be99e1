// What a token's routing says: experts and ranks of its slots, as the lanes of a warp see them. The kernel has
// staged the table of experts.
#pragma once
#include "../../common/call.cuh"
#include "../../common/experts.cuh"
#include "../../common/work.cuh"

/// One (token, k) slot as a lane sees it. `ranks` has bit d when the token goes to rank d; `is_first` marks the lane
/// that speaks for the token.
struct Entry {
  int token, k, expert;
  u32 ranks;
  bool is_first;
};

/// The physical expert of a slot, -1 for none, -2 for an id that does not exist.
DEVICE int load_expert(const LayoutParams& p, int token, int k) {
  const i64 id = reinterpret_cast<const i64*>(p.topk_idx)[static_cast<i64>(token) * p.num_topk + k];
  return physical_expert(staged_experts(), id, p.num_experts, id == -1 ? -1 : -2);
}

/// Completes a step's entries from the experts of its lanes: `32 / lanes_per_token` tokens from `first` on. All lanes.
/// Nothing goes to ranks that are not in `active`, and their experts count as none.
DEVICE Entry make_entry(const LayoutParams& p, u32 active, int first, int end, int expert) {
  const int lane = lane_idx();
  if (expert >= 0 && !is_in(active, owner_of(expert, p.num_local_experts))) expert = -1;
  Entry entry = {first + lane / p.lanes_per_token, lane % p.lanes_per_token, expert, 0, false};
  const bool has_token = entry.token < end;
  entry.is_first = has_token && entry.k == 0;
  if (expert >= 0) entry.ranks = 1u << owner_of(expert, p.num_local_experts);
  if (has_token && p.token_in_rank)
    for (int d = 0; d < kNumRanks; ++d)
      entry.ranks |= static_cast<u32>(reinterpret_cast<const u8*>(
                                          p.token_in_rank)[static_cast<i64>(entry.token) * kNumRanks + d] != 0)
                     << d;
  for (int distance = p.lanes_per_token / 2; distance; distance /= 2)
    entry.ranks |= __shfl_xor_sync(~0u, entry.ranks, distance);
  entry.ranks = has_token ? entry.ranks & active : 0;
  return entry;
}

/// Reads a step's entries. With `counters` (in shared memory) it counts them, reports bad ids and copies experts and
/// weights into the handle; without, a bad id is no expert: somebody else reports it. All lanes.
DEVICE Entry read_entries(const LayoutParams& p, u64 tag, u32 active, int first, int end, i32* counters) {
  const int token = first + lane_idx() / p.lanes_per_token;
  const int k = lane_idx() % p.lanes_per_token;
  const bool is_slot = token < end && k < p.num_topk && p.topk_idx;
  const i64 at = static_cast<i64>(token) * p.num_topk + k;
  const bool has_weight = is_slot && p.weights_of && counters;
  const float weight = has_weight ? reinterpret_cast<const float*>(p.topk_weights)[at] : 0.0f;  // both loads at once
  int expert = is_slot ? load_expert(p, token, k) : -1;
  if (!counters) return make_entry(p, active, first, end, max(expert, -1));
  if (expert == -2) {
    red_add_shared(counters + p.num_experts + kNumRanks, 1);
    report_failure(p.call, tag,
                   {kBadExpert, p.call.rank, static_cast<u64>(token), reinterpret_cast<const u64*>(p.topk_idx)[at],
                    static_cast<u64>(k)});
    expert = -1;
  }
  const Entry entry = make_entry(p, active, first, end, expert);
  if (entry.expert >= 0) red_add_shared(counters + entry.expert, 1);
  if (entry.is_first)
    for (int d = 0; d < kNumRanks; ++d)
      if (entry.ranks >> d & 1) red_add_shared(counters + p.num_experts + d, 1);
  if (is_slot) reinterpret_cast<i32*>(p.expert_of)[at] = entry.expert;
  if (has_weight) reinterpret_cast<float*>(p.weights_of)[at] = weight;
  return entry;
}
