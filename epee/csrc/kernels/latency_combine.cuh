// Combine of the latency mode: the experts of one rank are weighed and summed there, one row for each token crosses
// back, and the token's rank sums what it gets. A row of expert output is read where it lies, so nothing is copied.
//
//   announcer    block 0, send half: a word to every rank that says whether this rank has its tokens. When the weights
//                are given to the combine, it sends those of its tokens to the ranks that have them.
//   reducer      every block, send half: finds the rows of a token (a warp each), sums them in float32 into a record
//                in shared memory, rounds once, and sends it as dispatch sends its records (latency_call.cuh).
//   collector    every block, receive half: a share of a token at a time, sums the partials of all ranks that have it.
//   The last block to end decides what counts, as in dispatch; when blocks have not seen the same ranks whole, it sums
//   all tokens again.
//
// Sums begin with -0, the neutral element: partial += weight * row for k ascending (two roundings), total += partial for
// ranks ascending. A token without a row is +0. The mask that counts is that of the end: `got`.
//
// Time, 4 ranks, 128 tokens (estimated, microseconds): launch 1.3, places and rows 1.9, 5.0 MB over the link 14.2,
// acknowledgement and flag 2.9, last sum and end 1.5: 22. With packets (16 tokens): 7.
#pragma once
#include "../common/lanes.cuh"
#include "latency_call.cuh"

constexpr int kMaxTopk = 32;
constexpr int kRowBatch = 4;   // rows that are read at once,
constexpr int kUnitBatch = 1;  // so many pieces of them each
constexpr int kRowShares = 2;     // blocks that sum a token,
constexpr int kPacketShares = 4;  // and one whose partials come in packets
constexpr int kRankBatch = kNumRanks <= 4 ? kNumRanks : 3;  // ranks whose partials are read at once
constexpr int kNumPeers = kNumRanks > 1 ? kNumRanks - 1 : 1;

/// The rows of a token of a peer, in summing order.
struct TokenRows {
  i32 count;
  i32 row[kMaxTopk];
  float weight[kMaxTopk];
};

struct CombineShared {
  CallShared call;
  u32 served;                                 // ranks whose tokens this rank has
  u32 sent_to;                                // ranks that took part in the dispatch
  u32 first_ranks;                            // of the token that this block sums first
  i32 num_tokens[kMaxRanks];                  // of each rank's dispatch
  TokenRows rows[kMaxWarps];                  // one for each warp to find
};

DEVICE u64* weight_at(const LatencyCombineParams& p, u64 region, u64 tag, int src, int token, int k) {
  return reinterpret_cast<u64*>(region + p.weights_offset) +
         place_of(p.at, tag, src, token, p.at.max_tokens) * p.num_topk + k;
}

/// Learns from the handle whose tokens are here, and who has tokens of this rank. The last warp, while the first one
/// opens the call; the caller synchronises the block. `first`: the token that this block sums first.
DEVICE void open_handle(const LatencyCombineParams& p, CombineShared& s, int first) {
  if (warp_idx() != static_cast<int>(blockDim.x / 32) - 1) return;
  const int lane = lane_idx();
  const int src = lane < kNumRanks ? lane : 0;
  const i32* sent_to = reinterpret_cast<const i32*>(p.sent_to);
  const u8 got = reinterpret_cast<const u8*>(p.handle_got)[src];
  const i32 num_tokens = reinterpret_cast<const i32*>(p.recv_info)[src * (1 + p.token_words)];
  const bool is_receiving = (p.call.halves & kReceiveHalf) && !p.refused;
  const i32 ranks = is_receiving ? sent_to[0] : 0;
  const i32 first_ranks = is_receiving && first < p.num_tokens ? sent_to[1 + first] : 0;
  const u32 here = __ballot_sync(~0u, lane < kNumRanks && got != 0);
  if (lane < kNumRanks) s.num_tokens[lane] = num_tokens;
  if (lane != 0) return;
  s.served = here;
  s.sent_to = static_cast<u32>(ranks);
  s.first_ranks = static_cast<u32>(first_ranks);
}

/// All threads of block 0.
DEVICE void announcer(const LatencyCombineParams& p, const CombineShared& s) {
  const int tid = static_cast<int>(threadIdx.x);
  const u64 tag = s.call.send_tag;
  perhaps_stall(tag, p.call.rank, 11);
  if (tid < kNumRanks && (s.call.mapped >> tid & 1)) {
    const bool is_served = (s.served & s.call.active) >> tid & 1;
    const u32 value = p.refused ? kHeadRefused : !is_served ? kHeadExcluded : static_cast<u32>(p.kind) << kHeadKindShift;
    st_relaxed_sys(head_at(p.at, s.call.peer[tid], tag, part_of(p.call.rank, tid)), marked(tag, value));
  }
  if (!p.topk_weights || p.refused) return;
#pragma unroll 1
  for (int i = tid; i < p.num_tokens * p.num_topk; i += static_cast<int>(blockDim.x)) {
    const int token = i / p.num_topk;
    const u32 ranks = static_cast<u32>(reinterpret_cast<const i32*>(p.sent_to)[1 + token]) & s.call.active;
    const u64 word = marked(tag, reinterpret_cast<const u32*>(p.topk_weights)[i]);
#pragma unroll
    for (int d = 0; d < kNumRanks; ++d)
      if (ranks >> d & 1)
        st_relaxed_sys(weight_at(p, s.call.peer[d], tag, part_of(p.call.rank, d), token, i - token * p.num_topk), word);
  }
}

/// A token of a rank: the pairs of other ranks come token by token, and for each beginning behind this rank; then this
/// rank's own, while the others' rows are under way.
struct Pair {
  int src, token;
};
DEVICE Pair pair_of(const LatencyCombineParams& p, int index) {
  const int num_remote = (kNumRanks - 1) * p.at.max_tokens;
  if (index >= num_remote) return {p.call.rank, index - num_remote};
  const int token = index / kNumPeers;
  const int src = p.call.rank + 1 + index - token * kNumPeers;
  return {src < kNumRanks ? src : src - kNumRanks, token};
}

/// Finds the rows of a pair, `count` 0 when there are none. One warp.
DEVICE void find_rows(const LatencyCombineParams& p, CombineShared& s, int index, TokenRows& found) {
  const int lane = lane_idx();
  i32 row = -1;
  float weight = 0.0f;
  if (index < kNumRanks * p.at.max_tokens) {
    const Pair pair = pair_of(p, index);
    const i64 at = (static_cast<i64>(pair.src) * p.at.max_tokens + pair.token) * p.num_topk + lane;
    const u32* info = reinterpret_cast<const u32*>(p.recv_info) + pair.src * (1 + p.token_words);
    if (lane < p.num_topk) {
      row = reinterpret_cast<const i32*>(p.recv_rows)[at];
      weight = reinterpret_cast<const float*>(p.recv_weights)[at];
    }
    const u32 bits = info[1 + pair.token / 32];
    const bool is_wanted = ((s.served & s.call.active) >> pair.src & 1) && (bits >> pair.token % 32 & 1);
    if (!is_wanted || row >= p.num_rows) row = -1;
    u32 given = 0;
    if (p.has_weights && row >= 0) {
      if (wait_marked(p.call, s.call, s.call.send_tag,
                      weight_at(p, p.call.own, s.call.send_tag, pair.src, pair.token, lane), pair.src, given)) {
        weight = __uint_as_float(given);
      } else {
        red_or_shared(&s.call.late, 1u << pair.src);  // it is late for this call: it gets nothing whole
        row = -1;
      }
    }
  }
  const u32 wanted = __ballot_sync(~0u, row >= 0);
  if (row >= 0) {
    const int position = __popc(wanted & lanes_below());
    found.row[position] = row;
    found.weight[position] = weight;
  }
  if (lane == 0) found.count = __popc(wanted);
}

/// Threads that sum; the last warp releases flags meanwhile.
DEVICE int num_workers() { return blockDim.x > 32 ? static_cast<int>(blockDim.x) - 32 : static_cast<int>(blockDim.x); }

/// Rounds eight sums and stores them as `unit` of the record at `to`, at the token's rank or in shared memory.
template <bool kIsWide>
DEVICE void store_sum(const Lanes<kBf16>& sum, u8* to, int unit) {
  if (kIsWide) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Lanes<kF32> half;
#pragma unroll
      for (int c = 0; c < 4; ++c) half.value[c] = sum.value[4 * part + c];
      *reinterpret_cast<Vec16*>(to + 32 * unit + 16 * part) = pack<kF32>(half);
    }
  } else {
    *reinterpret_cast<Vec16*>(to + 16 * unit) = pack<kBf16>(sum);
  }
}

/// Sums the rows of a token into the record at `to`: bfloat16, or float32 with `kIsWide`. Workers.
template <bool kIsWide>
DEVICE void sum_rows(const LatencyCombineParams& p, const TokenRows& rows, u8* to) {
  const int num_units = p.hidden / 8;
  const int step = num_workers();
  const int count = rows.count;
#pragma unroll 1
  for (int base = static_cast<int>(threadIdx.x); base < num_units; base += kUnitBatch * step) {
    Lanes<kBf16> sum[kUnitBatch];
#pragma unroll
    for (int j = 0; j < kUnitBatch; ++j) sum[j] = filled<kBf16>(-0.0f);
#pragma unroll 1
    for (int n = 0; n < count; n += kRowBatch) {
      Vec16 v[kRowBatch][kUnitBatch];
#pragma unroll
      for (int i = 0; i < kRowBatch; ++i)
#pragma unroll
        for (int j = 0; j < kUnitBatch; ++j)
          if (n + i < count && base + j * step < num_units)
            v[i][j] = ld_vec16(reinterpret_cast<const u8*>(p.y) + rows.row[n + i] * p.y_stride +
                               16 * (base + j * step));
#pragma unroll
      for (int i = 0; i < kRowBatch; ++i)
#pragma unroll
        for (int j = 0; j < kUnitBatch; ++j)
          if (n + i < count && base + j * step < num_units)
            add_scaled<kBf16>(sum[j], rows.weight[n + i], unpack<kBf16>(v[i][j]));
    }
#pragma unroll
    for (int j = 0; j < kUnitBatch; ++j)
      if (base + j * step < num_units) store_sum<kIsWide>(sum[j], to, base + j * step);
  }
}

/// Sends the partial of a token of a rank: straight from registers with a flag behind it, or in packets. All threads.
template <bool kIsWide>
DEVICE void send_partial(const LatencyCombineParams& p, const CombineShared& s, const TokenRows& rows, Pair pair,
                         u8* record) {
  const u64 tag = s.call.send_tag;
  const u64 peer = s.call.peer[pair.src];
  const int src = part_of(p.call.rank, pair.src);
  const int tid = static_cast<int>(threadIdx.x);
  const bool is_packed = s.num_tokens[pair.src] <= p.at.packet_tokens;
  if (lane_idx() == 0) perhaps_stall(tag, p.call.rank, 4);
  u8* const place = is_packed ? packets_at(p.at, peer, tag, src, pair.token) : row_at(p.at, peer, tag, src, pair.token);
  if (tid < num_workers()) sum_rows<kIsWide>(p, rows, is_packed ? record : place);
  __syncthreads();
  if (!is_packed) {
    if (warp_idx() == static_cast<int>(blockDim.x / 32) - 1)
      release_flags(p.call, p.at, s.call, tag, pair.token, 1u << pair.src);
    return;
  }
  const int num_packets = (p.hidden / (kIsWide ? 1 : 2) + 2) / 3;
#pragma unroll 1
  for (int i = tid; i < num_packets; i += static_cast<int>(blockDim.x))
    st_relaxed_sys_128(place + 16 * i, packet_of(reinterpret_cast<const u32*>(record), num_packets, i, tag));
  __syncthreads();
}

/// Sends the partials of this block's share of the pairs. All threads.
template <bool kIsWide>
DEVICE void reducer(const LatencyCombineParams& p, CombineShared& s, u8* record) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int grid = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x); first < kNumRanks * p.at.max_tokens; first += grid * num_warps) {
    find_rows(p, s, first + grid * warp_idx(), s.rows[warp_idx()]);
    __syncthreads();
#pragma unroll 1
    for (int w = 0; w < num_warps; ++w)
      if (s.rows[w].count > 0) send_partial<kIsWide>(p, s, s.rows[w], pair_of(p, first + grid * w), record);
    __syncthreads();
  }
}

/// Which ranks a token awaits, of those in `taken`.
DEVICE u32 ranks_of(const LatencyCombineParams& p, int token, u32 taken) {
  return static_cast<u32>(reinterpret_cast<const i32*>(p.sent_to)[1 + token]) & taken;
}

/// A thread's three words of a token, summed over ranks that send packets.
struct PacketSums {
  float low[3], high[3];
};

/// Adds a packet of every rank in `ranks`; those that do not come are noted as late.
template <bool kIsWide>
DEVICE void add_packets(const LatencyCombineParams& p, CombineShared& s, int token, u32 ranks, int index,
                        PacketSums& sums) {
  const u64 tag = s.call.receive_tag;
#pragma unroll 1
  for (int first = 0; first < kNumRanks; first += kRankBatch) {
    Vec16 v[kRankBatch];
#pragma unroll
    for (int j = 0; j < kRankBatch; ++j)
      if (ranks >> (first + j) & 1)
        v[j] = ld_relaxed_sys_128(packets_at(p.at, p.call.own, tag, first + j, token) + 16 * index);
#pragma unroll
    for (int j = 0; j < kRankBatch; ++j) {
      const int d = first + j;
      if (!(ranks >> d & 1)) continue;
      if (v[j].word[3] != static_cast<u32>(tag) &&
          !wait_packet(p.call, s.call, tag, packets_at(p.at, p.call.own, tag, d, token) + 16 * index, d, v[j]))
        red_or_shared(&s.call.late, 1u << d);
#pragma unroll
      for (int plane = 0; plane < 3; ++plane) {
        const u32 word = v[j].word[plane];
        const float low = kIsWide ? __uint_as_float(word) : bf16_to_float(static_cast<u16>(word));
        sums.low[plane] = __fadd_rn(sums.low[plane], low);
        if (!kIsWide) sums.high[plane] = __fadd_rn(sums.high[plane], bf16_to_float(static_cast<u16>(word >> 16)));
      }
    }
  }
}

/// Sums a share of a token whose partials come in packets. All threads.
template <bool kIsWide>
DEVICE void collect_packets(const LatencyCombineParams& p, CombineShared& s, int token, u32 ranks, int part) {
  const int num_words = p.hidden / (kIsWide ? 1 : 2);
  const int num_packets = (num_words + 2) / 3;
  const Range range = piece(num_packets, kPacketShares, part);
  u32* out = reinterpret_cast<u32*>(p.out) + static_cast<i64>(token) * (p.hidden / 2);
#pragma unroll 1
  for (int i = range.begin + static_cast<int>(threadIdx.x); i < range.end; i += static_cast<int>(blockDim.x)) {
    const float start = ranks ? -0.0f : 0.0f;
    PacketSums sums = {{start, start, start}, {start, start, start}};
    add_packets<kIsWide>(p, s, token, ranks, i, sums);
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      const int at = plane * num_packets + i;
      if (at >= num_words) continue;
      if (kIsWide)
        reinterpret_cast<u16*>(out)[at] = static_cast<u16>(float2_to_bf16x2(sums.low[plane], 0.0f));
      else
        out[at] = float2_to_bf16x2(sums.low[plane], sums.high[plane]);
    }
  }
}

/// Sums a share of a token whose partials lie here whole. All threads.
template <bool kIsWide>
DEVICE void collect_rows(const LatencyCombineParams& p, const CombineShared& s, int token, u32 ranks, int part) {
  constexpr Payload kPayload = kIsWide ? kF32 : kBf16;
  constexpr int kCount = Lanes<kPayload>::kCount;
  u8* out = reinterpret_cast<u8*>(p.out) + static_cast<i64>(token) * 2 * p.hidden;
  const Range range = piece(p.hidden / kCount, kRowShares, part);
#pragma unroll 1
  for (int unit = range.begin + static_cast<int>(threadIdx.x); unit < range.end; unit += static_cast<int>(blockDim.x)) {
    Lanes<kPayload> sum = filled<kPayload>(ranks ? -0.0f : 0.0f);
#pragma unroll 1
    for (int first = 0; first < kNumRanks; first += kRankBatch) {
      Vec16 v[kRankBatch];
#pragma unroll
      for (int j = 0; j < kRankBatch; ++j)
        if (ranks >> (first + j) & 1)
          v[j] = ld_vec16(row_at(p.at, p.call.own, s.call.receive_tag, first + j, token) + 16 * unit);
#pragma unroll
      for (int j = 0; j < kRankBatch; ++j)
        if (ranks >> (first + j) & 1) add<kPayload>(sum, unpack<kPayload>(v[j]));
    }
    if (kIsWide) {
      u32* to = reinterpret_cast<u32*>(out + 8 * unit);
      to[0] = float2_to_bf16x2(sum.value[0], sum.value[1]);
      to[1] = float2_to_bf16x2(sum.value[2], sum.value[3]);
    } else {
      st_vec16(out + 16 * unit, pack<kPayload>(sum));
    }
  }
}

/// Sums a share of a token over `ranks`. All threads; notes ranks that are late, and what is written then
/// is nothing.
template <bool kIsWide>
DEVICE void collect_token(const LatencyCombineParams& p, CombineShared& s, int token, u32 ranks, int part) {
  if (p.num_tokens <= p.at.packet_tokens) {
    collect_packets<kIsWide>(p, s, token, ranks, part);
    return;
  }
  const int d = static_cast<int>(threadIdx.x);
  const u64 tag = s.call.receive_tag;
  if (d < kNumRanks && (ranks >> d & 1) &&
      !wait_flag(p.call, s.call, tag, flag_at(p.at, p.call.own, tag, d, token), d))
    red_or_shared(&s.call.late, 1u << d);
  __syncthreads();
  collect_rows<kIsWide>(p, s, token, ranks, part);
}

DEVICE int shares_of(const LatencyCombineParams& p) {
  return p.num_tokens <= p.at.packet_tokens ? kPacketShares : kRowShares;
}

template <bool kIsWide>
DEVICE void collector(const LatencyCombineParams& p, CombineShared& s, u32 taken, int first, int step) {
  const int shares = shares_of(p);
#pragma unroll 1
  for (int i = first; i < p.num_tokens * shares; i += step) {
    const bool is_known = i == static_cast<int>(blockIdx.x);
    const u32 ranks = is_known ? s.first_ranks & taken : ranks_of(p, i / shares, taken);
    collect_token<kIsWide>(p, s, i / shares, ranks, i % shares);
  }
}

/// All threads.
template <bool kIsWide>
DEVICE void collect_half(const LatencyCombineParams& p, CombineShared& s) {
  const u32 awaited = s.sent_to & s.call.active;
  __syncthreads();
  if (threadIdx.x == 0 && (p.call.halves & kSendHalf)) {
    s.call.late = 0;  // who was late with its weights may have sent its rows all the same
    if (p.has_weights) s.call.deadline_ns = global_time_ns() + p.call.timeout_ns;  // all ranks may have waited for them
  }
  __syncthreads();
  if (warp_idx() == 0) learn_head(p.call, p.at, s.call, awaited, static_cast<u32>(p.kind));
  __syncthreads();
  u32 taken = awaited & ~s.call.late;
  int first = static_cast<int>(blockIdx.x);
  int step = static_cast<int>(gridDim.x);
  __syncthreads();
#pragma unroll 1
  for (bool is_again = false;; is_again = true) {
    collector<kIsWide>(p, s, taken, first, step);
    if (is_again) break;
    if (!end_block(p.call, s.call, awaited, taken, p.call.end_offset)) return;
    taken = counted_sources(s.call);
    if (!has_differed(s.call)) break;
    first = 0;
    step = 1;
  }
  finish_call(p.call, s.call, taken, awaited, p.out_got);
}

template <bool kIsWide>
DEVICE void combine(const LatencyCombineParams& p) {
  __shared__ CombineShared s;
  wait_previous_kernel();
  open_call(p.call, p.at, s.call);
  open_handle(p, s, static_cast<int>(blockIdx.x) / shares_of(p));
  __syncthreads();
  if (p.call.halves & kSendHalf) {
    if (blockIdx.x == 0) announcer(p, s);
    if (!p.refused) reducer<kIsWide>(p, s, dynamic_shared());
  }
  allow_next_kernel();
  if ((p.call.halves & kReceiveHalf) && !p.refused) {
    collect_half<kIsWide>(p, s);
  } else if (end_block(p.call, s.call, 0, 0, p.call.end_offset)) {
    finish_call(p.call, s.call, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(512, 2)
    latency_combine_bf16(const __grid_constant__ LatencyCombineParams p) {
  combine<false>(p);
}

extern "C" __global__ void __launch_bounds__(512, 2)
    latency_combine_f32(const __grid_constant__ LatencyCombineParams p) {
  combine<true>(p);
}
