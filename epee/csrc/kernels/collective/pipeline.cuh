// Large collectives: rows go in chunks through slots in the receiver's memory, with a flag behind each chunk and a
// credit back for each slot that is free again. Two crossings, as in `two_shot.cuh`, or one, as in
// `exchange.cuh`; the roles are blocks of their own, and all three work at the same time:
//
//   scatter_sender   sends each owner its row of the input: share by share, or row d for rank d
//   owner            reduces what has come from all sources into the output, and sends it on to the takers (two
//                    crossings); or places what has come, a row for each source (one crossing)
//   collector        (two crossings) copies what owners have sent into the output
//
// With one crossing each pair of ranks may have a row of its own length (`in_bytes`, `out_bytes`), which both know.
//
// A lane is one block of each role that the rank has in the call (`roles`: the root of a broadcast only sends), the
// same lane on all ranks; it has slots, flags and credits of its own, and every row's vectors of 16 bytes are dealt out
// to the lanes in runs. A grid with fewer blocks does several lanes one after the other, in ascending order on all
// ranks, whatever their grids are: so the lowest lane that has not ended goes on everywhere. Nobody meets anybody but
// through these words:
//   flag   (stage, lane, source)  at the receiver: call number << 20 | chunks written; released behind their bytes by a
//                                 thread that met those that stored them at a barrier of the block
//   credit (stage, lane, reader)  at the writer, likewise: chunks read. Chunk k goes into slot k % num_slots behind the
//                                 credit for chunk k - num_slots of this call; the first ones behind `joined`, as
//                                 `call.cuh` says
// A word of a later call cannot be met: its writer waits for us to join that call first.
//
// In and out may be the same memory under the rules of the other two: an element is written by an owner that has read
// it in the same thread, or by a collector behind the owner's result, for which our sender has read it.
#include "call.cuh"
#include "elements.cuh"

constexpr int kRowAlignVecs = 8;                                 // shares and runs are whole lines of 128 bytes
constexpr int kChunkShift = 20;                                  // a run has fewer chunks than this many bits count
CONSTANT int kHeld = kNumRanks < 4 ? kNumRanks : 4;              // ranks whose vectors a thread holds at once
CONSTANT int kDeep = kNumRanks < 3 ? 3 : kNumRanks < 5 ? 2 : 1;  // and how many of each, whose loads are under way
enum Role : u32 { kSender = 1, kOwner = 2, kCollector = 4 };

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
  int lane;
};

DEVICE i64 aligned_part(i64 total, int parts) {
  const i64 part = (total + parts - 1) / parts;
  return (part + kRowAlignVecs - 1) / kRowAlignVecs * kRowAlignVecs;
}

/// The part of lane `lane` of the `vecs` vectors at `at`.
DEVICE Piece piece_of(const CollectiveParams& p, u64 at, i64 num_bytes, i64 vecs, int lane) {
  Piece r = {at, num_bytes, 0, 0, 0};
  const i64 run = aligned_part(vecs, p.num_lanes);
  r.begin = run * lane < vecs ? run * lane : vecs;
  r.end = r.begin + run < vecs ? r.begin + run : vecs;
  r.num_chunks = static_cast<int>((r.end - r.begin + p.chunk_vecs - 1) / p.chunk_vecs);
  return r;
}

/// Cuts the rows of the first `kNumRanks` threads; all threads.
DEVICE void cut_rows(const CollectiveParams& p, u32 active, int lane, Cut& c) {
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
    c.in[rank] = piece_of(p, in, in_bytes, in_vecs, lane);
    c.out[rank] = piece_of(p, out, out_bytes, out_vecs, lane);
  }
  if (rank == 0) {
    c.sources = sources;
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
DEVICE u8* slot_at(const CollectiveParams& p, u64 region, Stage stage, int lane, int chunk, int src) {
  const i64 slot = (static_cast<i64>(stage) * p.num_lanes + lane) * p.num_slots + chunk % p.num_slots;
  return reinterpret_cast<u8*>(region + p.call.chunks_offset) + (slot * kNumRanks + src) * p.slot_bytes;
}
DEVICE u64 mark_of(const Meeting& s, int num_chunks) { return s.tag << kChunkShift | static_cast<u64>(num_chunks); }

/// Waits for a slot of chunk `k` at `reader`, whom this thread looks after; or for chunk `k` of `src`.
DEVICE void await_credit(const CollectiveParams& p, Meeting& s, Stage stage, int lane, int k, int reader) {
  if (k < p.num_slots) return;
  if (!wait_count(p.call, s, reader, credit_at(p.call.own, stage, lane, reader), mark_of(s, k - p.num_slots + 1),
                  kWaitCredit))
    s.lost_at = k;
}
DEVICE void await_chunk(const CollectiveParams& p, Meeting& s, Stage stage, int lane, int k, int src) {
  if (!wait_count(p.call, s, src, flag_at(p.call.own, stage, lane, src), mark_of(s, k + 1), kWaitFlag)) s.lost_at = k;
}

/// Most chunks of the pieces of some ranks.
DEVICE int most_chunks(const Piece* pieces, u32 ranks) {
  int most = 0;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank)
    if (is_in(ranks, rank) && pieces[rank].num_chunks > most) most = pieces[rank].num_chunks;
  return most;
}
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
/// The vectors of a chunk that a thread moves at once: `first`, `first + step` ...; which of some ranks have each.
struct Batch {
  int first, step;
  u32 with[ROOM(kDeep, 4)];
  DEVICE int at(int j) const { return first + j * step; }
};
DEVICE bool next_batch(const CollectiveParams& p, const Piece* pieces, u32 ranks, int k, Batch& b) {
#pragma unroll
  for (int j = 0; j < kDeep; ++j) {
    b.with[j] = 0;
    if (b.at(j) >= p.chunk_vecs) continue;
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
    b.with[j] = b.at(j) < p.chunk_vecs && vector_at(p, piece, k, b.at(j)) < piece.end ? ranks : 0;
  return b.with[0] != 0;
}

DEVICE void scatter_sender(const CollectiveParams& p, Meeting& s, const Cut& c) {
  if (!is_in(c.sources, p.call.rank)) return;
  const u32 readers = c.owners & ~(1u << p.call.rank);
  const auto has = [&](int k, int rank) { return is_in(readers, rank) && k < c.in[rank].num_chunks; };
  const auto await = [&](int k, int rank) {
    if (has(k, rank)) await_credit(p, s, kScatter, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    if (has(k, rank)) st_release_sys(flag_at(s.peer[rank], kScatter, c.lane, p.call.rank), mark_of(s, k + 1));
  };
  run_chunks(
      s.lost_at, most_chunks(c.in, readers), kNumRanks, await,
      [&](int k, int thread, int num_threads) {
        Batch b = {thread, num_threads, {}};
#pragma unroll 1
        for (; next_batch(p, c.in, readers, k, b); b.first += kDeep * num_threads) {
#pragma unroll
          for (int first = 1; first < kNumRanks; first += kHeld) {
            Vec16 v[ROOM(kDeep, 4)][ROOM(kHeld, 4)] = {};
#pragma unroll
            for (int j = 0; j < kDeep; ++j)
#pragma unroll
              for (int n = first; n < first + kHeld && n < kNumRanks; ++n) {
                const int d = rank_behind(p.call.rank, n);
                if (is_in(b.with[j], d)) v[j][n - first] = load_piece(p, c.in[d], k, b.at(j));
              }
#pragma unroll
            for (int j = 0; j < kDeep; ++j)
#pragma unroll
              for (int n = first; n < first + kHeld && n < kNumRanks; ++n) {
                const int d = rank_behind(p.call.rank, n);
                if (is_in(b.with[j], d))
                  st_vec16(slot_at(p, s.peer[d], kScatter, c.lane, k, p.call.rank) + b.at(j) * 16, v[j][n - first]);
              }
          }
        }
      },
      release);
}

/// Hands each vector `j` of a batch from every source that has one to `take(j, src, vector)`, in rank order; own ones
/// come from the input. Behind the last one of each is `done(j)`.
template <class Take, class Done>
DEVICE void take_sources(const CollectiveParams& p, const Cut& c, int k, const Batch& b, Take take, Done done) {
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
        if (is_in(b.with[j] & ~(1u << p.call.rank), src))
          v[j][src - base] = ld_vec16(slot_at(p, p.call.own, kScatter, c.lane, k, src) + b.at(j) * 16);
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

/// Reduces, or places; with one crossing what comes from each rank is as long as `out` says, of a reduction all alike.
template <bool kIsPlaced>
DEVICE void owner(const CollectiveParams& p, Meeting& s, const Cut& c) {
  if (!is_in(c.owners, p.call.rank)) return;
  const u32 others = ~(1u << p.call.rank);
  const u32 writers = c.sources & others, readers = p.has_gather ? c.owners & others : 0;
  const Piece& mine = c.out[p.call.rank];
  const auto comes = [&](int k, int rank) {
    return is_in(writers, rank) && k < (p.has_gather ? mine : c.out[rank]).num_chunks;
  };
  const auto await = [&](int k, int rank) {
    if (is_in(readers, rank)) await_credit(p, s, kGather, c.lane, k, rank);
    if (comes(k, rank)) await_chunk(p, s, kScatter, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    const u64 mark = mark_of(s, k + 1);
    fence_acq_rel_sys();  // for both words
    if (is_in(readers, rank)) st_relaxed_sys(flag_at(s.peer[rank], kGather, c.lane, p.call.rank), mark);
    if (comes(k, rank)) st_relaxed_sys(credit_at(s.peer[rank], kScatter, c.lane, p.call.rank), mark);
  };
  run_chunks(
      s.lost_at, kIsPlaced ? most_chunks(c.out, c.sources) : mine.num_chunks, kNumRanks, await,
      [&](int k, int thread, int num_threads) {
        Batch b = {thread, num_threads, {}};
#pragma unroll 1
        for (; kIsPlaced ? next_batch(p, c.out, c.sources, k, b) : next_batch(p, mine, c.sources, k, b);
             b.first += kDeep * num_threads) {
          Accumulator<4> sum;
          take_sources(
              p, c, k, b,
              [&](int j, int src, const Words<4>& w) {
                if (kIsPlaced)
                  store_piece(p, c.out[src], k, b.at(j), vector_of(w));
                else
                  sum.add(w);
              },
              [&](int j) {
                if (kIsPlaced) return;
                const Vec16 result = vector_of(sum.result());
                sum = Accumulator<4>();
#pragma unroll
                for (int n = 1; n < kNumRanks; ++n) {
                  const int d = rank_behind(p.call.rank, n);
                  if (is_in(readers, d))
                    st_vec16(slot_at(p, s.peer[d], kGather, c.lane, k, p.call.rank) + b.at(j) * 16, result);
                }
                store_piece(p, mine, k, b.at(j), result);
              });
        }
      },
      release);
}

DEVICE void collector(const CollectiveParams& p, Meeting& s, const Cut& c) {
  if (!p.has_gather || !is_in(c.owners, p.call.rank)) return;
  const u32 writers = c.owners & ~(1u << p.call.rank);
  const auto await = [&](int k, int rank) {
    if (is_in(writers, rank)) await_chunk(p, s, kGather, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    if (is_in(writers, rank)) st_release_sys(credit_at(s.peer[rank], kGather, c.lane, p.call.rank), mark_of(s, k + 1));
  };
  run_chunks(
      s.lost_at, most_chunks(c.out, writers), kNumRanks, await,
      [&](int k, int thread, int num_threads) {
        Batch b = {thread, num_threads, {}};
#pragma unroll 1
        for (; next_batch(p, c.out, writers, k, b); b.first += kDeep * num_threads) {
#pragma unroll
          for (int base = 0; base < kNumRanks; base += kHeld) {
            Vec16 v[ROOM(kDeep, 4)][ROOM(kHeld, 4)] = {};
#pragma unroll
            for (int j = 0; j < kDeep; ++j)
#pragma unroll
              for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
                if (is_in(b.with[j], src))
                  v[j][src - base] = ld_vec16(slot_at(p, p.call.own, kGather, c.lane, k, src) + b.at(j) * 16);
#pragma unroll
            for (int j = 0; j < kDeep; ++j)
#pragma unroll
              for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
                if (is_in(b.with[j], src)) store_piece(p, c.out[src], k, b.at(j), v[j][src - base]);
          }
        }
      },
      release);
}

template <bool kIsPlaced>
DEVICE void pipeline(const CollectiveParams& p) {
  __shared__ Meeting s;
  __shared__ Cut c;
  wait_previous_kernel();
  if (open_call(p.call, s, 0)) {
    const int num_roles = __popc(p.roles), step = static_cast<int>(gridDim.x) / num_roles;
    u32 roles = p.roles;  // this block's is the lowest that is left
    for (int n = static_cast<int>(blockIdx.x) % num_roles; n > 0; --n) roles &= roles - 1;
    const u32 role = roles & ~(roles - 1);
#pragma unroll 1
    for (int lane = static_cast<int>(blockIdx.x) / num_roles; lane < p.num_lanes; lane += step) {
      cut_rows(p, s.active, lane, c);
      if (role == kSender) scatter_sender(p, s, c);
      if (role == kOwner) owner<kIsPlaced>(p, s, c);
      if (role == kCollector) collector(p, s, c);
      __syncthreads();
      if (s.lost_at != kNeverLost) break;
    }
  }
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_reduced(const __grid_constant__ CollectiveParams p) {
  pipeline<false>(p);
}

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_placed(const __grid_constant__ CollectiveParams p) {
  pipeline<true>(p);
}

}  // namespace epee
