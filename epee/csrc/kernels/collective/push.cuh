// Bulk copies (the copy engine of an SM) into slots of peers. They carry more over NVLink than stores of threads do,
// and begin later: they are for large calls (`CollectivePlan.bulk_bytes`).
//
// A sender, one thread for each rank that it sends to: input -> stage in shared memory -> slot, in units of some
// kilobytes, `kPushStages` of them at once. An owner's result is staged by the threads that reduce, and pushed to each
// reader by the thread that tells it (`push_result`). Order, for each chunk:
//   1. credit     acquired (or `joined`, at first): who had the slot before has read it by ordinary loads; then
//                 fence.proxy.async, as the copy writes it through the async proxy
//   2. load       the input was written by kernels before this one, or lies still: it needs no fence. It completes on
//                 an mbarrier, on which the thread waits that then stores
//   3. store      of the stage; a group of this thread's for each unit. A stage is loaded again behind
//                 `bulk_wait_read`. What threads have staged they fence (fence.proxy.async) in front of the barrier of
//                 the block behind which it is stored
//   4. wait_group (not `.read`) of this thread: the bytes are in the slot. Such a completion has a proxy fence of its
//                 own, so they are visible to this thread's ordinary accesses
//   5. flag       released by this very thread at system scope: who acquires it sees the bytes by ordinary loads
// In front of each wait for a peer all units that were stored are completed and told, so that nobody waits for a flag
// that is held back here. Who ends early waits for its own loads and stores first: the stages are used again.
//
// The last bytes of a row that are no whole vector go by ordinary stores in front of the flag. A row that begins at
// no multiple of 16 bytes is copied by threads (`slots.cuh`), as all are if the launch has no stages.
#pragma once
#include "../../ptx/bulk.cuh"
#include "rows.cuh"

constexpr int kPushStages = 4;
constexpr int kPushAhead = 2;   // units whose loads are under way
constexpr int kPushBehind = 2;  // and those whose stores are, when the next one is begun
constexpr int kStageAlign = 128;

/// The mbarriers of a block's senders, and how many loads each has made; a sender is one thread, and has its own.
struct Outbox {
  u64 barriers[kMaxRanks][kPushStages];
  u32 num_loads[kMaxRanks];
};

/// Which of the block's senders this thread is, from 1 on; 0: none. Each has a warp of its own in large blocks.
DEVICE int sender_number() {
  const int step = static_cast<int>(blockDim.x) / kNumRanks, n = static_cast<int>(threadIdx.x) / step;
  return static_cast<int>(threadIdx.x) % step == 0 && n < kNumRanks ? n : 0;
}

/// Makes the mbarriers; all threads, once a kernel.
DEVICE void open_outbox(Outbox& box) {
  const int n = sender_number();
  if (n == 0) return;
#pragma unroll 1
  for (int i = 0; i < kPushStages; ++i) mbarrier_init(&box.barriers[n][i], 1);
  box.num_loads[n] = 0;
  fence_mbarrier_init();
}

/// Whether the pieces of some ranks begin where bulk copies may.
DEVICE bool may_push(const CollectiveParams& p, const Piece* pieces, u32 ranks) {
  u64 bits = p.stage_bytes ? 0 : 1;
#pragma unroll 1
  for (int rank = 0; rank < kNumRanks; ++rank)
    if (is_in(ranks, rank)) bits |= pieces[rank].at;
  return bits % 16 == 0;
}

/// What of a piece goes in bulk: unit `u`, of chunk `u / num_per_chunk`.
struct Units {
  i64 num_bytes;  // of the piece, without what the row does not have
  int chunk_bytes, unit_bytes, num_per_chunk, count;

  DEVICE static Units of(const CollectiveParams& p, const Piece& r) {
    Units w;
    const i64 there = r.num_bytes - r.begin * 16, all = (r.end - r.begin) * 16;
    w.num_bytes = there < all ? there : all;
    w.chunk_bytes = p.chunk_vecs * 16;
    w.unit_bytes = p.stage_bytes / ((kNumRanks > 1 ? kNumRanks - 1 : 1) * kPushStages) / kStageAlign * kStageAlign;
    w.num_per_chunk = (w.chunk_bytes + w.unit_bytes - 1) / w.unit_bytes;
    w.count = r.num_chunks * w.num_per_chunk;
    return w;
  }
  DEVICE int offset(int u) const { return u % num_per_chunk * unit_bytes; }  // in the chunk
  DEVICE i64 at(int u) const { return static_cast<i64>(u / num_per_chunk) * chunk_bytes + offset(u); }
  /// How many bytes it has, at most a unit's.
  DEVICE int size(int u) const {
    const i64 left = num_bytes - at(u);
    const int most = chunk_bytes - offset(u) < unit_bytes ? chunk_bytes - offset(u) : unit_bytes;
    return left <= 0 ? 0 : left < most ? static_cast<int>(left) : most;
  }
};

/// Waits for a load of this SM, which always ends; the bound is there as every wait has one. False behind a report.
DEVICE_COLD bool wait_load_timed(const CollectiveCall& call, u64 tag, u64* barrier, u32 parity) {
  if (bounded_wait_here(call.timeout_ns, [&] { return mbarrier_try_wait(barrier, parity); })) return true;
  report_failure(call, tag, {kTimeout, call.rank, 0, 0, kWaitLoad});
  return false;
}

/// Sends rank `d`, this thread's, its piece. `slot(k)` is where chunk `k` goes; `has_slot(k)` looks whether it may, and
/// `await_slot(k)` waits for it, false when the call is lost; `tell(k)` releases the flag for `k` chunks. What is sent
/// is also stored where `saved` is for the row's begin, unless that is 0. Returns how many vectors were sent.
template <bool kSaves, class Slot, class HasSlot, class AwaitSlot, class Tell>
DEVICE i64 push_piece(const CollectiveParams& p, Meeting& s, const Piece& r, u64 saved, int n, Outbox& box, Slot slot,
                      HasSlot has_slot, AwaitSlot await_slot, Tell tell) {
  const Units w = Units::of(p, r);
  const u8* from = reinterpret_cast<const u8*>(r.at) + r.begin * 16;
  u8* stages = dynamic_shared() + (n - 1) * kPushStages * w.unit_bytes;
  const u32 before = box.num_loads[n];
  const auto stage = [&](int u) { return stages + (before + u) % kPushStages * w.unit_bytes; };
  const auto load = [&](int u) {  // its stage was stored from kPushStages units ago
    bulk_wait_read<kPushStages - kPushAhead - 1>();
    const u32 bytes = static_cast<u32>(w.size(u)) & ~15u;
    u64* barrier = &box.barriers[n][(before + u) % kPushStages];
    mbarrier_arrive_expect(barrier, bytes);
    if (bytes) bulk_load(stage(u), from + w.at(u), bytes, barrier);
  };
  const auto loaded = [&](int u) {
    u64* barrier = &box.barriers[n][(before + u) % kPushStages];
    const u32 parity = (before + u) / kPushStages & 1;
    return mbarrier_try_wait(barrier, parity) || wait_load_timed(p.call, s.tag, barrier, parity);
  };
  int num_told = 0, num_loads = 0, u = 0, is_lost = 0;
  const auto told = [&](int num_stored) {
    const int chunks = num_stored / w.num_per_chunk;
    if (chunks > num_told) tell(num_told = chunks);
  };
  fence_proxy_async();
#pragma unroll 1
  for (; u < w.count; ++u) {
#pragma unroll 1
    for (; num_loads < w.count && num_loads <= u + kPushAhead; ++num_loads) load(num_loads);
    const int k = u / w.num_per_chunk;
    if (u % w.num_per_chunk == 0) perhaps_stall(s.tag, p.call.rank, 5);
    if (u % w.num_per_chunk == 0 && k >= p.scatter_slots) {
      if (!has_slot(k)) {
        bulk_wait<0>();
        told(u);
        is_lost = !await_slot(k);
      }
      fence_proxy_async();
    }
    if (is_lost || !loaded(u)) {
      s.lost_at = k;
      break;
    }
    const int bytes = w.size(u), whole = bytes & ~15;
    if (whole) bulk_store(slot(k) + w.offset(u), stage(u), static_cast<u32>(whole));
    u8* copy = reinterpret_cast<u8*>(saved) + r.begin * 16 + w.at(u);
    if (kSaves && saved && whole) bulk_store(copy, stage(u), static_cast<u32>(whole));
    bulk_commit();
    if (bytes > whole) {
      const Vec16 last = load_user(from, w.at(u) + whole, w.num_bytes);
      store_ragged(slot(k) + w.offset(u) + whole, bytes - whole, last);
      if (kSaves && saved) store_ragged(copy + whole, bytes - whole, last);
    }
    bulk_wait<kPushBehind>();
    told(u + 1 - kPushBehind);
  }
#pragma unroll 1
  for (int left = u; left < num_loads; ++left) loaded(left);
  bulk_wait<0>();
  told(u);
  box.num_loads[n] = before + static_cast<u32>(num_loads);
  return w.at(u) / 16;
}

/// Begins to push the staged result of a chunk to a slot.
DEVICE void push_result(u8* slot, const u8* stage, int num_bytes) {
  fence_proxy_async();  // the slot was read by ordinary loads
  bulk_store(slot, stage, static_cast<u32>(num_bytes));
  bulk_commit();
}
