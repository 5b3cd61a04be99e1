// Large collectives of a rank whose rows lie in its pool, memory that every rank has mapped: if those of all do, who
// needs a row reads it where it is; else through slots (`slots.cuh`), as `pipeline.cuh`, which the others have.
//
//   pull      each owner reads its share, or its rows, from all sources, and reduces or places it into its output
//   collect   (two crossings) each owner reads the other shares from the outputs of their owners
//
// Threads load it; copies in bulk took longer (both ways at once 587 us where loads took 417, all_gather of 256 MiB).
//
// Nobody stores into the tensors of another rank: a store that comes late, when its owner has given the call up, would
// change what the owner has there by then. A load that comes late spoils a result of this rank only, and is found out:
// who loses a call stores `gone` at all others before its kernel ends, and who has read looks for it behind the reads.
//
// A lane is one block, the same on all ranks; a grid with fewer blocks does several. Words, in order:
//   places  (source) -> released with `joined`: where its rows begin in its pool; what its stream did before is visible
//   flag    (lane, owner) -> at each reader: the owner's piece of this lane lies in its output (two crossings)
//   credit  (lane, reader) -> at whom it reads from: it has read all of this lane
// A call ends when all readers have read, so the tensors may be changed behind it. Who waits for flags has pulled all
// its lanes before, so there is no cycle. Flags and credits of lanes from `kMaxLanes` on are those of the first stage.
//
// Whether a call goes this way is decided by all ranks alike: it does if all that take part have said so in `joined`
// (`kPlaced`), which a host does that finds its rows in its pool. Where they begin may differ from rank to rank. A
// place is checked against the size of its owner's pool before it is read. A rank that has not mapped a pool of the
// others has 0 for its own in `pools`, and does not say so; a graph may have recorded this kernel before.
//
// In and out may be the same memory: only the owner reads its own share of its input, and the other shares of its
// output are written behind their owners' flags, who have read them all as input.
#pragma once
#include "slots.cuh"

constexpr int kNoLimit = 0x7FFFFFFF;

/// Where this GPU sees the rows of others.
struct Places {
  u64 in[kMaxRanks], out[kMaxRanks];
  u32 are_all, are_good;
};

DEVICE u64* places_at(u64 region, u64 tag, int rank) {
  return reinterpret_cast<u64*>(region + kRegionPlacesOffset) + (tag % 4 * kMaxRanks + rank) * 2;
}
DEVICE u64* direct_flag_at(u64 region, int lane, int src) {
  return flag_at(region, lane < kMaxLanes ? kGather : kScatter, lane % kMaxLanes, src);
}
DEVICE u64* direct_credit_at(u64 region, int lane, int reader) {
  return credit_at(region, lane < kMaxLanes ? kGather : kScatter, lane % kMaxLanes, reader);
}

/// Where this rank's pool begins; 0: its calls are made as without one.
DEVICE u64 own_pool(const CollectiveCall& call) {
  return ld_relaxed_sys(own_words(call, kRegionPoolsOffset) + call.rank);
}

/// Tells a rank where its input and the output of this one begin, if they lie in the pool; for `open_call`.
DEVICE u64 tell_place(const CollectiveParams& p, int rank, u64 region, u64 tag) {
  const u64 pool = own_pool(p.call);
  if (pool == 0) return 0;
  u64* words = places_at(region, tag, p.call.rank);
  st_relaxed_sys(words, p.inputs[rank] - pool);
  st_relaxed_sys(words + 1, p.outputs[p.call.rank] - pool);
  return kPlaced;
}

/// Whether `num_bytes` from `at` on lie in a pool of `size`, and may be read in whole vectors there.
DEVICE bool is_inside(u64 at, i64 num_bytes, u64 size) {
  const u64 room = (static_cast<u64>(num_bytes) + 15) / 16 * 16;
  return num_bytes <= 0 || (at % 16 == 0 && at <= size && room <= size - at);
}

/// Looks where the rows of the others are. True if all have told, alike on all ranks; whether this rank may read
/// there stands in `are_good`. All threads, in an open call.
DEVICE bool find_places(const CollectiveParams& p, const Meeting& s, Places& w) {
  const int rank = static_cast<int>(threadIdx.x);
  const bool is_peer = rank < kNumRanks && rank != p.call.rank && is_in(s.active, rank);
  if (rank == 0) w.are_all = own_pool(p.call) != 0;
  if (rank == 0) w.are_good = 1;
  __syncthreads();
  if (is_peer && !(ld_acquire_sys(joined_at(p.call.own, s.tag, rank)) & kPlaced)) w.are_all = 0;
  __syncthreads();
  if (!w.are_all) return false;
  if (is_peer) {
    const u64* words = places_at(p.call.own, s.tag, rank);
    const u64 in = ld_relaxed_sys(words), out = ld_relaxed_sys(words + 1);
    const u64 pool = ld_relaxed_sys(own_words(p.call, kRegionPoolsOffset) + rank);
    const u64 size = pool ? ld_relaxed_sys(own_words(p.call, kRegionPoolBytesOffset) + rank) : 0;
    const bool is_read = is_in(static_cast<u32>(p.call.takers), p.call.rank);
    const i64 row = p.has_gather ? p.num_bytes : p.call.out_bytes[rank];
    const bool is_source = is_in(static_cast<u32>(p.call.sources), rank);
    const bool is_owner = p.has_gather && is_in(static_cast<u32>(p.call.takers), rank);
    w.in[rank] = pool + in;
    w.out[rank] = pool + out;
    if (is_read && ((is_source && !is_inside(in, row, size)) || (is_owner && !is_inside(out, row, size)))) {
      report_failure(p.call, s.tag, {kBadRow, rank, size, is_source ? in : out, kWaitFacts});
      w.are_good = 0;
    }
  }
  __syncthreads();
  return true;
}

/// A share's vectors without those behind the end of the whole row, which are nowhere.
DEVICE void clip(Piece& r) {
  const i64 vecs = r.num_bytes > 0 ? (r.num_bytes + 15) / 16 : 0;
  if (r.end > vecs) r.end = r.begin > vecs ? r.begin : vecs;
}
DEVICE Vec16 load_there(u64 at, int i) { return ld_vec16(reinterpret_cast<const u8*>(at) + i * 16ll); }

/// Reads this block's lanes from the inputs of all sources, and tells who reads the result.
template <bool kIsPlaced>
DEVICE void pull(const CollectiveParams& p, Meeting& s, Cut& c, const Places& w) {
  const int rank = static_cast<int>(threadIdx.x), own = p.call.rank;
#pragma unroll 1
  for (int lane = static_cast<int>(blockIdx.x); lane < p.direct_lanes; lane += static_cast<int>(gridDim.x)) {
    cut_rows(p, s.active, lane, p.direct_lanes, c);
    if (lane_idx() == 0) perhaps_stall(s.tag, own, 3);
    if (rank < kNumRanks) {
      clip(c.out[rank]);
      const u64 share = p.has_gather ? c.out[own].at - p.outputs[own] : 0;
      if (rank != own) c.in[rank].at = w.in[rank] + share + static_cast<u64>(c.out[kIsPlaced ? rank : own].begin) * 16;
    }
    __syncthreads();
    own_chunk<kIsPlaced>(
        p, c, 0, {rank, static_cast<int>(blockDim.x), kNoLimit, {}},
        [&](int src, int i) { return load_there(c.in[src].at, i); }, [](int, const Vec16&) {});
    __syncthreads();
    if (p.has_gather && rank < kNumRanks && rank != own && is_in(c.owners, rank))
      st_release_sys(direct_flag_at(s.peer[rank], lane, own), mark_of(s, 1));
  }
}

/// Reads this block's lanes of all other shares from the outputs of their owners.
DEVICE void collect(const CollectiveParams& p, Meeting& s, Cut& c, const Places& w) {
  const int rank = static_cast<int>(threadIdx.x), own = p.call.rank;
#pragma unroll 1
  for (int lane = static_cast<int>(blockIdx.x); lane < p.direct_lanes; lane += static_cast<int>(gridDim.x)) {
    cut_rows(p, s.active, lane, p.direct_lanes, c);
    const u32 writers = c.owners & ~(1u << own);
    if (rank < kNumRanks && is_in(writers, rank)) {
      if (!wait_count(p.call, s, rank, direct_flag_at(p.call.own, lane, rank), mark_of(s, 1), kWaitFlag)) s.lost_at = 0;
    }
    if (rank < kNumRanks && rank != own) {
      clip(c.out[rank]);
      c.in[rank].at = w.out[rank] + (c.out[rank].at - p.outputs[own]) + static_cast<u64>(c.out[rank].begin) * 16;
    }
    __syncthreads();
    if (s.lost_at != kNeverLost) return;
    collect_chunk(p, c, 0, writers, {rank, static_cast<int>(blockDim.x), kNoLimit, {}},
                  [&](int src, int i) { return load_there(c.in[src].at, i); });
    __syncthreads();
  }
}

/// Ends the reads: what of a rank that had gone by then is no result; waits for who reads here. All threads.
DEVICE void end_reads(const CollectiveParams& p, const Meeting& s, u32 sources, u32 readers) {
  const int rank = static_cast<int>(threadIdx.x), own = p.call.rank;
  __syncthreads();
  if (rank >= kNumRanks) return;
  perhaps_stall(s.tag, own, 4);
  const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
  if (is_in(sources, rank)) {
    fence_acq_rel_sys();  // the block's reads are over
    if (ld_relaxed_sys(own_words(p.call, kRegionGoneOffset) + rank))
      report_gone(p.call, s.tag, s.active, rank, kWaitCredit);
#pragma unroll 1
    for (int lane = first; lane < p.direct_lanes; lane += step)
      st_release_sys(direct_credit_at(s.peer[rank], lane, own), mark_of(s, 1));
  }
#pragma unroll 1
  for (int lane = first; lane < p.direct_lanes && is_in(readers, rank); lane += step)
    if (!wait_count(p.call, s, rank, direct_credit_at(p.call.own, lane, rank), mark_of(s, 1), kWaitCredit)) break;
}

/// What this block does of a call whose rows all lie in pools. All threads.
template <bool kIsPlaced>
DEVICE void read_in_place(const CollectiveParams& p, Meeting& s, Cut& c, const Places& w) {
  const u32 me = 1u << p.call.rank, owners = p.call.takers & s.active;
  const u32 read = (p.call.sources & s.active) | (p.has_gather ? owners : 0);  // by the owners
  if (owners & me) {
    pull<kIsPlaced>(p, s, c, w);
    if (p.has_gather) collect(p, s, c, w);
  }
  end_reads(p, s, owners & me ? read & ~me : 0, read & me ? owners & ~me : 0);
}

template <bool kIsPlaced>
DEVICE void direct(const CollectiveParams& p) {
  __shared__ Meeting s;
  __shared__ Cut c;
  __shared__ Places w;
  wait_previous_kernel();
  if (open_call(p.call, s, 0, [&](int rank, u64 region, u64 tag) { return tell_place(p, rank, region, tag); })) {
    if (!find_places(p, s, w))
      move_in_chunks<kIsPlaced>(p, s, c, nullptr);
    else if (w.are_good)
      read_in_place<kIsPlaced>(p, s, c, w);
  }
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kDirectThreads, kPipelineBlocks)
    collective_direct_reduced(const __grid_constant__ CollectiveParams p) {
  direct<false>(p);
}

__global__ void __launch_bounds__(kDirectThreads, kPipelineBlocks)
    collective_direct_placed(const __grid_constant__ CollectiveParams p) {
  direct<true>(p);
}

}  // namespace epee
