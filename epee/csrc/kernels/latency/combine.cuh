// Combine for `LatencyBuffer`: the experts of one rank are weighed and summed there, one row for each token crosses
// back, and the token's rank sums what it gets. A row of expert output is read where it lies, so nothing is copied.
//
//   announcer    block 0, send half: a word to every rank that says whether this rank has its tokens. When the weights
//                are given to the combine, it sends those of its tokens to the ranks that have them.
//   reducer      every block, send half: finds the rows of a token (a warp each), sums a part of them in float32,
//                rounds once, and stores the sum at the token's rank, straight from registers: as a row in four parts
//                with a flag each, or in packets.
//   collector    every block, receive half: a share of a token at a time, sums the partials of all ranks that have it.
//   The last block to end decides what counts, as in dispatch; when blocks have not seen the same ranks whole, it sums
//   all tokens again.
//
// Sums begin with -0, the neutral element: partial += weight * row for k ascending (two roundings), total += partial
// for ranks ascending. A token without a row is +0. The mask that counts is that of the end: `got`.
//
// Time, 128 tokens, in microseconds, from time stamps on H200s (four ranks on two GPUs): call open 1, rows found 0.7,
// read, summed and stored (4.9 MB) 17, acknowledged and seen 2, last sums 2, end 1. In packets (16 tokens): 8.5 in all.
#pragma once
#include "reduce.cuh"

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
    Vec16 v[ROOM(kRankBatch, 4)];
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
      const int at = 3 * i + plane;
      if (at >= num_words) continue;
      if (kIsWide)
        reinterpret_cast<u16*>(out)[at] = static_cast<u16>(float2_to_bf16x2(sums.low[plane], 0.0f));
      else
        out[at] = float2_to_bf16x2(sums.low[plane], sums.high[plane]);
    }
  }
}

/// Adds a unit of every rank in `ranks`, some ranks at once, `kUnits` units of a thread together.
template <int kPayload, int kUnits>
DEVICE void add_ranks(const LatencyCombineParams& p, u64 tag, int token, u32 ranks, int unit, int step, int end,
                      Lanes<kPayload> (&sum)[kUnits]) {
#pragma unroll 1
  for (int first = 0; first < kNumRanks; first += kRankBatch) {
    Vec16 v[ROOM(kRankBatch, 4)][kUnits];
#pragma unroll
    for (int j = 0; j < kRankBatch; ++j)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if ((ranks >> (first + j) & 1) && unit + u * step < end)
          v[j][u] = ld_vec16(row_at(p.at, p.call.own, tag, first + j, token) + 16 * (unit + u * step));
#pragma unroll
    for (int j = 0; j < kRankBatch; ++j)
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (ranks >> (first + j) & 1) add<kPayload>(sum[u], unpack<kPayload>(v[j][u]));
  }
}

/// Sums a share of a token whose partials lie here whole. All threads.
template <bool kIsWide>
DEVICE void collect_rows(const LatencyCombineParams& p, const CombineShared& s, int token, u32 ranks, int part) {
  constexpr Payload kPayload = kIsWide ? kF32 : kBf16;
  constexpr int kUnits = 2;
  const int step = static_cast<int>(blockDim.x);
  u8* out = reinterpret_cast<u8*>(p.out) + static_cast<i64>(token) * 2 * p.hidden;
  constexpr int kParts = kRowParts / kRowShares;
  const int num_units = p.hidden / Lanes<kPayload>::kCount;
  const Range range = {piece(num_units, kRowParts, part * kParts).begin,
                       piece(num_units, kRowParts, part * kParts + kParts - 1).end};
#pragma unroll 1
  for (int unit = range.begin + static_cast<int>(threadIdx.x); unit < range.end; unit += kUnits * step) {
    Lanes<kPayload> sum[kUnits] = {filled<kPayload>(ranks ? -0.0f : 0.0f), filled<kPayload>(ranks ? -0.0f : 0.0f)};
    add_ranks<kPayload, kUnits>(p, s.call.receive_tag, token, ranks, unit, step, range.end, sum);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int at = unit + u * step;
      if (at >= range.end) continue;
      if (kIsWide) {
        u32* to = reinterpret_cast<u32*>(out + 8 * at);
        to[0] = float2_to_bf16x2(sum[u].value[0], sum[u].value[1]);
        to[1] = float2_to_bf16x2(sum[u].value[2], sum[u].value[3]);
      } else {
        st_vec16(out + 16 * at, pack<kPayload>(sum[u]));
      }
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
  constexpr int kParts = kRowParts / kRowShares;
  const int d = static_cast<int>(threadIdx.x) / kParts;
  const int n = part * kParts + static_cast<int>(threadIdx.x) % kParts;
  const u64 tag = s.call.receive_tag;
  if (d < kNumRanks && (ranks >> d & 1) &&
      !wait_flag(p.call, s.call, tag, part_flag(p, p.call.own, tag, d, token, n), d))
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
  if (p.has_weights && (p.call.halves & kSendHalf)) {
    __syncthreads();
    if (threadIdx.x == 0) {
      s.call.late = 0;  // who was late with its weights may have sent its rows all the same
      s.call.deadline_ns = global_time_ns() + p.call.timeout_ns;  // all ranks may have waited for them
    }
    __syncthreads();
  }
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
    if (!end_block(p.call, s.call, taken, p.call.end_offset)) return;
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
  Entry known = {{-1, -1}, -1, 0.0f, 0};
  if (!p.refused && (p.call.halves & kSendHalf)) known = load_entry(p, likely_pair(p));
  open_call(p.call, p.at, s.call);
  open_handle(p, s, static_cast<int>(blockIdx.x) / shares_of(p));
  __syncthreads();
  if (p.call.halves & kSendHalf) {
    if (blockIdx.x == 0) announcer(p, s);
    const u32 served = s.served & s.call.active;
    if (!p.refused) reducer<kIsWide, true>(p, s, served & packed_ranks(p, s), known);
    if (!p.refused) reducer<kIsWide, false>(p, s, served & ~packed_ranks(p, s), known);
  }
  allow_next_kernel();
  if ((p.call.halves & kReceiveHalf) && !p.refused) {
    collect_half<kIsWide>(p, s);
  } else if (end_block(p.call, s.call, 0, p.call.end_offset)) {
    finish_call(p.call, s.call, 0, 0, p.out_got);
  }
}

namespace epee {

__global__ void __launch_bounds__(256, 2) combine_latency_bf16(const __grid_constant__ LatencyCombineParams p) {
  combine<false>(p);
}

__global__ void __launch_bounds__(256, 2) combine_latency_f32(const __grid_constant__ LatencyCombineParams p) {
  combine<true>(p);
}

}  // namespace epee
