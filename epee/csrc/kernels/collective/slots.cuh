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
//   credit (stage, lane, reader)  at the writer, likewise: chunks read. Of n slots chunk k goes into slot k % n behind
//                                 the credit for chunk k - n of this call; the first ones behind `joined`, as
//                                 `call.cuh` says
// A source has `num_slots` slots in a lane; the only one of a call has those of all ranks in the first crossing
// (`scatter_slots`).
// Threads store into slots, or bulk copies do by the rules of `push.cuh`: rows that a sender sends, by a thread for
// each receiver, which does all three steps itself; results of an owner, from shared memory, in the thread that then
// tells. The writer alone decides which (`stage_bytes`, and where its rows begin), ranks need not agree on it: chunks,
// slots, flags and credits are the same for both, and whoever acquires a flag sees the bytes by ordinary loads.
// A word of a later call cannot be met: its writer waits for us to join that call first.
//
// Who may have to make the call again (`kSaves`, mode "mask") copies what of its row it writes over, in passing: a
// sender of two crossings what it sends, in front of the flag behind which it may be written over, an owner its own
// part. What has not been sent when the call is lost has not been written over, and is copied then (`save_rest`): so
// when the kernel ends the copy is whole. It costs a store of each vector that the kernel has loaded anyway.
//
// In and out may be the same memory under the rules of the other two: an element is written by an owner that has read
// it in the same thread, or by a collector behind the owner's result, for which our sender has read it.
#pragma once
#include "../../common/chunks.cuh"
#include "push.cuh"

enum Role : u32 { kSender = 1, kOwner = 2, kCollector = 4 };

DEVICE int slots_of(const CollectiveParams& p, Stage stage) {
  return stage == kScatter ? p.scatter_slots : p.num_slots;
}
DEVICE u8* slot_at(const CollectiveParams& p, u64 region, Stage stage, int lane, int chunk, int src) {
  const int num_slots = slots_of(p, stage), slot = chunk % num_slots;
  const i64 first = (static_cast<i64>(stage) * p.num_lanes + lane) * p.num_slots * kNumRanks;
  const int place = num_slots == p.num_slots ? slot * kNumRanks + src : slot;
  return reinterpret_cast<u8*>(region + p.call.chunks_offset) + (first + place) * p.slot_bytes;
}
/// Waits for a slot of chunk `k` at `reader`, whom this thread looks after; or for chunk `k` of `src`.
DEVICE void await_credit(const CollectiveParams& p, Meeting& s, Stage stage, int lane, int k, int reader) {
  const int num_slots = slots_of(p, stage);
  if (k < num_slots) return;
  if (!wait_count(p.call, s, reader, credit_at(p.call.own, stage, lane, reader), mark_of(s, k - num_slots + 1),
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
template <bool kSaves>
DEVICE void push_rows(const CollectiveParams& p, Meeting& s, Cut& c, u32 readers, Outbox& box) {
  const int n = sender_number(), d = rank_behind(p.call.rank, n);
  if (n == 0 || !is_in(readers, d)) return;
  const u64* credit = credit_at(p.call.own, kScatter, c.lane, d);
  const u64 saved = kSaves && p.has_gather && c.saved ? c.saved + (c.in[d].at - p.inputs[p.call.rank]) : 0;
  c.num_saved[d] = push_piece<kSaves>(
      p, s, c.in[d], saved, n, box, [&](int k) { return slot_at(p, s.peer[d], kScatter, c.lane, k, p.call.rank); },
      [&](int k) { return ld_acquire_sys(credit) >= mark_of(s, k - p.scatter_slots + 1); },
      [&](int k) { return wait_count(p.call, s, d, credit, mark_of(s, k - p.scatter_slots + 1), kWaitCredit); },
      [&](int chunks) { st_release_sys(flag_at(s.peer[d], kScatter, c.lane, p.call.rank), mark_of(s, chunks)); });
}

template <bool kSaves>
DEVICE void scatter_sender(const CollectiveParams& p, Meeting& s, Cut& c, Outbox* box) {
  if (!is_in(c.sources, p.call.rank)) return;
  const u32 readers = c.owners & ~(1u << p.call.rank);
  if (box && may_push(p, c.in, readers)) return push_rows<kSaves>(p, s, c, readers, *box);
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
                if (kSaves && p.has_gather && c.saved && is_in(b.with[j], d))
                  save_vector(p, c, c.in[d], vector_at(p, c.in[d], k, b.at(j)), v[j][n - first]);
                if (is_in(b.with[j], d))
                  st_vec16(slot_at(p, s.peer[d], kScatter, c.lane, k, p.call.rank) + b.at(j) * 16, v[j][n - first]);
              }
          }
        }
      },
      release);
}

/// Reduces, or places; with one crossing what comes from each rank is as long as `out` says, of a reduction all alike.
template <bool kIsPlaced, bool kSaves>
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
        own_chunk<kIsPlaced, kSaves>(
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

/// Copies what of a lane this block's role has not saved before the call was lost: of each piece whose threads have
/// moved `num_moved` chunks the rest. All threads.
DEVICE void save_rest(const CollectiveParams& p, const Cut& c, u32 role, i32 num_moved) {
  const u32 me = 1u << p.call.rank;
  const u32 ranks = role == kOwner ? c.owners & me : role == kSender && p.has_gather ? c.owners & ~me : 0;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank) {
    if (!is_in(ranks, rank)) continue;
    const Piece& r = c.in[rank];
    const i64 done = c.num_saved[rank] < 0 ? static_cast<i64>(num_moved) * p.chunk_vecs : c.num_saved[rank];
#pragma unroll 1
    for (i64 i = r.begin + done + threadIdx.x; i < r.end; i += blockDim.x)
      save_vector(p, c, r, i, load_user(reinterpret_cast<const u8*>(r.at), i * 16, r.num_bytes));
  }
}

/// What this block does of a call that goes through slots; without a box threads copy all rows. `saved`: where this
/// rank's row is saved, or 0; nothing else is done if the call `is_lost` already.
template <bool kIsPlaced, bool kSaves = false>
DEVICE void move_in_chunks(const CollectiveParams& p, Meeting& s, Cut& c, Outbox* box, u64 saved = 0,
                           bool is_lost = false) {
  const int num_roles = __popc(p.roles), step = static_cast<int>(gridDim.x) / num_roles;
  u32 roles = p.roles;  // this block's is the lowest that is left
  for (int n = static_cast<int>(blockIdx.x) % num_roles; n > 0; --n) roles &= roles - 1;
  const u32 role = roles & ~(roles - 1);
  if (kSaves && threadIdx.x == 0) c.saved = saved;
#pragma unroll 1
  for (int lane = static_cast<int>(blockIdx.x) / num_roles; lane < p.num_lanes; lane += step) {
    cut_rows(p, s.active, lane, p.num_lanes, c);
    if (role == kSender && !is_lost) scatter_sender<kSaves>(p, s, c, box);
    if (role == kOwner && !is_lost) owner<kIsPlaced, kSaves>(p, s, c);
    if (role == kCollector && !is_lost) collector(p, s, c);
    __syncthreads();
    const i32 num_moved = is_lost ? 0 : s.lost_at;
    is_lost = is_lost || num_moved != kNeverLost;
    if (is_lost && !(kSaves && saved)) break;
    if (kSaves && is_lost) save_rest(p, c, role, num_moved);
    if (kSaves) __syncthreads();  // `c` has been read
  }
}
