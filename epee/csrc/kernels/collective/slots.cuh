// Large collectives whose rows do not all lie in pools (those: `direct.cuh`): rows go in chunks through slots in the
// receiver's memory, with a flag behind each chunk and a credit back for each slot that is free again. Two crossings,
// as in `two_shot.cuh`, or one, as in `exchange.cuh`; the roles are blocks of their own, and all three work at the
// same time:
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
// Threads store into slots, or bulk copies do by the rules of `push.cuh`: rows that a sender sends, by a thread for
// each receiver, which does all three steps itself; results of an owner, from shared memory, in the thread that then
// tells. The writer alone decides which (`stage_bytes`, and where its rows begin), ranks need not agree on it: chunks,
// slots, flags and credits are the same for both, and whoever acquires a flag sees the bytes by ordinary loads.
// A word of a later call cannot be met: its writer waits for us to join that call first.
//
// In and out may be the same memory under the rules of the other two: an element is written by an owner that has read
// it in the same thread, or by a collector behind the owner's result, for which our sender has read it.
#pragma once
#include "../../common/chunks.cuh"
#include "push.cuh"

enum Role : u32 { kSender = 1, kOwner = 2, kCollector = 4 };

DEVICE u8* slot_at(const CollectiveParams& p, u64 region, Stage stage, int lane, int chunk, int src) {
  const i64 slot = (static_cast<i64>(stage) * p.num_lanes + lane) * p.num_slots + chunk % p.num_slots;
  return reinterpret_cast<u8*>(region + p.call.chunks_offset) + (slot * kNumRanks + src) * p.slot_bytes;
}
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
/// Sends each owner its row in bulk.
DEVICE void push_rows(const CollectiveParams& p, Meeting& s, const Cut& c, u32 readers, Outbox& box) {
  const int n = sender_number(), d = rank_behind(p.call.rank, n);
  if (n == 0 || !is_in(readers, d)) return;
  const u64* credit = credit_at(p.call.own, kScatter, c.lane, d);
  push_piece(
      p, s, c.in[d], n, box, [&](int k) { return slot_at(p, s.peer[d], kScatter, c.lane, k, p.call.rank); },
      [&](int k) { return ld_acquire_sys(credit) >= mark_of(s, k - p.num_slots + 1); },
      [&](int k) { return wait_count(p.call, s, d, credit, mark_of(s, k - p.num_slots + 1), kWaitCredit); },
      [&](int chunks) { st_release_sys(flag_at(s.peer[d], kScatter, c.lane, p.call.rank), mark_of(s, chunks)); });
}

DEVICE void scatter_sender(const CollectiveParams& p, Meeting& s, const Cut& c, Outbox* box) {
  if (!is_in(c.sources, p.call.rank)) return;
  const u32 readers = c.owners & ~(1u << p.call.rank);
  if (box && may_push(p, c.in, readers)) return push_rows(p, s, c, readers, *box);
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
        Batch b = {thread, num_threads, p.chunk_vecs, {}};
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

/// Reduces, or places; with one crossing what comes from each rank is as long as `out` says, of a reduction all alike.
template <bool kIsPlaced>
DEVICE void owner(const CollectiveParams& p, Meeting& s, const Cut& c) {
  if (!is_in(c.owners, p.call.rank)) return;
  const u32 others = ~(1u << p.call.rank);
  const u32 writers = c.sources & others, readers = p.has_gather ? c.owners & others : 0;
  const Piece& mine = c.out[p.call.rank];
  const bool is_staged = p.stage_bytes && readers;
  const auto stage = [&](int k) { return dynamic_shared() + k % 2 * p.chunk_vecs * 16; };
  const auto comes = [&](int k, int rank) {
    return is_in(writers, rank) && k < (p.has_gather ? mine : c.out[rank]).num_chunks;
  };
  const auto await = [&](int k, int rank) {
    if (is_in(readers, rank)) await_credit(p, s, kGather, c.lane, k, rank);
    if (comes(k, rank)) await_chunk(p, s, kScatter, c.lane, k, rank);
  };
  const auto release = [&](int k, int rank) {
    const u64 mark = mark_of(s, k + 1);
    const bool has_reader = is_in(readers, rank);
    if (is_staged && has_reader) {
      const i64 vecs = mine.end - vector_at(p, mine, k, 0);
      const int num_bytes = static_cast<int>(vecs < p.chunk_vecs ? vecs : p.chunk_vecs) * 16;
      push_result(slot_at(p, s.peer[rank], kGather, c.lane, k, p.call.rank), stage(k), num_bytes);
    }
    fence_acq_rel_sys();  // for both words
    if (comes(k, rank)) st_relaxed_sys(credit_at(s.peer[rank], kScatter, c.lane, p.call.rank), mark);
    u64* flag = flag_at(s.peer[rank], kGather, c.lane, p.call.rank);
    if (has_reader && !is_staged) st_relaxed_sys(flag, mark);
    if (!has_reader || !is_staged) return;
    bulk_wait<0>();
    st_release_sys(flag, mark);
  };
  run_chunks(
      s.lost_at, kIsPlaced ? most_chunks(c.out, c.sources) : mine.num_chunks, kNumRanks, await,
      [&](int k, int thread, int num_threads) {
        own_chunk<kIsPlaced>(
            p, c, k, {thread, num_threads, p.chunk_vecs, {}},
            [&](int src, int i) { return ld_vec16(slot_at(p, p.call.own, kScatter, c.lane, k, src) + i * 16); },
            [&](int i, const Vec16& result) {
              if (is_staged) *reinterpret_cast<Vec16*>(stage(k) + i * 16) = result;
              if (is_staged) return;
#pragma unroll
              for (int n = 1; n < kNumRanks; ++n) {
                const int d = rank_behind(p.call.rank, n);
                if (is_in(readers, d))
                  st_vec16(slot_at(p, s.peer[d], kGather, c.lane, k, p.call.rank) + i * 16, result);
              }
            });
        if (is_staged) fence_proxy_async();  // in front of the barrier behind which it is pushed
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
        collect_chunk(p, c, k, writers, {thread, num_threads, p.chunk_vecs, {}}, [&](int src, int i) {
          return ld_vec16(slot_at(p, p.call.own, kGather, c.lane, k, src) + i * 16);
        });
      },
      release);
}

/// What this block does of a call that goes through slots; without a box threads copy all rows.
template <bool kIsPlaced>
DEVICE void move_in_chunks(const CollectiveParams& p, Meeting& s, Cut& c, Outbox* box) {
  const int num_roles = __popc(p.roles), step = static_cast<int>(gridDim.x) / num_roles;
  u32 roles = p.roles;  // this block's is the lowest that is left
  for (int n = static_cast<int>(blockIdx.x) % num_roles; n > 0; --n) roles &= roles - 1;
  const u32 role = roles & ~(roles - 1);
#pragma unroll 1
  for (int lane = static_cast<int>(blockIdx.x) / num_roles; lane < p.num_lanes; lane += step) {
    cut_rows(p, s.active, lane, p.num_lanes, c);
    if (role == kSender) scatter_sender(p, s, c, box);
    if (role == kOwner) owner<kIsPlaced>(p, s, c);
    if (role == kCollector) collector(p, s, c);
    __syncthreads();
    if (s.lost_at != kNeverLost) break;
  }
}
