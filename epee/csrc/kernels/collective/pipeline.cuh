// Large collectives: rows go in chunks through slots in the receiver's memory, with a flag behind each chunk and a
// credit back for each slot that is free again. Two crossings, as in `two_shot.cuh`, or one, as in
// `exchange.cuh`; the roles are blocks of their own, and all three work at the same time:
//
//   scatter_sender   sends each owner its row of the input: share by share, or row d for rank d
//   owner            reduces what has come from all sources into the output, and sends it on to the takers (two
//                    crossings); or places what has come, a row for each source (one crossing)
//   collector        (two crossings) copies what owners have sent into the output
//
// A lane is one block of each role, the same lane on all ranks; it has slots, flags and credits of its own, and every
// row's vectors of 16 bytes are dealt out to the lanes in runs. Nobody meets anybody but through these words:
//   flag   (stage, lane, source)  at the receiver: call number << 20 | chunks written; released behind their bytes by a
//                                 thread that met those that stored them at a barrier of the block
//   credit (stage, lane, reader)  at the writer, likewise: chunks read. Chunk k goes into slot k % num_slots behind the
//                                 credit for chunk k - num_slots of this call; the first ones behind `joined`, as
//                                 `call.cuh` says
// A word of a later call cannot be met: its writer waits for us to join that call first.
//
// In and out may be the same memory under the rules of the other two: an element is written by an owner that has read
// it in the same thread, or by a collector behind the owner's result, for which our sender has read it.
#include "../../ptx/block_barrier.cuh"
#include "call.cuh"
#include "elements.cuh"

constexpr int kRowAlignVecs = 8;                     // shares and runs are whole lines of 128 bytes
constexpr int kChunkShift = 20;                      // a run has fewer chunks than this many bits count
CONSTANT int kHeld = kNumRanks < 4 ? kNumRanks : 4;  // ranks whose vectors a thread holds at once

/// How a lane cuts its rows; in vectors of 16 bytes.
struct Cut {
  u32 sources, owners, takers;
  i64 share_bytes;  // of the row, from one owner's part to the next one's; two crossings only
  i64 begin, end;   // of this lane, in every share or row
  int lane, num_chunks;
};

DEVICE i64 aligned_part(i64 total, int parts) {
  const i64 part = (total + parts - 1) / parts;
  return (part + kRowAlignVecs - 1) / kRowAlignVecs * kRowAlignVecs;
}

DEVICE Cut cut_of(const PipelineParams& p, u32 active, int lane) {
  Cut c;
  c.lane = lane;
  c.sources = p.root < 0 ? active : 1u << p.root;
  c.owners = c.takers = p.root < 0 ? active : active & ~(1u << p.root);
  i64 vecs = (p.num_bytes + 15) / 16;
  if (p.has_gather && c.owners) vecs = aligned_part(vecs, __popc(c.owners));
  c.share_bytes = vecs * 16;
  const i64 run = aligned_part(vecs, p.num_lanes);
  c.begin = run * lane < vecs ? run * lane : vecs;
  c.end = c.begin + run < vecs ? c.begin + run : vecs;
  c.num_chunks = c.owners ? static_cast<int>((c.end - c.begin + p.chunk_vecs - 1) / p.chunk_vecs) : 0;
  return c;
}

/// Row of the input that `owner` gets, or of the output that it sends on.
DEVICE i64 share_begin(const Cut& c, int owner) { return __popc(c.owners & ((1u << owner) - 1)) * c.share_bytes; }

DEVICE u64* flag_at(u64 region, Stage stage, int lane, int src) {
  return reinterpret_cast<u64*>(region + kRegionFlagsOffset) + (stage * kMaxLanes + lane) * kMaxRanks + src;
}
DEVICE u64* credit_at(u64 region, Stage stage, int lane, int reader) {
  return reinterpret_cast<u64*>(region + kRegionCreditsOffset) + (stage * kMaxLanes + lane) * kMaxRanks + reader;
}
DEVICE u8* slot_at(const PipelineParams& p, u64 region, Stage stage, int lane, int chunk, int src) {
  const i64 slot = (static_cast<i64>(stage) * p.num_lanes + lane) * p.num_slots + chunk % p.num_slots;
  return reinterpret_cast<u8*>(region + p.call.chunks_offset) + (slot * kNumRanks + src) * p.slot_bytes;
}
DEVICE u64 mark_of(const Meeting& s, int num_chunks) { return s.tag << kChunkShift | static_cast<u64>(num_chunks); }

/// Waits for a slot of chunk `k` at `reader`, whom this thread looks after; or for chunk `k` of `src`.
DEVICE void await_credit(const PipelineParams& p, Meeting& s, Stage stage, int lane, int k, int reader) {
  if (k < p.num_slots) return;
  if (!wait_count(p.call, s, reader, credit_at(p.call.own, stage, lane, reader), mark_of(s, k - p.num_slots + 1),
                  kWaitCredit))
    s.lost_at = k;
}
DEVICE void await_chunk(const PipelineParams& p, Meeting& s, Stage stage, int lane, int k, int src) {
  if (!wait_count(p.call, s, src, flag_at(p.call.own, stage, lane, src), mark_of(s, k + 1), kWaitFlag)) s.lost_at = k;
}

/// Runs the chunks of a role. The first warp does `await(k, rank)`, a thread for each rank, chunk after chunk; the
/// second does `release(k, rank)` likewise, and the others `move(k, thread, num_threads)` in between. So a release,
/// which waits until all stores of its chunk are at their places, costs the movers nothing, and none is ever held up by
/// a wait for the next chunk, from which a cycle through the ranks could come. All threads.
template <class Await, class Move, class Release>
DEVICE void run_chunks(Meeting& s, int num_chunks, Await await, Move move, Release release) {
  constexpr int kReady = 1, kMoved = 2;  // barriers: chunk k may be moved; has been moved
  const int thread = static_cast<int>(threadIdx.x), num_movers = static_cast<int>(blockDim.x) - 64;
  const auto is_lost = [&](int k) { return k >= *const_cast<const volatile i32*>(&s.lost_at); };
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
      if (thread < 32 + kNumRanks) release(k, thread - 32);
      __syncwarp();
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < num_chunks; ++k) {
      if (thread < kNumRanks) await(k, thread);
      __syncwarp();
      barrier_sync(kReady, num_movers + 32);
      if (is_lost(k)) break;
    }
  }
}

/// Vectors of chunk `k`.
DEVICE int chunk_length(const PipelineParams& p, const Cut& c, int k) {
  const i64 left = c.end - c.begin - static_cast<i64>(k) * p.chunk_vecs;
  return static_cast<int>(left < p.chunk_vecs ? left : p.chunk_vecs);
}
/// Byte of a row at which chunk `k` begins.
DEVICE i64 chunk_begin(const PipelineParams& p, const Cut& c, int k) {
  return (c.begin + static_cast<i64>(k) * p.chunk_vecs) * 16;
}

/// A row in user memory that ends where the tensor or the row does.
struct Row {
  u8* at;
  i64 num_bytes;
};
/// What `owner` gets of the input; or, with `base` the output, what it sends on.
DEVICE Row row_of(const PipelineParams& p, const Cut& c, u64 base, int owner) {
  if (!p.has_gather) return {reinterpret_cast<u8*>(base) + owner * p.in_stride, p.num_bytes};
  const i64 begin = share_begin(c, owner);
  return {reinterpret_cast<u8*>(base) + begin, p.num_bytes - begin};
}

/// The n-th rank behind this one, so that all send to different ones at a time.
DEVICE int rank_behind(int rank, int n) { return rank + n < kNumRanks ? rank + n : rank + n - kNumRanks; }

DEVICE void scatter_sender(const PipelineParams& p, Meeting& s, const Cut& c) {
  if (!is_in(c.sources, p.call.rank)) return;
  const u32 readers = c.owners & ~(1u << p.call.rank);
  const auto await = [&](int k, int rank) {
    if (is_in(readers, rank)) await_credit(p, s, kScatter, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    if (is_in(readers, rank)) st_release_sys(flag_at(s.peer[rank], kScatter, c.lane, p.call.rank), mark_of(s, k + 1));
  };
  run_chunks(
      s, c.num_chunks, await,
      [&](int k, int thread, int num_threads) {
        const i64 begin = chunk_begin(p, c, k);
        const int length = chunk_length(p, c, k);
#pragma unroll 1
        for (int i = thread; i < length; i += num_threads) {
#pragma unroll
          for (int first = 1; first < kNumRanks; first += kHeld) {
            Vec16 v[ROOM(kHeld, 4)] = {};
#pragma unroll
            for (int n = first; n < first + kHeld && n < kNumRanks; ++n) {
              const int d = rank_behind(p.call.rank, n);
              if (!is_in(readers, d)) continue;
              const Row row = row_of(p, c, p.in, d);
              v[n - first] = load_user(row.at, begin + i * 16, row.num_bytes);
            }
#pragma unroll
            for (int n = first; n < first + kHeld && n < kNumRanks; ++n) {
              const int d = rank_behind(p.call.rank, n);
              if (!is_in(readers, d)) continue;
              st_vec16(slot_at(p, s.peer[d], kScatter, c.lane, k, p.call.rank) + i * 16, v[n - first]);
            }
          }
        }
      },
      release);
}

/// Whose chunks an owner reads from slots, and whose slots it writes to.
struct Neighbours {
  u32 writers, readers;
};

/// Hands vector `i` of a chunk from every source to `take(src, vector)`, in rank order; own ones come from the input.
template <class Take>
DEVICE void take_sources(const PipelineParams& p, const Cut& c, const Neighbours& with, int k, int i, Take take) {
  Vec16 own = {};
  if (is_in(c.sources, p.call.rank)) {
    const Row row = row_of(p, c, p.in, p.call.rank);
    own = load_user(row.at, chunk_begin(p, c, k) + i * 16, row.num_bytes);
  }
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kHeld) {
    Vec16 v[ROOM(kHeld, 4)] = {};
#pragma unroll
    for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
      if (is_in(with.writers, src)) v[src - base] = ld_vec16(slot_at(p, p.call.own, kScatter, c.lane, k, src) + i * 16);
#pragma unroll
    for (int src = base; src < base + kHeld && src < kNumRanks; ++src) {
      Words<4> w;  // word by word: a choice of whole vectors would be an index known at run time only
#pragma unroll
      for (int j = 0; j < 4; ++j) w.word[j] = src == p.call.rank ? own.word[j] : v[src - base].word[j];
      if (is_in(c.sources, src)) take(src, w);
    }
  }
}

DEVICE Vec16 vector_of(const Words<4>& w) { return {{w.word[0], w.word[1], w.word[2], w.word[3]}}; }

template <bool kIsPlaced>
DEVICE void owner(const PipelineParams& p, Meeting& s, const Cut& c) {
  if (!is_in(c.owners, p.call.rank)) return;
  const u32 others = ~(1u << p.call.rank);
  const Neighbours with = {c.sources & others, p.has_gather ? c.takers & others : 0};
  const auto await = [&](int k, int rank) {
    if (is_in(with.readers, rank)) await_credit(p, s, kGather, c.lane, k, rank);
    if (is_in(with.writers, rank)) await_chunk(p, s, kScatter, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    const u64 mark = mark_of(s, k + 1);
    fence_acq_rel_sys();  // for both words
    if (is_in(with.readers, rank)) st_relaxed_sys(flag_at(s.peer[rank], kGather, c.lane, p.call.rank), mark);
    if (is_in(with.writers, rank)) st_relaxed_sys(credit_at(s.peer[rank], kScatter, c.lane, p.call.rank), mark);
  };
  Row to = {reinterpret_cast<u8*>(p.out), p.num_bytes};
  if (p.has_gather) to = row_of(p, c, p.out, p.call.rank);
  run_chunks(
      s, c.num_chunks, await,
      [&](int k, int thread, int num_threads) {
        const i64 begin = chunk_begin(p, c, k);
        const int length = chunk_length(p, c, k);
#pragma unroll 1
        for (int i = thread; i < length; i += num_threads) {
          if (kIsPlaced) {
            u8* out = reinterpret_cast<u8*>(p.out);
            take_sources(p, c, with, k, i, [&](int src, const Words<4>& w) {
              store_user(out + src * p.out_stride, begin + i * 16, p.num_bytes, vector_of(w));
            });
            continue;
          }
          Accumulator<4> sum;
          take_sources(p, c, with, k, i, [&](int, const Words<4>& w) { sum.add(w); });
          const Vec16 result = vector_of(sum.result());
#pragma unroll
          for (int n = 1; n < kNumRanks; ++n) {
            const int d = rank_behind(p.call.rank, n);
            if (is_in(with.readers, d))
              st_vec16(slot_at(p, s.peer[d], kGather, c.lane, k, p.call.rank) + i * 16, result);
          }
          store_user(to.at, begin + i * 16, to.num_bytes, result);
        }
      },
      release);
}

DEVICE void collector(const PipelineParams& p, Meeting& s, const Cut& c) {
  if (!p.has_gather || !is_in(c.takers, p.call.rank)) return;
  const u32 writers = c.owners & ~(1u << p.call.rank);
  const auto await = [&](int k, int rank) {
    if (is_in(writers, rank)) await_chunk(p, s, kGather, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    if (is_in(writers, rank)) st_release_sys(credit_at(s.peer[rank], kGather, c.lane, p.call.rank), mark_of(s, k + 1));
  };
  run_chunks(
      s, c.num_chunks, await,
      [&](int k, int thread, int num_threads) {
        const i64 begin = chunk_begin(p, c, k);
        const int length = chunk_length(p, c, k);
#pragma unroll 1
        for (int i = thread; i < length; i += num_threads) {
#pragma unroll
          for (int base = 0; base < kNumRanks; base += kHeld) {
            Vec16 v[ROOM(kHeld, 4)] = {};
#pragma unroll
            for (int src = base; src < base + kHeld && src < kNumRanks; ++src)
              if (is_in(writers, src))
                v[src - base] = ld_vec16(slot_at(p, p.call.own, kGather, c.lane, k, src) + i * 16);
#pragma unroll
            for (int src = base; src < base + kHeld && src < kNumRanks; ++src) {
              if (!is_in(writers, src)) continue;
              const Row row = row_of(p, c, p.out, src);
              store_user(row.at, begin + i * 16, row.num_bytes, v[src - base]);
            }
          }
        }
      },
      release);
}

template <bool kIsPlaced>
DEVICE void pipeline(const PipelineParams& p) {
  __shared__ Meeting s;
  wait_previous_kernel();
  if (open_call(p.call, s, 0, p.root)) {
    const int num_roles = p.has_gather ? 3 : 2;
    const Cut c = cut_of(p, s.active, static_cast<int>(blockIdx.x) / num_roles);
    const int role = static_cast<int>(blockIdx.x) % num_roles;
    if (role == 0) scatter_sender(p, s, c);
    if (role == 1) owner<kIsPlaced>(p, s, c);
    if (role == 2) collector(p, s, c);
  }
  close_call(p.call, s);
}

namespace epee {

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_reduced(const __grid_constant__ PipelineParams p) {
  pipeline<false>(p);
}

__global__ void __launch_bounds__(kPipelineThreads, kPipelineBlocks)
    collective_pipeline_placed(const __grid_constant__ PipelineParams p) {
  pipeline<true>(p);
}

}  // namespace epee
