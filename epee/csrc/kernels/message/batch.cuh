// Messages between two ranks: sends and receives of a batch, all at the same time, through rings in the receiver's
// memory.
//
// Region of a rank (offsets from the Python `Layout`). Peers write what is marked *; each such word has one writer,
// named by its index:
//   flags    *[source][lane]       chunks that the source has ever written into this lane of its ring here
//   credits  *[destination][lane]  chunks that the destination has ever read of ours there
//   gone     *[rank][4]            1: the rank has given a message of the pair up, 2: its receive does not fit ours;
//                                  then which fact differs, what it has, and what we have. Released by the first word
//   sent, taken [rank][lane]       local: as many as we have written to the rank, and read of it
//   peers, lost, reported, news    local: where this GPU sees the regions of all ranks (0: not met yet); pairs that
//                                  have lost a message, and that the host has heard so; as in `common/wait.cuh`
//   rings_here, rings_there [rank] local: where this GPU sees the ring of a source here, and ours at a destination
//
// A ring [lane][slot] has a chunk in each slot: its bytes, and behind them the header of the message that begins there.
// Rings of the ranks that the group had when the region was made lie behind its words, that of a rank which joined
// later in a region of its own; only the source writes into one. The words have room for all ranks of an NVLink domain.
//
// A message goes from one rank to one other: an ordered pair has a ring of its own, cut into lanes. The message's
// vectors of 16 bytes are dealt out to as many lanes as its size asks for (`lanes_of`, alike at both ends), in runs,
// and each lane's run goes in chunks. Chunk c of a lane, counted over all messages, lies in slot c % num_slots:
//   sender    waits for `credits >= c + 1 - num_slots`, stores bytes (and header), releases `flags = c + 1`
//   receiver  waits for `flags >= c + 1`, compares the header with its own facts, copies, releases `credits = c + 1`
// The counts live in device memory and are written by the one block that has the lane in this kernel, when the message
// is through; kernels of the same pair and direction run one after the other (the host sees to that), so a graph that
// is replayed counts on, and the two ends agree because both count the same messages of the same sizes, in order.
// A message that fits into its lanes' slots is sent without the receiver: its kernel ends when the bytes lie there.
//
// Facts: tag, bytes and dtype, in the header of every lane's first chunk. A receive takes the next message of the pair;
// if a fact differs it is an error on both ends: on the receiver's at once, on the sender's by `gone`, in the kernel
// that still sends, or in the next one of the pair. A receive from any source takes the first message that has its tag.
//
// A batch is one kernel. Its sends and receives of one pair and direction are a channel; the blocks of a channel do its
// messages in order, and the lanes of a message in ascending order, block b lanes b, b + n ... So of each channel the
// lowest lane of the oldest message that has not ended goes on at both ends, whatever the grids are, if one block of
// each channel is in its place: the first blocks of the grid belong to a channel each. No channel waits for another.
//
// A wait ends with a report when the time is over, the host aborts, the peer is known to be dead or has given up;
// without one when the pair has lost another message meanwhile. A message that fails is lost, and so are all that
// follow in its pair, both ways, until the two hosts have met and emptied the words (`messages/pairs.py`). What the
// receiver's memory holds of it is not said. Who dies between two steps leaves a flag that does not come, or a ring
// that nobody reads: its peer's wait ends by the word of its death. Nothing traps. Which of the host's messages are
// lost tell the tickets of launches: a kernel of a pair and direction that loses something stores its own in `failed`,
// where none stands yet; as these run in order, all from that one on are lost, until the hosts have met.
//
// Death and order. A message has two ends, so what the survivor holds decides alone, and nobody has to agree. A receive
// that hears that its source is dead looks once more at the flag, acquiring: a chunk whose flag is there counts. In
// mode "mask" the word of a death comes when the process has ended altogether (the driver has taken its context down
// before), so that look is final: a message all of whose flags lie there is received, whenever its sender died; any
// other one is lost for good, as nothing will be stored there any more. A send that lay in the ring has ended well,
// whether its receiver lived to take it or not. A receive from any source, in mode "mask", gives up its pair with a
// dead rank and waits on for the others.
#include "../../common/chunks.cuh"
#include "../../common/report.cuh"
#include "../../common/stall.cuh"
#include "../../common/user.cuh"
#include "../../common/work.cuh"

/// Polls between two looks at the clock and at words of this GPU's memory.
constexpr u32 kPollsPerGlance = 64 < kMostPolls ? 64 : kMostPolls;
constexpr int kRunAlignVecs = 8;   // runs are whole lines of 128 bytes
constexpr int kHeaderBytes = 128;  // behind the bytes of a slot
constexpr int kDeep = 6;           // vectors of a thread whose loads are under way at once
constexpr int kGoneWords = 4;
enum Gone : u64 { kGaveUp = 1, kDiffers };
/// Which wait a report is about, or which fact differs; the host has the words for them.
enum Place : u64 { kWaitMessage = 1, kWaitChunk, kWaitCredit, kWaitAny, kFactTag, kFactBytes, kFactDtype };

/// A send or a receive.
struct Wanted {
  u64 at;
  i64 num_bytes;
  u64 tag, dtype;
};

/// What a block moves at a time.
struct Lane {
  Wanted wanted;
  u64 region;  // the peer's
  u64 ring;    // where the chunks lie
  u64 count;   // chunks of the lane before this message
  i64 begin, end;
  int peer, lane, num_chunks;
  int first_slot;  // of this message
  i32 lost_at;
};

DEVICE u64* own_words(const MessageParams& p, u64 offset) { return reinterpret_cast<u64*>(p.own + offset); }
DEVICE u64* lane_word(u64 region, u64 offset, int rank, int lane) {
  return reinterpret_cast<u64*>(region + offset) + rank * kMaxLanes + lane;
}
/// In which slot a lane's chunk lies, counted over all messages.
DEVICE int slot_of(const MessageParams& p, u64 count) {
  return static_cast<int>(count % static_cast<u64>(p.num_slots));
}
DEVICE u8* slot_at(const MessageParams& p, u64 ring, int lane, int slot) {
  const int at = lane * p.num_slots + slot;
  return reinterpret_cast<u8*>(ring) + static_cast<u64>(at) * static_cast<u64>(p.slot_bytes + kHeaderBytes);
}
/// Into how many lanes a message is dealt out; both ends compute it.
DEVICE int lanes_of(const MessageParams& p, i64 num_bytes) {
  const i64 lanes = (num_bytes + p.lane_bytes - 1) / p.lane_bytes;
  return lanes < 1 ? 1 : lanes < p.num_lanes ? static_cast<int>(lanes) : p.num_lanes;
}
DEVICE Wanted wanted_of(const MessageParams& p, int n) {
  if (n < kOpsInside) { return {p.ops[4 * n], static_cast<i64>(p.ops[4 * n + 1]), p.ops[4 * n + 2], p.ops[4 * n + 3]}; }
  const u64* ops = reinterpret_cast<const u64*>(p.more) + 4 * (n - kOpsInside);  // in the host's memory
  return {ops[0], static_cast<i64>(ops[1]), ops[2], ops[3]};
}

/// Loses the pair, and tells the host and the peer; the first one does.
DEVICE_COLD void lose(const MessageParams& p, int peer, int op, u32 code, u64 expected, u64 got, u64 where) {
  if (atom_exch_relaxed_gpu(own_words(p, kRegionLostOffset) + peer, 1)) return;
  add_report(own_words(p, kRegionReportedOffset) + peer, reinterpret_cast<u64*>(p.report),
             static_cast<u64>(kNumReports + peer), static_cast<u64>(op) << 32 | code, peer, expected, got, where);
  const u64 region = ld_relaxed_sys(own_words(p, kRegionPeersOffset) + peer);
  if (!region || peer == p.rank) return;
  u64* gone = reinterpret_cast<u64*>(region + kRegionGoneOffset) + p.rank * kGoneWords;
  st_relaxed_sys(gone + 1, where);
  st_relaxed_sys(gone + 2, expected);
  st_relaxed_sys(gone + 3, got);
  st_release_sys(gone, code == kMismatch ? kDiffers : kGaveUp);
}

/// Notes that this launch has lost a message of a pair and direction; kernels of those run one after the other.
DEVICE_COLD void note_failed(const MessageParams& p, int channel) {
  u64* failed = reinterpret_cast<u64*>(p.failed) + channel;
  if (p.ticket && !ld_relaxed_sys(failed)) st_relaxed_sys(failed, p.ticket);
}

constexpr u32 kLostElsewhere = 0xFF;

/// Whether the host says so. This GPU's copy of its words may be about a process in whose place another one is now: it
/// is as old as the last wait of any pair, and one block renews it while the others read. The host's own word is not:
/// it is about the process of the pair before a kernel of the two is launched (`messages/pairs.py`).
DEVICE_COLD bool is_dead_now(const MessageParams& p, int peer) {
  return ld_relaxed_sys(reinterpret_cast<u64*>(p.abort) + kHostDead) >> peer & 1;
}

/// Why a wait for `peer` must end, 0 when it may go on: a `FailureCode` or `kLostElsewhere`.
DEVICE_COLD u32 why_stop(const MessageParams& p, int peer, u64 start) {
  const u64 now = global_time_ns();
  const HostState news = latest_news(reinterpret_cast<u64*>(p.abort), own_words(p, kRegionNewsOffset), start, now);
  if (ld_relaxed_sys(own_words(p, kRegionLostOffset) + peer)) return kLostElsewhere;
  if ((dead_ranks(news) >> peer & 1) && is_dead_now(p, peer)) return kPeerDead;
  if (is_aborted(news)) return kAborted;
  const u64 gone = ld_acquire_sys(own_words(p, kRegionGoneOffset) + peer * kGoneWords);
  if (gone) return gone == kDiffers ? kMismatch : kPeerGaveUp;
  return now - start > p.timeout_ns ? kTimeout : 0;
}

/// Reports why a wait for a peer has ended.
DEVICE_COLD void lose_wait(const MessageParams& p, int peer, int op, u32 stop, u64 tag, u64 where) {
  if (stop == kLostElsewhere) return;
  const u64* gone = own_words(p, kRegionGoneOffset) + peer * kGoneWords;
  const bool differs = stop == kMismatch;  // what the peer's receive has, beside what we sent
  lose(p, peer, op, stop, differs ? ld_relaxed_sys(gone + 3) : tag, differs ? ld_relaxed_sys(gone + 2) : 0,
       differs ? ld_relaxed_sys(gone + 1) : where);
}

/// Waits until a word that counts up has reached `want`; acquires. One thread.
DEVICE bool wait_count(const MessageParams& p, int peer, int op, const u64* word, u64 want, u64 tag, Place where) {
  perhaps_stall(want, p.rank, 2);
  u64 start = 0;
  u32 stop = 0;
  const auto must_end = [&] {
    if (start == 0) start = global_time_ns();
    stop = why_stop(p, peer, start);
    return stop != 0;
  };
  if (bounded_wait<kPollsPerGlance, kPollAgain>([&] { return ld_acquire_sys(word) >= want; }, must_end)) return true;
  lose_wait(p, peer, op, stop, tag, where);
  return false;
}

/// Whether a message that has come is the one that is wanted; else the pair is lost.
DEVICE_COLD bool compare_facts(const MessageParams& p, int peer, const u8* slot, u64 own_tag, u64 own_bytes,
                               u64 own_dtype) {
  const u64* header = reinterpret_cast<const u64*>(slot + p.slot_bytes);
  const u64 tag = ld_relaxed_sys(header), num_bytes = ld_relaxed_sys(header + 1), dtype = ld_relaxed_sys(header + 2);
  if (tag == own_tag && num_bytes == own_bytes && dtype == own_dtype) return true;
  if (tag != own_tag)
    lose(p, peer, kReceive, kMismatch, own_tag, tag, kFactTag);
  else if (dtype != own_dtype)
    lose(p, peer, kReceive, kMismatch, own_dtype, dtype, kFactDtype);
  else
    lose(p, peer, kReceive, kMismatch, own_bytes, num_bytes, kFactBytes);
  return false;
}

/// Cuts out what lane `lane` has of a message. All threads.
DEVICE void open_lane(const MessageParams& p, Lane& s, const Wanted& w, int peer, int lane, u64 rings_offset,
                      u64 counts_offset) {
  __syncthreads();  // who still reads the one before
  if (threadIdx.x == 0) {
    s.wanted = w;
    const int lanes = lanes_of(p, w.num_bytes);
    const i64 vecs = (w.num_bytes + 15) / 16;
    const i64 part = (vecs + lanes - 1) / lanes;
    const i64 run = (part + kRunAlignVecs - 1) / kRunAlignVecs * kRunAlignVecs;
    const i64 chunk_vecs = p.slot_bytes / 16;
    s.begin = run * lane < vecs ? run * lane : vecs;
    s.end = s.begin + run < vecs ? s.begin + run : vecs;
    s.num_chunks = static_cast<int>((s.end - s.begin + chunk_vecs - 1) / chunk_vecs);
    if (lane == 0 && s.num_chunks == 0) s.num_chunks = 1;  // a header without bytes
    s.peer = peer;
    s.lane = lane;
    s.region = ld_relaxed_sys(own_words(p, kRegionPeersOffset) + peer);
    s.ring = ld_relaxed_sys(own_words(p, rings_offset) + peer);
    s.count = *lane_word(p.own, counts_offset, peer, lane);
    s.first_slot = slot_of(p, s.count);  // once: a 64-bit division is long
    s.lost_at = kNeverLost;
  }
  __syncthreads();
}
DEVICE u8* slot_of_message(const MessageParams& p, const Lane& s, int k) {
  return slot_at(p, s.ring, s.lane, (s.first_slot + k) % p.num_slots);
}

/// Counts the chunks of a lane's message. All threads; false when the message is lost.
DEVICE bool close_lane(const MessageParams& p, const Lane& s, u64 counts_offset) {
  __syncthreads();
  if (s.lost_at != kNeverLost) return false;
  if (threadIdx.x == 0) *lane_word(p.own, counts_offset, s.peer, s.lane) = s.count + static_cast<u64>(s.num_chunks);
  return true;
}

/// Moves the vectors of chunk `k` from the user's row to a slot, or (`kIsSend` false) back. Those that lie whole at
/// multiples of 16 bytes, as a rule all, have loads under way without a branch between them.
template <bool kIsSend>
DEVICE void move_chunk(const MessageParams& p, const Lane& s, u8* slot, int k, int thread, int num_threads) {
  const int chunk_vecs = p.slot_bytes / 16;
  const i64 begin = s.begin + static_cast<i64>(k) * chunk_vecs;
  const int count = static_cast<int>(s.end - begin < chunk_vecs ? s.end - begin : chunk_vecs);
  u8* row = reinterpret_cast<u8*>(s.wanted.at) + begin * 16;
  const i64 there = s.wanted.num_bytes - begin * 16;  // bytes of the row, which may end within its last vector
  const int plain = s.wanted.at % 16 != 0 ? 0 : there < count * 16 ? static_cast<int>(there / 16) : count;
  const int step = num_threads * 16;
  const u8* from = (kIsSend ? row : slot) + thread * 16;
  u8* to = (kIsSend ? slot : row) + thread * 16;
#pragma unroll 1
  for (int left = plain - thread; left > 0; left -= kDeep * num_threads, from += kDeep * step, to += kDeep * step) {
    Vec16 v[kDeep];
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
      if (left > j * num_threads) v[j] = ld_vec16(from + j * step);
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
      if (left > j * num_threads) st_vec16(to + j * step, v[j]);
  }
#pragma unroll 1
  for (int i = plain + thread; i < count; i += num_threads) {
    if (kIsSend)
      st_vec16(slot + i * 16, load_user(row, i * 16, there));
    else
      store_user(row, i * 16, there, ld_vec16(slot + i * 16));
  }
}

/// Whether messages go between this rank and a lane's peer. A graph may be replayed, or a batch be completed, when the
/// host has forgotten a peer that is dead, and has not met its successor. One thread.
DEVICE bool has_pair(const MessageParams& p, const Lane& s, int op) {
  if (ld_relaxed_sys(own_words(p, kRegionLostOffset) + s.peer)) return false;
  if (s.region) return true;
  lose(p, s.peer, op, kPeerDead, s.wanted.tag, 0, op == kSend ? kWaitCredit : kWaitMessage);
  return false;
}

/// What a block does with a lane of a send. All threads; false when the pair is lost.
DEVICE bool send_lane(const MessageParams& p, Lane& s, const Wanted& w, int peer, int lane) {
  open_lane(p, s, w, peer, lane, kRegionRingsThereOffset, kRegionSentOffset);
  run_chunks(
      s.lost_at, s.num_chunks, 1,
      [&](int k, int) {
        const u64 chunk = s.count + static_cast<u64>(k), slots = static_cast<u64>(p.num_slots);
        const u64 want = chunk + 1 > slots ? chunk + 1 - slots : 0;
        const u64* credit = lane_word(p.own, kRegionCreditsOffset, peer, lane);
        bool is_open = has_pair(p, s, kSend);
        if (is_open && k == 0) {  // also where nobody has to be waited for: the peer may have refused one before
          const u64 gone = ld_acquire_sys(own_words(p, kRegionGoneOffset) + peer * kGoneWords);
          if (gone) lose_wait(p, peer, kSend, gone == kDiffers ? kMismatch : kPeerGaveUp, s.wanted.tag, kWaitCredit);
          is_open = !gone;
        }
        if (is_open && want) is_open = wait_count(p, peer, kSend, credit, want, s.wanted.tag, kWaitCredit);
        if (!is_open) s.lost_at = k;
      },
      [&](int k, int thread, int num_threads) {
        u8* slot = slot_of_message(p, s, k);
        if (k == 0 && thread == 0) {
          u64* header = reinterpret_cast<u64*>(slot + p.slot_bytes);
          st_relaxed_sys(header, s.wanted.tag);
          st_relaxed_sys(header + 1, static_cast<u64>(s.wanted.num_bytes));
          st_relaxed_sys(header + 2, s.wanted.dtype);
        }
        move_chunk<true>(p, s, slot, k, thread, num_threads);
      },
      [&](int k, int) {
        perhaps_stall(s.count + static_cast<u64>(k), p.rank, 3);
        st_release_sys(lane_word(s.region, kRegionFlagsOffset, p.rank, lane), s.count + static_cast<u64>(k) + 1);
      });
  return close_lane(p, s, kRegionSentOffset);
}

/// What a block does with a lane of a receive. All threads; false when the pair is lost.
DEVICE bool receive_lane(const MessageParams& p, Lane& s, const Wanted& w, int peer, int lane) {
  open_lane(p, s, w, peer, lane, kRegionRingsHereOffset, kRegionTakenOffset);
  run_chunks(
      s.lost_at, s.num_chunks, 1,
      [&](int k, int) {
        const u64 chunk = s.count + static_cast<u64>(k);
        const u64* flag = lane_word(p.own, kRegionFlagsOffset, peer, lane);
        const Place where = k == 0 ? kWaitMessage : kWaitChunk;
        bool is_open = has_pair(p, s, kReceive) && wait_count(p, peer, kReceive, flag, chunk + 1, s.wanted.tag, where);
        if (is_open && k == 0)
          is_open = compare_facts(p, peer, slot_of_message(p, s, 0), s.wanted.tag, static_cast<u64>(s.wanted.num_bytes),
                                  s.wanted.dtype);
        if (!is_open) s.lost_at = k;
      },
      [&](int k, int thread, int num_threads) {
        move_chunk<false>(p, s, slot_of_message(p, s, k), k, thread, num_threads);
      },
      [&](int k, int) {
        perhaps_stall(s.count + static_cast<u64>(k), p.rank, 4);
        st_release_sys(lane_word(s.region, kRegionCreditsOffset, p.rank, lane), s.count + static_cast<u64>(k) + 1);
      });
  return close_lane(p, s, kRegionTakenOffset);
}

/// Finds a rank whose next message has the tag; -1, behind a report, when none comes. One thread.
DEVICE int any_source(const MessageParams& p, const Wanted& w) {
  int found = -1, blamed = p.rank;
  u64 start = 0;
  u32 stop = 0, gone = 0;
  const auto poll = [&] {
#pragma unroll 1
    for (int rank = 0; rank < p.num_ranks && found < 0; ++rank) {
      if ((gone >> rank & 1) || !ld_relaxed_sys(own_words(p, kRegionPeersOffset) + rank)) continue;
      const u64 chunk = *lane_word(p.own, kRegionTakenOffset, rank, 0);
      if (ld_acquire_sys(lane_word(p.own, kRegionFlagsOffset, rank, 0)) <= chunk) continue;
      const u64 ring = ld_relaxed_sys(own_words(p, kRegionRingsHereOffset) + rank);
      const u64* header = reinterpret_cast<const u64*>(slot_at(p, ring, 0, slot_of(p, chunk)) + p.slot_bytes);
      if (ld_relaxed_sys(header) == w.tag) found = rank;
    }
    return found >= 0;
  };
  const auto must_end = [&] {
    if (start == 0) start = global_time_ns();
    bool has_others = false;
#pragma unroll 1
    for (int rank = 0; rank < p.num_ranks && !stop; ++rank) {
      if ((gone >> rank & 1) || rank == p.rank || !ld_relaxed_sys(own_words(p, kRegionPeersOffset) + rank)) continue;
      stop = why_stop(p, rank, start);
      if (p.skips_dead && (stop == kPeerDead || stop == kLostElsewhere)) {
        if (stop == kPeerDead && poll()) return true;  // what it has sent before counts
        lose_wait(p, rank, kReceive, stop, w.tag, kWaitAny);
        gone |= 1u << rank;
        stop = 0;
        continue;
      }
      has_others = true;
      if (stop && stop != kTimeout && stop != kAborted) blamed = rank;
    }
    if (p.skips_dead && !has_others) stop = kLostElsewhere;  // and each has been told of
    return stop != 0;
  };
  if (bounded_wait<kPollsPerGlance, kPollAgain>(poll, must_end)) return found;
  if (stop == kLostElsewhere && blamed == p.rank) return -1;
  if (blamed != p.rank) {
    lose_wait(p, blamed, kReceive, stop, w.tag, kWaitAny);
  } else {  // nothing was taken of anybody, so no pair is lost
    u64* reported = own_words(p, kRegionReportedOffset) + kMaxRanks;
    st_relaxed_sys(reported, 0);
    add_report(reported, reinterpret_cast<u64*>(p.report), static_cast<u64>(kNumReports + p.rank),
               static_cast<u64>(kReceive) << 32 | stop, -1, w.tag, 0, kWaitAny);
  }
  return -1;
}

namespace epee {

/// A batch: block `i` belongs to channel `i % num_channels`.
__global__ void __launch_bounds__(kMessageThreads, kMessageBlocks)
    message_batch(const __grid_constant__ MessageParams p) {
  __shared__ Lane s;
  wait_previous_kernel();
  const int channel = static_cast<int>(blockIdx.x) % p.num_channels;
  const int first = static_cast<int>(blockIdx.x) / p.num_channels;
  const int peer = p.channels[channel] >> 1;
  const bool is_send = p.channels[channel] & 1;
  bool is_open = true;
#pragma unroll 1
  for (int n = p.begins[channel]; n < p.begins[channel + 1] && is_open; ++n) {
    const Wanted w = wanted_of(p, n);
    const int lanes = lanes_of(p, w.num_bytes);
#pragma unroll 1
    for (int lane = first; lane < lanes && is_open; lane += p.blocks)
      is_open = is_send ? send_lane(p, s, w, peer, lane) : receive_lane(p, s, w, peer, lane);
  }
  if (!is_open && threadIdx.x == 0) note_failed(p, p.channels[channel]);
}

/// One receive from any source, by one block, which tells the host who it was.
__global__ void __launch_bounds__(kMessageThreads, kMessageBlocks)
    message_from_any(const __grid_constant__ MessageParams p) {
  __shared__ Lane s;
  __shared__ int source;
  wait_previous_kernel();
  const Wanted w = wanted_of(p, 0);
  if (threadIdx.x == 0) source = any_source(p, w);
  __syncthreads();
  const int peer = source;
  if (peer < 0) return;
  const int lanes = lanes_of(p, w.num_bytes);
  bool is_open = true;
#pragma unroll 1
  for (int lane = 0; lane < lanes && is_open; ++lane) is_open = receive_lane(p, s, w, peer, lane);
  if (threadIdx.x != 0) return;
  if (is_open)
    st_relaxed_sys(reinterpret_cast<u64*>(p.source), static_cast<u64>(peer) + 1);
  else
    note_failed(p, peer << 1);
}

}  // namespace epee
