// Rows of large calls in memory: how they are cut for lanes, and how the blocks' threads move them.
//
// What moves a row, through slots (`pipeline.cuh`) or from where it lies (`direct.cuh`), has the same lanes, words and
// arithmetic; where a vector of another rank is loaded from is a function that it gives.
#pragma once
#include "call.cuh"
#include "elements.cuh"

constexpr int kRowAlignVecs = 8;                                 // shares and runs are whole lines of 128 bytes
constexpr int kChunkShift = 20;                                  // a run has fewer chunks than this many bits count
CONSTANT int kHeld = kNumRanks < 4 ? kNumRanks : 4;              // ranks whose vectors a thread holds at once
CONSTANT int kDeep = kNumRanks < 3 ? 3 : kNumRanks < 5 ? 2 : 1;  // and how many of each, whose loads are under way

/// What of a row a lane moves, in vectors of 16 bytes from `at`; the row ends behind `num_bytes`.
struct Piece {
  u64 at;
  i64 num_bytes;
  i64 begin, end;
  int num_chunks;
};

/// What a lane moves: to each rank, and from each.
struct Cut {
  Piece in[kMaxRanks], out[kMaxRanks];
  u32 sources, owners;  // with two crossings owners are takers
  u32 placed;           // sources whose rows, if they are only moved, are not where they belong already
  int lane;
  u64 saved;                 // where the row that the output is written over is copied to, or 0
  i64 num_saved[kMaxRanks];  // vectors of `in` that were, by who pushes; below 0: threads move them
};

DEVICE i64 aligned_part(i64 total, int parts) {
  const i64 part = (total + parts - 1) / parts;
  return (part + kRowAlignVecs - 1) / kRowAlignVecs * kRowAlignVecs;
}

/// The part of lane `lane` of `num_lanes` of the `vecs` vectors at `at`.
DEVICE Piece piece_of(const CollectiveParams& p, u64 at, i64 num_bytes, i64 vecs, int lane, int num_lanes) {
  Piece r = {at, num_bytes, 0, 0, 0};
  const i64 run = aligned_part(vecs, num_lanes);
  r.begin = run * lane < vecs ? run * lane : vecs;
  r.end = r.begin + run < vecs ? r.begin + run : vecs;
  r.num_chunks = static_cast<int>((r.end - r.begin + p.chunk_vecs - 1) / p.chunk_vecs);
  return r;
}

/// Cuts the rows of the first `kNumRanks` threads; all threads.
DEVICE void cut_rows(const CollectiveParams& p, u32 active, int lane, int num_lanes, Cut& c) {
  const int rank = static_cast<int>(threadIdx.x);
  const u32 sources = p.call.sources & active, owners = p.call.takers & active;
  if (rank < kNumRanks) {
    u64 in = p.inputs[rank], out = p.outputs[rank];
    i64 in_bytes = p.call.in_bytes[rank], out_bytes = p.call.out_bytes[rank];
    i64 in_vecs = (in_bytes + 15) / 16, out_vecs = (out_bytes + 15) / 16;
    if (p.has_gather) {  // the share of owner `rank`, of the input and of the output
      const i64 whole = (p.num_bytes + 15) / 16;
      in_vecs = out_vecs = owners ? aligned_part(whole, __popc(owners)) : 0;
      const i64 begin = __popc(owners & ((1u << rank) - 1)) * in_vecs * 16;
      in = p.inputs[p.call.rank] + static_cast<u64>(begin);
      out = p.outputs[p.call.rank] + static_cast<u64>(begin);
      in_bytes = out_bytes = p.num_bytes - begin;
    }
    c.in[rank] = piece_of(p, in, in_bytes, in_vecs, lane, num_lanes);
    c.out[rank] = piece_of(p, out, out_bytes, out_vecs, lane, num_lanes);
    c.num_saved[rank] = -1;
  }
  if (rank == 0) {
    c.sources = sources;
    c.placed = p.inputs[p.call.rank] == p.outputs[p.call.rank] ? sources & ~(1u << p.call.rank) : sources;
    c.owners = owners;
    c.lane = lane;
  }
  __syncthreads();
}

DEVICE u64* flag_at(u64 region, Stage stage, int lane, int src) {
  return reinterpret_cast<u64*>(region + kRegionFlagsOffset) + (stage * kMaxLanes + lane) * kMaxRanks + src;
}
DEVICE u64* credit_at(u64 region, Stage stage, int lane, int reader) {
  return reinterpret_cast<u64*>(region + kRegionCreditsOffset) + (stage * kMaxLanes + lane) * kMaxRanks + reader;
}
DEVICE u64 mark_of(const Meeting& s, int num_chunks) { return s.tag << kChunkShift | static_cast<u64>(num_chunks); }

/// Vector `i` of chunk `k` of a piece; whether it has that many.
DEVICE i64 vector_at(const CollectiveParams& p, const Piece& r, int k, int i) {
  return r.begin + static_cast<i64>(k) * p.chunk_vecs + i;
}
DEVICE Vec16 load_piece(const CollectiveParams& p, const Piece& r, int k, int i) {
  return load_user(reinterpret_cast<const u8*>(r.at), vector_at(p, r, k, i) * 16, r.num_bytes);
}
DEVICE void store_piece(const CollectiveParams& p, const Piece& r, int k, int i, const Vec16& v) {
  store_user(reinterpret_cast<u8*>(r.at), vector_at(p, r, k, i) * 16, r.num_bytes, v);
}
/// Copies vector `i` of a piece of this rank's own row to where that is saved.
DEVICE void save_vector(const CollectiveParams& p, const Cut& c, const Piece& r, i64 i, const Vec16& v) {
  store_user(reinterpret_cast<u8*>(c.saved + (r.at - p.inputs[p.call.rank])), i * 16, r.num_bytes, v);
}
/// The vectors of a chunk of `limit` that a thread moves at once: `first`, `first + step` ...; which of some ranks have
/// each.
struct Batch {
  int first, step, limit;
  u32 with[ROOM(kDeep, 4)];
  DEVICE int at(int j) const { return first + j * step; }
};
DEVICE bool next_batch(const CollectiveParams& p, const Piece* pieces, u32 ranks, int k, Batch& b) {
#pragma unroll
  for (int j = 0; j < kDeep; ++j) {
    b.with[j] = 0;
    if (b.at(j) >= b.limit) continue;
#pragma unroll
    for (int rank = 0; rank < kNumRanks; ++rank)
      if (is_in(ranks, rank) && vector_at(p, pieces[rank], k, b.at(j)) < pieces[rank].end) b.with[j] |= 1u << rank;
  }
  return b.with[0] != 0;  // pieces have no gaps
}
/// The same for a piece that all ranks have a part of.
DEVICE bool next_batch(const CollectiveParams& p, const Piece& piece, u32 ranks, int k, Batch& b) {
#pragma unroll
  for (int j = 0; j < kDeep; ++j)
    b.with[j] = b.at(j) < b.limit && vector_at(p, piece, k, b.at(j)) < piece.end ? ranks : 0;
  return b.with[0] != 0;
}

/// Hands each vector `j` of a batch from every source that has one to `take(j, src, vector)`, in rank order; own ones
/// come from the input, others from `load(src, i)`. Behind the last one of each is `done(j)`.
template <class Load, class Take, class Done>
DEVICE void take_sources(const CollectiveParams& p, const Cut& c, int k, const Batch& b, Load load, Take take,
                         Done done) {
  Vec16 own[ROOM(kDeep, 4)] = {};
#pragma unroll
  for (int j = 0; j < kDeep; ++j)
    if (is_in(b.with[j], p.call.rank)) own[j] = load_piece(p, c.in[p.call.rank], k, b.at(j));
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kHeld) {
    Vec16 v[ROOM(kDeep, 4)][ROOM(kHeld, 4)] = {};
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
#pragma unroll
      for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
        if (is_in(b.with[j] & ~(1u << p.call.rank), src)) v[j][src - base] = load(src, b.at(j));
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
#pragma unroll
      for (int src = base; src < base + kHeld && src < kNumRanks; ++src) {
        Words<4> w;  // word by word: a choice of whole vectors would be an index known at run time only
#pragma unroll
        for (int n = 0; n < 4; ++n) w.word[n] = src == p.call.rank ? own[j].word[n] : v[j][src - base].word[n];
        if (is_in(b.with[j], src)) take(j, src, w);
      }
      if (base + kHeld >= kNumRanks && b.with[j]) done(j);  // who has more than one base is not deep
    }
  }
}

DEVICE Vec16 vector_of(const Words<4>& w) { return {{w.word[0], w.word[1], w.word[2], w.word[3]}}; }

/// Reduces, or places, this thread's vectors of chunk `k` of what an owner owns; results also go to `send(i, vector)`.
/// Vectors of others come from `load(src, i)`. With `kSaves` own ones are saved before they are written over.
template <bool kIsPlaced, bool kSaves = false, class Load, class Send>
DEVICE void own_chunk(const CollectiveParams& p, const Cut& c, int k, Batch b, Load load, Send send) {
  const Piece& mine = c.out[p.call.rank];
#pragma unroll 1
  for (; kIsPlaced ? next_batch(p, c.out, c.placed, k, b) : next_batch(p, mine, c.sources, k, b);
       b.first += kDeep * b.step) {
    Accumulator<4> sum;
    take_sources(
        p, c, k, b, load,
        [&](int j, int src, const Words<4>& w) {
          if (kSaves && src == p.call.rank && c.saved)
            save_vector(p, c, c.in[src], vector_at(p, c.in[src], k, b.at(j)), vector_of(w));
          if (kIsPlaced)
            store_piece(p, c.out[src], k, b.at(j), vector_of(w));
          else
            sum.add(w);
        },
        [&](int j) {
          if (kIsPlaced) return;
          const Vec16 result = vector_of(sum.result());
          sum = Accumulator<4>();
          send(b.at(j), result);
          store_piece(p, mine, k, b.at(j), result);
        });
  }
}

/// Copies this thread's vectors of chunk `k` of what `writers` own into the output; they come from `load(src, i)`.
template <class Load>
DEVICE void collect_chunk(const CollectiveParams& p, const Cut& c, int k, u32 writers, Batch b, Load load) {
#pragma unroll 1
  for (; next_batch(p, c.out, writers, k, b); b.first += kDeep * b.step) {
#pragma unroll
    for (int base = 0; base < kNumRanks; base += kHeld) {
      Vec16 v[ROOM(kDeep, 4)][ROOM(kHeld, 4)] = {};
#pragma unroll
      for (int j = 0; j < kDeep; ++j)
#pragma unroll
        for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
          if (is_in(b.with[j], src)) v[j][src - base] = load(src, b.at(j));
#pragma unroll
      for (int j = 0; j < kDeep; ++j)
#pragma unroll
        for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
          if (is_in(b.with[j], src)) store_piece(p, c.out[src], k, b.at(j), v[j][src - base]);
    }
  }
}
