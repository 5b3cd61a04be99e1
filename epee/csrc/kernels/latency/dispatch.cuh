// Dispatch for `LatencyBuffer`: each token crosses once to each rank that has experts of it, quantised on the way if
// so wished, and is expanded there into `x [local experts, ranks * max_tokens, hidden]`, packed per expert in (source,
// token) order. No host waits; what is counted stays on the device.
//
//   coordinator  block 0, send half: tells every rank, in words that carry their tag, how many tokens this rank has,
//                how many go to each expert there, and which tokens go there at all. Nobody waits before that is sent.
//   sender       every other block, send half: a token at a time becomes a record (rows.cuh) and crosses: its
//                row straight from registers and a flag behind it, or, when this rank has few tokens, in packets that
//                are flags themselves. Waits for nobody.
//   receiver     every block, receive half: learns the words of all sources, from which all places follow. Block 0 then
//                writes counts, ranges and what the combine needs, as they are if nobody is late; in the others a few
//                warps for each (token, source) write the record to its experts' rows as soon as it is there.
//   The last block to end writes `got`. When blocks have not seen the same sources whole, it first does the work of all
//   receivers again with those that all have seen.
//
// The halves are one launch, or two: then no SM is occupied between them. See call.cuh for memory and order.
//
// Time, 128 tokens, FP8, in microseconds, from time stamps on H200s (four ranks on two GPUs): call open and ids read
// 1.3, rows quantised 0.5, stored and acknowledged (2.6 MB) 9, expanded 4.5, end 1.2. In packets (16 tokens) nobody
// waits for acknowledgements: 8 in all.
#pragma once
#include "rows.cuh"

struct DispatchShared {
  CallShared call;
  i32 num_tokens[kMaxRanks];   // of each source
  i32 most_packed, most_rows;  // tokens of a source that sends packets, or rows
};

/// The block's dynamic shared memory: `counts` [num_experts], `bits` [ranks][token words], `ids`
/// [num_tokens][num_topk], `record`. Both halves use the first two, one after the other.
struct DispatchMemory {
  i32* counts;
  u32* bits;
  u16* ids;
  u8* record;
};

DEVICE DispatchMemory split_memory(const LatencyDispatchParams& p) {
  i32* counts = reinterpret_cast<i32*>(dynamic_shared());
  u32* bits = reinterpret_cast<u32*>(counts + p.num_experts);
  const int num_words = round_up(p.num_experts + kNumRanks * p.token_words, 4);
  u8* ids = dynamic_shared() + 4 * num_words;
  return {counts, bits, reinterpret_cast<u16*>(ids), ids + round_up(2 * p.num_tokens * p.num_topk, 16)};
}

/// What `ids` holds for an id: the physical expert.
DEVICE u32 checked_id(const LatencyDispatchParams& p, i64 expert) {
  return static_cast<u32>(physical_expert(staged_experts(), expert, p.num_experts, kNoExpert | kRepeated));
}

/// The rank that owns an expert, or none.
DEVICE u32 rank_bit(const LatencyDispatchParams& p, u32 id) {
  const u32 expert = id & kNoExpert;
  return expert == kNoExpert ? 0 : 1u << owner_by_factor(expert, p.owner_factor);
}

/// The first token of this thread's warp. The first warp comes last, for it opens the call meanwhile.
DEVICE int first_token_of_warp() {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  return 32 * (warp_idx() ? warp_idx() - 1 : num_warps - 1);
}

/// Reads the routing, a token a lane, and marks what repeats within a token; block 0 counts tokens per expert as well
/// (in memory that is zero), and notes which tokens go where. True when an id is neither good nor -1: it is taken as
/// -1. All threads; the caller synchronises.
DEVICE bool load_ids(const LatencyDispatchParams& p, const DispatchMemory& m) {
  constexpr int kLoads = 8;
  const i64* topk_idx = reinterpret_cast<const i64*>(p.topk_idx);
  bool is_bad = false;
#pragma unroll 1
  for (int start = first_token_of_warp(); start < p.num_tokens; start += static_cast<int>(blockDim.x)) {
    const int token = start + lane_idx();
    const int num_ids = token < p.num_tokens ? p.num_topk : 0;
    const int first = token * p.num_topk;
    u32 ranks = 0;
#pragma unroll 1
    for (int base = 0; base < p.num_topk; base += kLoads) {
      i64 expert[kLoads];
      u32 id[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) expert[j] = base + j < num_ids ? topk_idx[first + base + j] : -1;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        id[j] = checked_id(p, expert[j]);
        is_bad |= id[j] >= kNoExpert && expert[j] != -1;
        ranks |= rank_bit(p, id[j]);
#pragma unroll
        for (int i = 0; i < j; ++i)
          if ((id[i] & kNoExpert) == id[j]) id[j] |= kRepeated;
      }
#pragma unroll 1
      for (int i = 0; i < base; ++i)
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
          if (num_ids && (m.ids[first + i] & kNoExpert) == id[j]) id[j] |= kRepeated;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if (base + j >= num_ids) continue;
        m.ids[first + base + j] = static_cast<u16>(id[j]);
        if (blockIdx.x == 0 && id[j] < kNoExpert) red_add_shared(m.counts + id[j], 1);
      }
    }
    if (blockIdx.x != 0) continue;
#pragma unroll
    for (int d = 0; d < kNumRanks; ++d) {
      const u32 going = __ballot_sync(~0u, ranks >> d & 1);
      if (lane_idx() == 0) m.bits[d * p.token_words + start / 32] = going;
    }
  }
  return is_bad;
}

/// Reports the first bad id of this thread's tokens.
DEVICE_COLD void report_bad_id(const LatencyDispatchParams& p, u64 tag) {
  const i64* topk_idx = reinterpret_cast<const i64*>(p.topk_idx);
  for (int token = first_token_of_warp() + lane_idx(); token < p.num_tokens; token += static_cast<int>(blockDim.x))
    for (int k = 0; k < p.num_topk; ++k) {
      const i64 expert = topk_idx[token * p.num_topk + k];
      if (expert == -1 || (expert >= 0 && expert < p.num_experts)) continue;
      report_error(p.call, tag, kBadExpert, p.call.rank, static_cast<u64>(token), static_cast<u64>(expert),
                   static_cast<u64>(k));
      return;
    }
}

/// The ranks that a token goes to. One warp.
DEVICE u32 ranks_of_token(const LatencyDispatchParams& p, const u16* ids, int token) {
  const u32 mine = lane_idx() < p.num_topk ? rank_bit(p, ids[token * p.num_topk + lane_idx()]) : 0;
  u32 ranks = 0;
#pragma unroll
  for (int d = 0; d < kNumRanks; ++d) ranks |= __ballot_sync(~0u, mine >> d & 1) ? 1u << d : 0;
  return ranks;
}

/// Runs `work(rank, word)` for all words of all ranks' heads, a warp for 32 words of a rank. All threads.
template <typename Work>
DEVICE void for_head_words(const LatencyDispatchParams& p, const Work& work) {
  const int num_chunks = (p.at.head_words + 31) / 32;
#pragma unroll 1
  for (int i = warp_idx(); i < kNumRanks * num_chunks; i += static_cast<int>(blockDim.x / 32)) {
    const int w = 32 * (i / kNumRanks) + lane_idx();
    if (w < p.at.head_words) work(i % kNumRanks, w);
  }
}

/// Tells all ranks what comes. Ranks that do not take part hear that, so that they need not wait. All threads.
DEVICE void coordinator(const LatencyDispatchParams& p, const CallShared& s, const DispatchMemory& m) {
  const u32 head = static_cast<u32>(p.num_tokens) | static_cast<u32>(p.kind) << kHeadKindShift;
  perhaps_stall(s.send_tag, p.call.rank, 11);
  for_head_words(p, [&](int d, int w) {
    const bool is_active = s.active >> d & 1;
    if (!(s.mapped >> d & 1) || (w > 0 && !is_active)) return;
    const int local = w - 1 - p.token_words;
    u32 value = !is_active ? kHeadExcluded : p.refused ? kHeadRefused : head;
    if (w > 0 && local < 0) value = m.bits[d * p.token_words + w - 1];
    if (w > 0 && local >= 0) value = static_cast<u32>(m.counts[first_expert_of(d, p.num_local_experts) + local]);
    st_relaxed_sys(head_at(p.at, s.peer[d], s.send_tag, p.call.rank) + w, marked(s.send_tag, value));
  });
  if (threadIdx.x == 0) *reinterpret_cast<i32*>(p.sent_to) = static_cast<i32>(s.active);
  __syncthreads();  // the memory of counts and bits is used again
}

/// Writes the meta of a token, and notes it for the combine. A warp for each k.
DEVICE void write_meta(const LatencyDispatchParams& p, const u16* ids, int token, u64* meta) {
  const int lane = lane_idx();
  const int first = token * p.num_topk;
#pragma unroll 1
  for (int k = warp_idx(); k < p.num_topk; k += static_cast<int>(blockDim.x / 32)) {
    const u32 id = ids[first + k];
    const float weight = p.topk_weights ? reinterpret_cast<const float*>(p.topk_weights)[first + k] : 1.0f;
    u32 before = 0;
#pragma unroll 4
    for (int i = lane; i < first; i += 32) before += ids[i] == (id & kNoExpert);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) before += __shfl_xor_sync(~0u, before, lanes);
    const u32 entry = (id & kRepeated) << 16 | before << 16 | (id & kNoExpert);
    if (lane != 0) continue;
    meta[k] = static_cast<u64>(__float_as_uint(weight)) << 32 | entry;
    const bool is_none = (id & kNoExpert) == kNoExpert;
    reinterpret_cast<i32*>(p.own_ids)[first + k] = is_none ? -1 : static_cast<i32>(id & kNoExpert);
    reinterpret_cast<float*>(p.own_weights)[first + k] = weight;
  }
}

/// Sends a token: its row straight from registers, then meta and scales from shared memory, then flags; or all of it in
/// packets. All threads; `in` is the beginning of the row.
template <bool kFp8>
DEVICE void send_token(const LatencyDispatchParams& p, const DispatchShared& s, const DispatchMemory& m, int token,
                       Input in) {
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  const bool is_packed = p.num_tokens <= p.at.packet_tokens;
  const u32 ranks = ranks_of_token(p, m.ids, token) & s.call.active;
  const RecordPlaces to = record_places(p.call, p.at, s.call, s.call.send_tag, token, ranks, is_packed);
  const int num_units = p.hidden / (kFp8 ? 16 : 8);
  u8* row = m.record + 4 * p.meta_words;
  u8* scales = row + 4 * p.row_words;
  if (tid == 0) reinterpret_cast<i32*>(p.sent_to)[1 + token] = static_cast<i32>(ranks);
  if (lane_idx() == 0) perhaps_stall(s.call.send_tag, p.call.rank, 4);
#pragma unroll 1
  for (int base = 0;;) {
#pragma unroll
    for (int j = 0; j < (kFp8 ? 1 : 2); ++j) {
      const int unit = base + tid + j * step;
      const Vec16 v = kFp8 ? quantise(p, unit, in, scales) : in.half[j];
      if (unit >= num_units) continue;
      if (is_packed)
        *reinterpret_cast<Vec16*>(row + 16 * unit) = v;
      else
        store_everywhere<false>(to, 4 * p.meta_words + 16 * unit, v);
    }
    base += units_per_pass<kFp8>();
    if (base >= num_units) break;
    in = load_input<kFp8>(p, token, base);
  }
  write_meta(p, m.ids, token, reinterpret_cast<u64*>(m.record));
  __syncthreads();
  if (is_packed) {
    const int num_packets = packets_of_record(p);
#pragma unroll 1
    for (int i = tid; i < num_packets; i += step)
      store_everywhere<true>(to, 16 * i,
                             packet_of(reinterpret_cast<const u32*>(m.record), num_packets, i, s.call.send_tag));
    __syncthreads();
    return;
  }
  const int num_front = p.meta_words / 4;
#pragma unroll 1
  for (int i = tid; i < num_front + (p.scale_words + 3) / 4; i += step) {
    const int offset = 16 * i + (i < num_front ? 0 : 4 * p.row_words);
    store_everywhere<false>(to, offset, *reinterpret_cast<const Vec16*>(m.record + offset));
  }
  __syncthreads();
  if (warp_idx() == static_cast<int>(blockDim.x / 32) - 1)
    release_flags(p.call, p.at, s.call, s.call.send_tag, token, ranks);
}

/// Learns what all sources send: counts, and which tokens come. All threads; returns the sources that have said so.
DEVICE u32 learn_sources(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m) {
  const u64 tag = s.call.receive_tag;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  if (warp_idx() == (num_warps > 1 ? num_warps - 2 : 0)) {  // before its words: behind some heads there are none
    const u32 head = learn_head(p.call, p.at, s.call, s.call.active, static_cast<u32>(p.kind));
    const int num_tokens = static_cast<int>(head & kHeadTokens);
    int most_packed = num_tokens <= p.at.packet_tokens ? num_tokens : 0;
    int most_rows = num_tokens - most_packed;
#pragma unroll
    for (int lanes = kMaxRanks / 2; lanes; lanes /= 2) {
      most_packed = max(most_packed, __shfl_xor_sync(~0u, most_packed, lanes));
      most_rows = max(most_rows, __shfl_xor_sync(~0u, most_rows, lanes));
    }
    if (lane_idx() < kNumRanks) s.num_tokens[lane_idx()] = num_tokens;
    if (lane_idx() == 0) {
      s.most_packed = most_packed;
      s.most_rows = most_rows;
    }
  }
  for_head_words(p, [&](int src, int w) {
    if (w == 0) return;
    u32 value = 0;
    if ((s.call.active >> src & 1) &&
        !wait_marked(p.call, s.call, tag, head_at(p.at, p.call.own, tag, src) + w, src, value))
      red_or_shared(&s.call.late, 1u << src);
    if (w <= p.token_words) {
      m.bits[src * p.token_words + w - 1] = value;
      return;
    }
    if (value > static_cast<u32>(p.at.max_tokens)) {  // no peer of ours says that
      report_error(p.call, tag, kBadCount, src, static_cast<u64>(p.at.max_tokens), value, 0);
      red_or_shared(&s.call.late, 1u << src);
      value = 0;
    }
    m.counts[src * p.num_local_experts + w - 1 - p.token_words] = static_cast<i32>(value);
  });
  __syncthreads();
  return s.call.active & ~s.call.late;
}

/// Lane k's meta of a record in packets. One warp; false when it does not come.
DEVICE bool read_packed_meta(const LatencyDispatchParams& p, const CallShared& s, u64 tag, int src, const u8* from,
                             u64& meta) {
  const int num_packets = packets_of_record(p);
  Vec16 v[2];
  int plane[2], at[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int word = 2 * lane_idx() + i;
    plane[i] = (word >= num_packets) + (word >= 2 * num_packets);
    at[i] = 16 * (word - plane[i] * num_packets);
    if (lane_idx() < p.num_topk) v[i] = ld_relaxed_sys_128(from + at[i]);
  }
  u32 half[2] = {0, 0};
  bool is_there = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane_idx() >= p.num_topk || !is_there) continue;
    if (v[i].word[3] != static_cast<u32>(tag)) is_there = wait_packet(p.call, s, tag, from + at[i], src, v[i]);
    half[i] = plane[i] == 0 ? v[i].word[0] : plane[i] == 1 ? v[i].word[1] : v[i].word[2];
  }
  meta = static_cast<u64>(half[1]) << 32 | half[0];
  return __ballot_sync(~0u, is_there) == ~0u;
}

/// Keeps for the combine, and tells the user, where the token's rows are. One warp.
DEVICE void note_rows(const LatencyDispatchParams& p, const Target& to, u64 meta, int src, int token) {
  const int k = lane_idx();
  if (k >= p.num_topk) return;
  const i64 at = (static_cast<i64>(src) * p.at.max_tokens + token) * p.num_topk + k;
  reinterpret_cast<i32*>(p.recv_rows)[at] = to.row;
  reinterpret_cast<u32*>(p.recv_weights)[at] = static_cast<u32>(meta >> 32);
  if (to.row >= 0) reinterpret_cast<i32*>(p.out_src_token)[to.row] = token;
}

/// What lane k must know to place a token's rows. One warp.
DEVICE Target place_token(const LatencyDispatchParams& p, const i32* counts, u32 taken, int src, int token, u64 meta,
                          Share share) {
  Target to = {-1, 0, false};
  if (lane_idx() < p.num_topk) to = find_target(p, counts, taken, src, meta);
  if (share.part == 0) note_rows(p, to, meta, src, token);
  return to;
}
DEVICE u32 wanted_of(const Target& to) { return __ballot_sync(~0u, to.row >= 0 && to.is_first); }

/// Brings a share of one token to its rows. One warp; false when its source is late.
DEVICE bool receive_packets(const LatencyDispatchParams& p, const DispatchShared& s, const i32* counts, u32 taken,
                            int src, int token, Share share) {
  const u64 tag = s.call.receive_tag;
  const u8* from = packets_at(p.at, p.call.own, tag, src, token);
  const int first = 32 * share.part + lane_idx();
  Vec16 v = {{0, 0, 0, 0}};
  if (first < packets_of_record(p)) v = ld_relaxed_sys_128(from + 16 * first);
  u64 meta = kNoExpert;
  if (!read_packed_meta(p, s.call, tag, src, from, meta)) return false;
  const Target to = place_token(p, counts, taken, src, token, meta, share);
  return expand_packets(p, s.call, src, from, to, wanted_of(to), share, v);
}
template <bool kFp8>
DEVICE bool receive_row(const LatencyDispatchParams& p, const DispatchShared& s, const i32* counts, u32 taken, int src,
                        int token, Share share) {
  const u64 tag = s.call.receive_tag;
  const u8* from = row_at(p.at, p.call.own, tag, src, token);
  bool is_there = true;
  if (lane_idx() == 0) is_there = wait_flag(p.call, s.call, tag, flag_at(p.at, p.call.own, tag, src, token), src);
  __syncwarp();  // what lane 0 has acquired, all may read
  if (__ballot_sync(~0u, is_there) != ~0u) return false;
  u64 meta = kNoExpert;
  if (lane_idx() < p.num_topk) meta = reinterpret_cast<const u64*>(from)[lane_idx()];
  const RowPart<kFp8> part = load_part<kFp8>(p, from, share);
  const Target to = place_token(p, counts, taken, src, token, meta, share);
  expand_row<kFp8>(p, from, to, wanted_of(to), share, part);
  return true;
}

/// This warp's share, of `num_warps`, of the tokens of those sources in `taken` that send packets, or of the others.
/// Sources that are late are noted.
template <bool kFp8, bool kIsPacked>
DEVICE void receive_tokens(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m, u32 taken,
                           int warp, int num_warps) {
  constexpr int kShares = kIsPacked ? kPacketShares : kRowShares;
  const int num_tokens = kIsPacked ? s.most_packed : s.most_rows;
#pragma unroll 1
  for (int i = warp; i < kShares * kNumRanks * num_tokens; i += num_warps) {
    const int token = i / (kShares * kNumRanks);  // neighbours serve different sources
    const int src = i / kShares - token * kNumRanks;
    if (!(taken >> src & 1) || token >= s.num_tokens[src]) continue;
    if ((s.num_tokens[src] <= p.at.packet_tokens) != kIsPacked) continue;
    if (!(m.bits[src * p.token_words + token / 32] >> token % 32 & 1)) continue;
    const Share share = {i % kShares, kShares};
    const bool is_there = kIsPacked ? receive_packets(p, s, m.counts, taken, src, token, share)
                                    : receive_row<kFp8>(p, s, m.counts, taken, src, token, share);
    if (!is_there && lane_idx() == 0) red_or_shared(&s.call.late, 1u << src);
    __syncwarp();
  }
}

/// Writes what the host and the combine want to know. All threads of a block.
DEVICE void write_results(const LatencyDispatchParams& p, const DispatchShared& s, const DispatchMemory& m,
                          u32 counted) {
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int e = tid; e < p.num_local_experts; e += step) {
    i64 begin = 0;
    for (int src = 0; src < kNumRanks; ++src) {
      const i32 count = counted >> src & 1 ? m.counts[src * p.num_local_experts + e] : 0;
      reinterpret_cast<i64*>(p.out_ranges)[e * kNumRanks + src] = begin << 32 | count;
      begin += count;
    }
    reinterpret_cast<i32*>(p.out_counts)[e] = static_cast<i32>(begin);
  }
#pragma unroll 1
  for (int i = tid; i < kNumRanks * p.token_words; i += step) {
    const int src = i / p.token_words;
    u32* info = reinterpret_cast<u32*>(p.recv_info) + src * (1 + p.token_words);
    const bool is_in = counted >> src & 1;
    info[1 + i - src * p.token_words] = is_in ? m.bits[i] : 0;
    if (i == src * p.token_words) info[0] = is_in ? static_cast<u32>(s.num_tokens[src]) : 0;
  }
}

/// Adds what came to the caller's statistics. All threads of the last block.
DEVICE_COLD void add_stats(const LatencyDispatchParams& p, const i32* counts, u32 counted) {
#pragma unroll 1
  for (int e = static_cast<int>(threadIdx.x); e < p.num_local_experts; e += static_cast<int>(blockDim.x)) {
    i32 count = 0;
    for (int src = 0; src < kNumRanks; ++src)
      if (counted >> src & 1) count += counts[src * p.num_local_experts + e];
    reinterpret_cast<i32*>(p.stats)[e] += count;
  }
}

/// All threads. Block 0 writes the results as they will be if nobody is late, while the others bring rows.
template <bool kFp8>
DEVICE void receive_half(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int num_blocks = gridDim.x == 1 ? 1 : static_cast<int>(gridDim.x) - 1;
  const int block = gridDim.x == 1 ? 0 : static_cast<int>(blockIdx.x) - 1;
  int warp = block + num_blocks * warp_idx();
  int step = num_blocks * num_warps;
  u32 taken = learn_sources(p, s, m);
  __syncthreads();  // all have the same, before somebody notes that a source is late
  if (blockIdx.x == 0) write_results(p, s, m, taken);
#pragma unroll 1
  for (bool is_again = false;; is_again = true) {
    if (block >= 0 || is_again) {
      receive_tokens<kFp8, true>(p, s, m, taken, warp, step);
      receive_tokens<kFp8, false>(p, s, m, taken, warp, step);
    }
    if (is_again) break;
    if (!end_block(p.call, s.call, taken, p.call.end_offset)) return;
    taken = counted_sources(s.call);
    if (!has_differed(s.call)) break;
    warp = warp_idx();
    step = num_warps;
    write_results(p, s, m, taken);
  }
  if (p.stats) add_stats(p, m.counts, taken);
  finish_call(p.call, s.call, taken, s.call.wanted, p.out_got);
}

/// All threads; `in` is the beginning of the row of `first`, the block's first token; `is_bad` as of `load_ids`.
template <bool kFp8>
DEVICE void send_half(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m, int first, int step,
                      Input in, bool is_bad) {
  if (blockIdx.x == 0) {
    if (is_bad) report_bad_id(p, s.call.send_tag);
    coordinator(p, s.call, m);
  }
  if (p.refused || first < 0) return;
#pragma unroll 1
  for (int token = first; token < p.num_tokens; token += step) {
    if (token != first) in = load_input<kFp8>(p, token, 0);
    send_token<kFp8>(p, s, m, token, in);
  }
}

template <bool kFp8>
DEVICE void dispatch(const LatencyDispatchParams& p) {
  __shared__ DispatchShared s;
  const DispatchMemory m = split_memory(p);
  const bool is_sending = p.call.halves & kSendHalf;
  const int num_senders = gridDim.x == 1 ? 1 : static_cast<int>(gridDim.x) - 1;
  const int first = gridDim.x == 1 ? 0 : static_cast<int>(blockIdx.x) - 1;
  const int num_counters = p.num_experts + kNumRanks * p.token_words;
  for (int i = static_cast<int>(threadIdx.x); i < num_counters; i += static_cast<int>(blockDim.x)) m.counts[i] = 0;
  if (is_sending) stage_experts(staged_experts(), p.experts, p.num_experts);
  __syncthreads();
  wait_previous_kernel();
  Input in = {};
  bool is_bad = false;
  if (is_sending && first >= 0 && first < p.num_tokens) in = load_input<kFp8>(p, first, 0);
  open_call(p.call, p.at, s.call);
  if (is_sending) is_bad = load_ids(p, m);
  __syncthreads();
  if (is_sending) send_half<kFp8>(p, s, m, first, num_senders, in, is_bad);
  allow_next_kernel();
  if ((p.call.halves & kReceiveHalf) && !p.refused) {
    receive_half<kFp8>(p, s, m);
  } else if (end_block(p.call, s.call, 0, p.call.end_offset)) {
    finish_call(p.call, s.call, 0, 0, p.out_got);
  }
}

namespace epee {

__global__ void __launch_bounds__(512, 1) dispatch_latency_fp8(const __grid_constant__ LatencyDispatchParams p) {
  dispatch<true>(p);
}

__global__ void __launch_bounds__(512, 1) dispatch_latency_bf16(const __grid_constant__ LatencyDispatchParams p) {
  dispatch<false>(p);
}

}  // namespace epee
