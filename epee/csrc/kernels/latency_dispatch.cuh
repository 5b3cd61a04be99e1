// Dispatch of the latency mode: each token crosses once to each rank that has experts of it, quantised on the way if
// so wished, and is expanded there into `x [local experts, ranks * max_tokens, hidden]`, packed per expert in (source,
// token) order. No host waits; what is counted stays on the device.
//
//   coordinator  block 0, send half: tells every rank, in words that carry their tag, how many tokens this rank has, how
//                many go to each expert there, and which tokens go there at all. Nobody waits before that is sent.
//   sender       every other block, send half: a token at a time becomes a record (latency_rows.cuh) in shared memory,
//                and crosses with a flag behind it, or in packets that are flags themselves when this rank has few
//                tokens. Waits for nobody.
//   receiver     every block, receive half: learns the words of all sources, from which all places follow, and then a
//                few warps for each (token, source) write the record to its experts' rows as soon as it is there.
//   The last block to end writes counts, ranges, `got` and what the combine needs. When blocks have not seen the same
//   sources whole, it first does the receiver's work of the whole grid again with those that all have seen.
//
// The halves are one launch, or two: then no SM is occupied between them. See latency_call.cuh for memory and order.
//
// Time, 4 ranks, 128 tokens, FP8 (estimated, microseconds): launch 1.3, inputs 0.9, quantise 0.3, 2.6 MB over the link
// 7.4, acknowledgement and flag 2.9, expansion and end 2: 15. With packets (16 tokens): no acknowledgement, 7.
#pragma once
#include "latency_rows.cuh"

struct DispatchShared {
  CallShared call;
  u32 ranks;                   // of the token in hand
  i32 num_tokens[kMaxRanks];  // of each source
};

/// The block's dynamic shared memory: `counts` [num_experts], `bits` [ranks][token words], `ids` [num_tokens][num_topk],
/// `record`. Both halves use the first two, one after the other.
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

/// Reads and checks the routing, and marks what repeats within a token. All threads.
DEVICE void load_ids(const LatencyDispatchParams& p, u64 tag, u16* ids) {
  const i64* topk_idx = reinterpret_cast<const i64*>(p.topk_idx);
  const int end = p.num_tokens * p.num_topk;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    const i64 expert = topk_idx[i];
    const bool is_good = expert >= -1 && expert < p.num_experts;
    ids[i] = static_cast<u16>(is_good && expert >= 0 ? expert : kNoExpert | kRepeated);
    if (!is_good && blockIdx.x == 0)
      report_error(p.call, tag, kBadExpert, p.call.rank, static_cast<u64>(i / p.num_topk), static_cast<u64>(expert),
                   static_cast<u64>(i % p.num_topk));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    const u32 id = ids[i] & kNoExpert;  // others only add the bit above
    bool is_repeated = false;
    for (int j = i - i % p.num_topk; j < i; ++j) is_repeated |= (ids[j] & kNoExpert) == id;
    if (is_repeated) ids[i] = static_cast<u16>(id | kRepeated);
  }
  __syncthreads();
}

DEVICE u32 rank_bit(const LatencyDispatchParams& p, u32 id) {
  return (id & kNoExpert) == kNoExpert ? 0 : 1u << (id & kNoExpert) / static_cast<u32>(p.num_local_experts);
}

/// Counts tokens per expert and notes which tokens go where. All threads.
DEVICE void count_tokens(const LatencyDispatchParams& p, const DispatchMemory& m) {
  const int tid = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  for (int i = tid; i < p.num_experts + kNumRanks * p.token_words; i += step) m.counts[i] = 0;  // the bits as well
  __syncthreads();
  for (int i = tid; i < p.num_tokens * p.num_topk; i += step)
    if (m.ids[i] < kNoExpert) red_add_shared(m.counts + m.ids[i], 1);
#pragma unroll 1
  for (int first = 32 * warp_idx(); first < p.num_tokens; first += step) {
    const int token = first + lane_idx();
    u32 ranks = 0;
    for (int k = 0; token < p.num_tokens && k < p.num_topk; ++k) ranks |= rank_bit(p, m.ids[token * p.num_topk + k]);
#pragma unroll
    for (int d = 0; d < kNumRanks; ++d) {
      const u32 going = __ballot_sync(~0u, ranks >> d & 1);
      if (lane_idx() == 0) m.bits[d * p.token_words + first / 32] = going;
    }
  }
  __syncthreads();
}

/// Tells all ranks what comes. Ranks that do not take part hear that, so that they need not wait. All threads.
DEVICE void coordinator(const LatencyDispatchParams& p, const CallShared& s, const DispatchMemory& m) {
  count_tokens(p, m);
  const u32 head = static_cast<u32>(p.num_tokens) | static_cast<u32>(p.kind) << kHeadKindShift;
  perhaps_stall(s.send_tag, p.call.rank, 11);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kNumRanks * p.at.head_words; i += static_cast<int>(blockDim.x)) {
    const int d = i / p.at.head_words;
    const int w = i - d * p.at.head_words;
    if (!(s.mapped >> d & 1)) continue;
    u64* word = head_at(p.at, s.peer[d], s.send_tag, part_of(p.call.rank, d)) + w;
    const bool is_active = s.active >> d & 1;
    if (w == 0)
      st_relaxed_sys(word, marked(s.send_tag, !is_active ? kHeadExcluded : p.refused ? kHeadRefused : head));
    else if (is_active && w <= p.token_words)
      st_relaxed_sys(word, marked(s.send_tag, m.bits[d * p.token_words + w - 1]));
    else if (is_active)
      st_relaxed_sys(word, marked(s.send_tag, static_cast<u32>(
                                                  m.counts[d * p.num_local_experts + w - 1 - p.token_words])));
  }
  if (threadIdx.x == 0) *reinterpret_cast<i32*>(p.sent_to) = static_cast<i32>(s.active);
}

/// Writes the meta of a token, and in the first warp finds its ranks. A warp for each k.
DEVICE void write_meta(const LatencyDispatchParams& p, DispatchShared& s, const u16* ids, int token, u64* meta) {
  const int lane = lane_idx();
  const int first = token * p.num_topk;
#pragma unroll 1
  for (int k = warp_idx(); k < p.num_topk; k += static_cast<int>(blockDim.x / 32)) {
    const u32 id = ids[first + k];
    u32 before = 0;
#pragma unroll 4
    for (int i = lane; i < first; i += 32) before += ids[i] == (id & kNoExpert);
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) before += __shfl_xor_sync(~0u, before, lanes);
    const float weight = p.topk_weights ? reinterpret_cast<const float*>(p.topk_weights)[first + k] : 1.0f;
    const u32 entry = (id & kRepeated) << 16 | before << 16 | (id & kNoExpert);
    if (lane != 0) continue;
    meta[k] = static_cast<u64>(__float_as_uint(weight)) << 32 | entry;
    const bool is_none = (id & kNoExpert) == kNoExpert;
    reinterpret_cast<i32*>(p.own_ids)[first + k] = is_none ? -1 : static_cast<i32>(id & kNoExpert);
    reinterpret_cast<float*>(p.own_weights)[first + k] = weight;
  }
  if (warp_idx() != 0) return;
  u32 ranks = lane < p.num_topk ? rank_bit(p, ids[first + lane]) : 0;
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) ranks |= __shfl_xor_sync(~0u, ranks, lanes);
  if (lane != 0) return;
  s.ranks = ranks & s.call.active;
  reinterpret_cast<i32*>(p.sent_to)[1 + token] = static_cast<i32>(s.ranks);
}

/// Sends the tokens of a block, `first` and every `step`-th behind it; `in` is the beginning of the first one.
template <bool kFp8>
DEVICE void sender(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m, int first, int step,
                   Input in) {
  const int num_units = p.hidden / (kFp8 ? 16 : 8);
  u8* row = m.record + 4 * p.meta_words;
#pragma unroll 1
  for (int token = first; token < p.num_tokens; token += step) {
    write_meta(p, s, m.ids, token, reinterpret_cast<u64*>(m.record));
#pragma unroll 1
    for (int base = 0; base < num_units; base += units_per_pass<kFp8>()) {
      if (base > 0 || token != first) in = load_input<kFp8>(p, token, base);
      if (kFp8)
        write_fp8(p, base, in, row, row + 4 * p.row_words);
      else
        write_bf16(p, base, in, row);
    }
    __syncthreads();
    store_record<false>(p.call, p.at, s.call, s.call.send_tag, token, s.ranks, m.record,
                 p.meta_words + p.row_words + p.scale_words, p.num_tokens <= p.at.packet_tokens);
  }
}

/// All threads; `in` as for `sender`.
template <bool kFp8>
DEVICE void send_half(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m, int first, int step,
                      const Input& in) {
  load_ids(p, s.call.send_tag, m.ids);
  if (blockIdx.x == 0) coordinator(p, s.call, m);
  if (p.refused) return;
  if (blockIdx.x != 0 || gridDim.x == 1) sender<kFp8>(p, s, m, first, step, in);
}

/// Learns what all sources send: counts, and which tokens come. All threads; returns the sources that have said so.
DEVICE u32 learn_sources(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m) {
  const int tid = static_cast<int>(threadIdx.x);
  const int num_words = p.at.head_words - 1;
  const u64 tag = s.call.receive_tag;
  const u32 head = learn_head(p.call, p.at, s.call, s.call.active, static_cast<u32>(p.kind));
  if (tid < kNumRanks) s.num_tokens[tid] = static_cast<i32>(head & kHeadTokens);
#pragma unroll 1
  for (int i = tid; i < kNumRanks * num_words; i += static_cast<int>(blockDim.x)) {
    const int src = i / num_words;
    const int w = i - src * num_words;
    u32 value = 0;
    if ((s.call.active >> src & 1) &&
        !wait_marked(p.call, s.call, tag, head_at(p.at, p.call.own, tag, src) + 1 + w, src, value))
      red_or_shared(&s.call.late, 1u << src);
    if (w < p.token_words) {
      m.bits[src * p.token_words + w] = value;
      continue;
    }
    if (value > static_cast<u32>(p.at.max_tokens)) {  // no peer of ours says that
      report_error(p.call, tag, kBadCount, src, static_cast<u64>(p.at.max_tokens), value, 0);
      red_or_shared(&s.call.late, 1u << src);
      value = 0;
    }
    m.counts[src * p.num_local_experts + w - p.token_words] = static_cast<i32>(value);
  }
  __syncthreads();
  return s.call.active & ~s.call.late;
}

/// Lane k's meta of a record in packets. One warp; false when it does not come.
DEVICE bool read_packed_meta(const LatencyDispatchParams& p, const CallShared& s, u64 tag, int src, const u8* from,
                             u64& meta) {
  const int num_packets = (p.meta_words + p.row_words + p.scale_words + 2) / 3;
  u32 half[2] = {0, 0};
  bool is_there = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (lane_idx() >= p.num_topk || !is_there) continue;
    const int plane = (2 * lane_idx() + i) / num_packets;
    Vec16 v;
    is_there = wait_packet(p.call, s, tag, from + 16 * (2 * lane_idx() + i - plane * num_packets), src, v);
    half[i] = plane == 0 ? v.word[0] : plane == 1 ? v.word[1] : v.word[2];
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

/// Brings a share of one token to its rows. One warp; false when its source is late.
template <bool kIsPacked>
DEVICE bool receive_token(const LatencyDispatchParams& p, const DispatchShared& s, const i32* counts, u32 taken,
                          int src, int token, Share share) {
  const u64 tag = s.call.receive_tag;
  const int lane = lane_idx();
  const u8* from = kIsPacked ? packets_at(p.at, p.call.own, tag, src, token) : row_at(p.at, p.call.own, tag, src, token);
  u64 meta = kNoExpert;
  if (kIsPacked) {
    if (!read_packed_meta(p, s.call, tag, src, from, meta)) return false;
  } else {
    bool is_there = true;
    if (lane == 0) is_there = wait_flag(p.call, s.call, tag, flag_at(p.at, p.call.own, tag, src, token), src);
    __syncwarp();  // what lane 0 has acquired, all may read
    if (__ballot_sync(~0u, is_there) != ~0u) return false;
    if (lane < p.num_topk) meta = reinterpret_cast<const u64*>(from)[lane];
  }
  Target to = {-1, 0, false};
  if (lane < p.num_topk) to = find_target(p, counts, taken, src, meta);
  const u32 wanted = __ballot_sync(~0u, to.row >= 0 && to.is_first);
  if (share.part == 0) note_rows(p, to, meta, src, token);
  if (kIsPacked) return expand_packets(p, s.call, src, from, to, wanted, share);
  expand_row(p, from, to, wanted, share);
  return true;
}

/// This warp's share, of `num_warps`, of the tokens of those sources in `taken` that send packets, or of the others.
/// Sources that are late are noted.
template <bool kIsPacked>
DEVICE void receive_tokens(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m, u32 taken,
                           int warp, int num_warps) {
  constexpr int kShares = kIsPacked ? kPacketShares : kRowShares;
  const int num_tokens = kIsPacked ? p.at.packet_tokens : p.at.max_tokens;
#pragma unroll 1
  for (int i = warp; i < kShares * kNumRanks * num_tokens; i += num_warps) {
    const int token = i / (kShares * kNumRanks);  // neighbours serve different sources
    const int src = i / kShares - token * kNumRanks;
    if (!(taken >> src & 1) || token >= s.num_tokens[src]) continue;
    if ((s.num_tokens[src] <= p.at.packet_tokens) != kIsPacked) continue;
    if (!(m.bits[src * p.token_words + token / 32] >> token % 32 & 1)) continue;
    if (!receive_token<kIsPacked>(p, s, m.counts, taken, src, token, {i % kShares, kShares}) && lane_idx() == 0)
      red_or_shared(&s.call.late, 1u << src);
    __syncwarp();
  }
}

/// Writes what the host and the combine want to know. All threads of the last block.
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
    if (p.stats) reinterpret_cast<i32*>(p.stats)[e] += static_cast<i32>(begin);
  }
#pragma unroll 1
  for (int i = tid; i < kNumRanks * (1 + p.token_words); i += step) {
    const int src = i / (1 + p.token_words);
    const int w = i - src * (1 + p.token_words);
    const u32 value = w == 0 ? static_cast<u32>(s.num_tokens[src]) : m.bits[src * p.token_words + w - 1];
    reinterpret_cast<u32*>(p.recv_info)[i] = counted >> src & 1 ? value : 0;
  }
}

/// All threads.
DEVICE void receive_half(const LatencyDispatchParams& p, DispatchShared& s, const DispatchMemory& m) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  int warp = static_cast<int>(blockIdx.x + gridDim.x * (threadIdx.x / 32));
  int step = static_cast<int>(gridDim.x) * num_warps;
  __syncthreads();
  u32 taken = learn_sources(p, s, m);
  __syncthreads();  // all have the same, before somebody notes that a source is late
#pragma unroll 1
  for (bool is_again = false;; is_again = true) {
    receive_tokens<true>(p, s, m, taken, warp, step);
    receive_tokens<false>(p, s, m, taken, warp, step);
    if (is_again) break;
    if (!end_block(p.call, s.call, taken, p.call.end_offset)) return;
    taken = counted_sources(s.call);
    if (!has_differed(s.call)) break;
    warp = warp_idx();
    step = num_warps;
  }
  write_results(p, s, m, taken);
  finish_call(p.call, s.call, taken, s.call.wanted, p.out_got);
}

template <bool kFp8>
DEVICE void dispatch(const LatencyDispatchParams& p) {
  __shared__ DispatchShared s;
  const DispatchMemory m = split_memory(p);
  const bool is_sending = p.call.halves & kSendHalf;
  const int num_senders = gridDim.x == 1 ? 1 : static_cast<int>(gridDim.x) - 1;
  const int first = gridDim.x == 1 ? 0 : static_cast<int>(blockIdx.x) - 1;
  wait_previous_kernel();
  Input in = {};
  if (is_sending && first >= 0 && first < p.num_tokens) in = load_input<kFp8>(p, first, 0);
  open_call(p.call, p.at, s.call);
  __syncthreads();
  if (is_sending) send_half<kFp8>(p, s, m, first, num_senders, in);
  allow_next_kernel();
  if ((p.call.halves & kReceiveHalf) && !p.refused) {
    receive_half(p, s, m);
  } else if (end_block(p.call, s.call, 0, p.call.end_offset)) {
    finish_call(p.call, s.call, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1)
    latency_dispatch_fp8(const __grid_constant__ LatencyDispatchParams p) {
  dispatch<true>(p);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    latency_dispatch_bf16(const __grid_constant__ LatencyDispatchParams p) {
  dispatch<false>(p);
}
