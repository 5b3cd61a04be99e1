// Mode "mask": what becomes of a call that loses a rank. Its kernels (`masked.cuh`) end it over those who are left,
// all survivors over the same ones, with the same bits, without asking each other or the host.
//
// The decision. A rank counts in call n if its whole row of n lies somewhere where all can read it when it is dead:
// then its packets are final, wherever they lie. So whoever looks finds the same, and who has ended the call before,
// with the rank's row, has it for a proof that the others will find it. Where a row lies:
//   one row for all (all_reduce, broadcast, all_gather, reduce, gather): in the packets of the rank at any other one.
//     A packet is found at whoever has got it, so those that lack some read them there; nothing is stored beside that.
//   a row for each (reduce_scatter, all_to_all, scatter): a rank keeps the tile of all rows in `kept`, in its own
//     memory, in front of its packets: fence, then it sends. So if anybody has all of its packets, all of `kept` is
//     whole.
//   no row (the others in a broadcast or scatter; calls of no bytes): a rank counts if `joined` says so at anybody.
// All these words are of this call, or of none: the half of n is written again in call n + 2, behind the word of every
// living rank that it has begun n + 1; the dead write nothing. Memory of the dead stays mapped until the hosts meet.
//
// Who is dead is said by the host (`wait.cuh`), when the process has ended (a pidfd): the driver has taken its context
// down before, so nothing of it is under way. Sooner would be wrong: a GPU goes on for a while without its process. A
// rank that leaves the group in order says so itself (`left`), when its GPU has nothing of the group to do any more;
// it then counts as dead.
//
// Who acts. A wait for a rank that is dead ends, and notes it for its block; the call goes on to its end in every
// block, which leaves tiles undone. One of the blocks that have met a death (`settled`) waits until all others have
// ended (`tags`, released behind what they wrote), decides about every rank that is dead by then, and makes the whole
// output anew from packets: those here, its own row's (which it has stored as well, for the input may have been
// overwritten), and those that it finds elsewhere. If a rank dies meanwhile it begins again. What others have written
// with a row that counts is written again with the same bits. Places of a rank that is left out in this very call are
// filled with zeros: parts of its row may stand there.
//
// Then it writes who was in (`got`, else written by the first block), who is out from now on (`out`, and a word for
// the host), and the zeros of the program's own mask. A rank that is out does not come back in a later call: it would
// have had to end this one. The host's view follows when the hosts meet; until then `out` is what counts.
//
// A crash between two steps. Of d, anywhere in its sends: as above. Of a survivor r while it settles: its packets of n
// were sent before, so it counts for those that are left. A root that is out is a failure, told to all (`gone`), as is
// a wait that is over in time: these the hosts mend, as in mode "raise".
#pragma once
#include "../packets.cuh"

/// What a settling block has to share.
struct Settling {
  u32 dead;      // known so far
  u32 in;        // who counts
  u32 is_whole;  // the row in question
  u32 is_mine;   // this block settles
};

/// Ranks that send a row; of the others `joined` counts.
DEVICE u32 senders_of(const CollectiveParams& p) { return p.num_bytes > 0 ? static_cast<u32>(p.call.sources) : 0; }

/// Where a rank keeps, in its own memory, this lane's packets of a tile of its row for `dst`.
DEVICE u8* kept_at(const MaskedParams& m, u64 region, u64 tag, int dst, int tile) {
  const u64 row = (tag & 1) * kNumRanks + static_cast<u64>(dst);
  return reinterpret_cast<u8*>(region + m.kept_offset + row * m.base.call.packets_stride) +
         static_cast<i64>(tile) * kTilePacketBytes + lane_idx() * 16;
}

/// Where this lane's packets of a tile of `src`'s row for `dst` may lie at `holder`; null: not there.
DEVICE const u8* copy_at(const MaskedParams& m, const Meeting& s, int src, int dst, int tile, int holder) {
  const CollectiveCall& call = m.base.call;
  if (s.peer[holder] == 0) return nullptr;
  if (m.is_one_row) return packets_at(call, s.peer[holder], s.tag, kScatter, src, tile);
  return holder == src ? kept_at(m, s.peer[src], s.tag, dst, tile) : nullptr;
}

/// Finds this lane's packets of a tile of a dead rank's row, or of this rank's own. False: one of them is nowhere.
DEVICE bool find_tile(const MaskedParams& m, const Meeting& s, int src, int dst, int tile, Tile& t) {
#pragma unroll
  for (int j = 0; j < kTilePackets; ++j) {
    bool is_found = false;
#pragma unroll 1
    for (int n = 0; n < kNumRanks && !is_found; ++n) {
      const int own = m.base.call.rank, holder = own + n < kNumRanks ? own + n : own + n - kNumRanks;
      const u8* at = copy_at(m, s, src, dst, tile, holder);
      if (at == nullptr) continue;
      const Vec16 v = ld_relaxed_sys_128(at + j * 512);
      is_found = v.word[3] == static_cast<u32>(s.tag);
#pragma unroll
      for (int w = 0; w < 3; ++w) t.word[3 * j + w] = v.word[w];
    }
    if (!is_found) return false;
  }
  return true;
}

/// Whether a dead rank has begun the call, as far as its words say, anywhere.
DEVICE bool has_joined(const MaskedParams& m, const Meeting& s, int rank) {
  bool has = false;
#pragma unroll 1
  for (int holder = 0; holder < kNumRanks; ++holder)
    if (s.peer[holder] != 0 && holder != rank)
      has = has || ld_relaxed_sys(joined_at(s.peer[holder], s.tag, rank)) >> kFactsBits == s.tag;
  return has;
}

/// Decides whether a dead rank counts. All threads; the answer in all.
DEVICE bool counts(const MaskedParams& m, const Meeting& s, Settling& z, int rank) {
  const CollectiveParams& p = m.base;
  if (threadIdx.x == 0) z.is_whole = 1;
  __syncthreads();
  if (is_in(senders_of(p), rank)) {
    const int num = num_tiles(p.num_bytes), step = static_cast<int>(blockDim.x / 32);
#pragma unroll 1
    for (int tile = warp_idx(); tile < num; tile += step) {
#pragma unroll 1
      for (int dst = 0; dst < kNumRanks; ++dst) {
        const bool is_row = m.is_one_row ? dst == 0 : is_in(static_cast<u32>(p.call.takers), dst);
        Tile t;
        if (is_row && has_share(p.num_bytes, tile) && !find_tile(m, s, rank, dst, tile, t)) z.is_whole = 0;
      }
      if (*const_cast<volatile u32*>(&z.is_whole) == 0) break;
    }
  } else if (threadIdx.x == 0 && !has_joined(m, s, rank)) {
    z.is_whole = 0;
  }
  __syncthreads();
  const bool is_whole = z.is_whole;
  __syncthreads();  // before the next question
  return is_whole;
}

/// Whose places in the output are filled with zeros: of `lost`, and where the group wants it of all that take no part.
DEVICE u32 lost_of(const MaskedParams& m, u32 lost, u32 active) {
  return (lost | (m.fills_absent ? ~active : 0)) & static_cast<u32>(m.base.call.sources);
}

/// Writes a row of this rank's output, unless it has none.
DEVICE void store_row(const CollectiveParams& p, int src, int tile, const Tile& t) {
  if (p.outputs[src] != 0) store_tile(reinterpret_cast<u8*>(p.outputs[src]), p.num_bytes, tile, t);
}

/// Makes one tile of the output of those that count; `lost` are filled with zeros. False when a wait failed.
template <bool kIsPlaced>
DEVICE bool settle_tile(const MaskedParams& m, const Meeting& s, const Settling& z, u32 lost, int tile) {
  const CollectiveParams& p = m.base;
  const u32 me = 1u << p.call.rank, senders = senders_of(p) & z.in, near = senders & ~z.dead & ~me;
  Accumulator<4 * kTileVecs> sum;
#pragma unroll
  for (int base = 0; base < kNumRanks; base += kGroup) {
    TileGroup group;
    const u32 waited = near >> base & ((1u << kGroup) - 1);
    if (waited && !receive_group(p.call, s, kScatter, base, waited << base, tile, group)) return false;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int src = base + i;
      if (src >= kNumRanks) continue;
      if (!is_in(senders, src)) {
        if (kIsPlaced && is_in(lost, src)) store_row(p, src, tile, Tile{});
        continue;
      }
      if (!is_in(near, src)) find_tile(m, s, src, p.call.rank, tile, group.tile[i]);
      if (kIsPlaced)
        store_row(p, src, tile, group.tile[i]);
      else
        sum.add(group.tile[i]);
    }
  }
  if (!kIsPlaced) store_row(p, p.call.rank, tile, sum.result());
  return true;
}

/// Waits until all other blocks of this grid have ended the call; false when they do not. All threads.
DEVICE bool await_blocks(const MaskedParams& m, const Meeting& s) {
  const u64* tags = own_words(m.base.call, kRegionTagsOffset);
  const u64 limit_ns = 4 * m.base.call.timeout_ns;  // each of their waits is bounded, and most wait at the same time
  bool have_ended = true;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < gridDim.x; i += blockDim.x)
    if (i != blockIdx.x && !bounded_wait_here(limit_ns, [&] { return ld_acquire_gpu(tags + i) >= s.tag; }))
      have_ended = false;
  if (!have_ended) report_failure(m.base.call, s.tag, {kTimeout, m.base.call.rank, gridDim.x, 0, kWaitBlocks});
  __syncthreads();
  return !has_failed(m.base.call, s.tag);
}

/// Tells who is in the call of this number, for the last calls here, and for the work of this one. One thread.
DEVICE void tell_counted(const MaskedParams& m, u64 number, u32 in) {
  st_relaxed_sys(own_words(m.base.call, kRegionGotOffset) + number % 4, number << kMaxLocal | in);
  if (m.counted != 0) st_relaxed_sys(reinterpret_cast<u64*>(m.counted), m.stamp | in);
}

/// Tells who was in the call and who is out from now on. One thread.
DEVICE void tell_lost(const MaskedParams& m, const Meeting& s, u32 in) {
  const CollectiveCall& call = m.base.call;
  const u64 out = ld_relaxed_sys(own_words(call, kRegionOutOffset)) | (s.active & ~in);
  st_relaxed_sys(own_words(call, kRegionOutOffset), out);
  tell_counted(m, s.tag, in);
  st_relaxed_sys(reinterpret_cast<u64*>(m.told), out);
#pragma unroll 1
  for (int rank = 0; rank < m.num_shown && rank < kNumRanks; ++rank)
    if (out >> rank & 1) st_relaxed_sys(reinterpret_cast<i32*>(m.shown) + rank, 0);
}

/// Waits for the words of those of `ranks` that send no row in this call. The first warp.
DEVICE void await_words(const MaskedParams& m, const Meeting& s, u32 ranks) {
  const CollectiveCall& call = m.base.call;
  const u32 waited = ranks & ~senders_of(m.base) & ~(1u << call.rank);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < kNumRanks && is_in(waited, lane))
    wait_count(call, s, lane, joined_at(call.own, s.tag, lane), s.tag << kFactsBits, kWaitBarrier);
}

/// Decides who counts and makes the output of them; see above. All threads of one block.
template <bool kIsPlaced>
DEVICE void settle(const MaskedParams& m, Meeting& s, Settling& z) {
  const CollectiveParams& p = m.base;
  const u32 me = 1u << p.call.rank, active = s.active;
  const u64* known = own_words(p.call, kRegionNewsOffset) + kNewsDead;
  if (!await_blocks(m, s)) return;
  bool is_over = false;
#pragma unroll 1
  for (int round = 0; round <= kNumRanks && !is_over; ++round) {
    if (threadIdx.x == 0) {
      z.dead = (static_cast<u32>(ld_relaxed_sys(known)) | left_ranks(p.call, active)) & active & ~me;
      z.in = active;
      s.has_deaths = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int rank = 0; rank < kNumRanks; ++rank)
      if (is_in(z.dead, rank) && !counts(m, s, z, rank) && threadIdx.x == 0) z.in &= ~(1u << rank);
    __syncthreads();
    if (p.call.root >= 0 && !is_in(z.in, p.call.root)) {
      if (threadIdx.x == 0) report_failure(p.call, s.tag, {kPeerDead, p.call.root, s.tag, z.in, kWaitPackets});
      break;
    }
    const int num = is_in(static_cast<u32>(p.call.takers), p.call.rank) ? num_tiles(p.num_bytes) : 0;
#pragma unroll 1
    for (int tile = warp_idx(); tile < num; tile += static_cast<int>(blockDim.x / 32))
      if (has_share(p.num_bytes, tile) && !settle_tile<kIsPlaced>(m, s, z, lost_of(m, active & ~z.in, active), tile))
        break;
    await_words(m, s, z.in & ~z.dead);
    __syncthreads();
    is_over = !s.has_deaths;
    __syncthreads();
  }
  if (threadIdx.x == 0) tell_lost(m, s, z.in);
}
