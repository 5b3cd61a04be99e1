// How a token becomes a record, and a record becomes rows of the result.
//
// A record is meta | row | scales. Meta is a u64 for each k: weight above; below the expert (16 bits, kNoExpert for none),
// the number of this rank's earlier tokens that chose the same expert (15 bits), and whether an earlier k of the token
// did (the topmost bit), in which case the row is written once only. The row is bfloat16, or e4m3 by blocks of 128
// channels with a scale each.
#pragma once
#include "../ptx/convert.cuh"
#include "latency_call.cuh"

constexpr u32 kNoExpert = 0x7FFF;
constexpr u32 kRepeated = 0x8000;  // in `ids`: no first choice of this expert in its token
constexpr int kBatch = 8;          // 16-byte loads that a lane has in flight
constexpr int kPacketBatch = 4;
constexpr int kRowShares = 2;     // warps that expand a row,
constexpr int kPacketShares = 8;  // and one that comes in packets: with few tokens there are warps enough
enum ScaleKind : int { kFloatScales = 0, kPowerScales, kUe8m0Scales };

/// Two times sixteen bytes of a token's row that a thread works on: sixteen channels, or twice eight.
struct Input {
  Vec16 half[2];
};

template <bool kFp8>
DEVICE int units_per_pass() {
  return static_cast<int>(blockDim.x) * (kFp8 ? 1 : 2);
}

/// The piece of this thread in the pass that begins at unit `base` (16 channels in FP8, else 8).
template <bool kFp8>
DEVICE Input load_input(const LatencyDispatchParams& p, int token, int base) {
  const u8* row = reinterpret_cast<const u8*>(p.x) + token * p.x_stride;
  Input in;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int tid = static_cast<int>(threadIdx.x);
    const int unit = kFp8 ? 2 * (base + tid) + j : base + tid + j * static_cast<int>(blockDim.x);
    in.half[j] = {{0, 0, 0, 0}};
    if (16 * unit < 2 * p.hidden) in.half[j] = ld_vec16(row + 16 * unit);
  }
  return in;
}

/// Scale and factor of a block whose largest size is `amax`.
struct Scale {
  float scale, factor;
};
DEVICE Scale scale_of(float amax, int kind) {
  if (kind == kFloatScales) return {amax / 448.0f, 448.0f / amax};
  const u32 bits = __float_as_uint(amax / 448.0f);
  const u32 exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0);
  return {__uint_as_float(exponent << 23), 1.0f / __uint_as_float(exponent << 23)};
}

/// Quantises sixteen channels of each thread; eight threads share a block of 128. All lanes of a warp.
DEVICE void write_fp8(const LatencyDispatchParams& p, int base, const Input& in, u8* row, u8* scales) {
  float value[16];
  float amax = 1e-4f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 word = in.half[i / 4].word[i % 4];
    value[2 * i] = bf16_to_float(static_cast<u16>(word));
    value[2 * i + 1] = bf16_to_float(static_cast<u16>(word >> 16));
    amax = fmaxf(amax, fmaxf(fabsf(value[2 * i]), fabsf(value[2 * i + 1])));  // takes no NaN
  }
#pragma unroll
  for (int lanes = 1; lanes < 8; lanes *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, lanes));
  const Scale scale = scale_of(amax, p.scale_kind);
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* v = value + 4 * i;
    out.word[i] = float2_to_e4m3x2(__fmul_rn(v[0], scale.factor), __fmul_rn(v[1], scale.factor)) |
                  float2_to_e4m3x2(__fmul_rn(v[2], scale.factor), __fmul_rn(v[3], scale.factor)) << 16;
  }
  const int unit = base + static_cast<int>(threadIdx.x);
  if (16 * unit >= p.hidden) return;
  *reinterpret_cast<Vec16*>(row + 16 * unit) = out;
  if (unit % 8) return;
  const u32 bits = __float_as_uint(scale.scale);
  if (p.scale_kind == kUe8m0Scales)
    scales[unit / 8] = static_cast<u8>(bits >> 23);
  else
    reinterpret_cast<u32*>(scales)[unit / 8] = bits;
}

DEVICE void write_bf16(const LatencyDispatchParams& p, int base, const Input& in, u8* row) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int unit = base + static_cast<int>(threadIdx.x) + j * static_cast<int>(blockDim.x);
    if (8 * unit < p.hidden) *reinterpret_cast<Vec16*>(row + 16 * unit) = in.half[j];
  }
}

/// Where the row of a source's choice lies in the result; lane k holds that of slot k.
struct Target {
  i32 row;    // over all blocks: local expert * (rows of a block) + row; -1 for none
  i32 local;  // expert
  bool is_first;
};

/// `counts[src][local]` tokens came from each source, of which those in `taken` count. What a peer says is checked.
DEVICE Target find_target(const LatencyDispatchParams& p, const i32* counts, u32 taken, int src, u64 meta) {
  const u32 entry = static_cast<u32>(meta);
  const i32 expert = static_cast<i32>(entry & 0x7FFF);
  const i32 local = expert - part_of(p.call.rank, src) * p.num_local_experts;
  const i32 ordinal = static_cast<i32>(entry >> 16 & 0x7FFF);
  const bool is_here = expert != static_cast<i32>(kNoExpert) && local >= 0 && local < p.num_local_experts;
  if (!is_here || ordinal >= counts[src * p.num_local_experts + local]) return {-1, 0, false};
  i32 row = local * kNumRanks * p.at.max_tokens + ordinal;
#pragma unroll
  for (int s = 0; s < kNumRanks; ++s)
    if (s < src && (taken >> s & 1)) row += counts[s * p.num_local_experts + local];
  return {row, local, !(entry >> 31)};
}

DEVICE u8* result_row(const LatencyDispatchParams& p, i32 row) {
  return reinterpret_cast<u8*>(p.out_x) + static_cast<i64>(row) * 4 * p.row_words;
}

/// Scales lie transposed: `[local expert][scale][row]`.
DEVICE u32* result_scale(const LatencyDispatchParams& p, const Target& to, int i) {
  const i64 rows = static_cast<i64>(kNumRanks) * p.at.max_tokens;
  return reinterpret_cast<u32*>(p.out_scales) + (static_cast<i64>(to.local) * p.scale_words + i) * rows +
         (to.row - to.local * rows);
}

DEVICE Target target_of_lane(const Target& mine, int lane) {
  return {__shfl_sync(~0u, mine.row, lane), __shfl_sync(~0u, mine.local, lane), true};
}

/// Which part of a record a warp works on.
struct Share {
  int part, num_parts;
};

/// Copies a share of a record that lies in memory to the rows of all its experts here. One warp.
DEVICE void expand_row(const LatencyDispatchParams& p, const u8* from, const Target& mine, u32 wanted, Share share) {
  const int lane = lane_idx();
  const Range range = piece(p.row_words / 4, share.num_parts, share.part);
  from += 4 * p.meta_words;
#pragma unroll 1
  for (int first = range.begin; first < range.end; first += 32 * kBatch) {
    const int base = first + lane;
    Vec16 v[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      if (base + 32 * b < range.end) v[b] = ld_vec16(from + 16 * (base + 32 * b));
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      u8* to = result_row(p, __shfl_sync(~0u, mine.row, __ffs(left) - 1));
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (base + 32 * b < range.end) st_vec16(to + 16 * (base + 32 * b), v[b]);
    }
  }
  if (share.part != share.num_parts - 1) return;
  const u32* scales = reinterpret_cast<const u32*>(from + 4 * p.row_words);
#pragma unroll 1
  for (int first = 0; first < p.scale_words; first += 32) {
    const int i = first + lane;
    const u32 word = i < p.scale_words ? scales[i] : 0;
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const Target to = target_of_lane(mine, __ffs(left) - 1);
      if (i < p.scale_words) *result_scale(p, to, i) = word;
    }
  }
}

/// Where the words of a record go: a row of the result, and its scales.
struct WordPlaces {
  u32* row;
  u32* scales;
};
DEVICE WordPlaces word_places(const LatencyDispatchParams& p, const Target& to) {
  return {reinterpret_cast<u32*>(result_row(p, to.row)), result_scale(p, to, 0)};
}

/// Puts word `at` of a record, counted behind its meta, where it belongs.
DEVICE void put_word(const LatencyDispatchParams& p, const WordPlaces& to, int at, u32 word) {
  if (at < 0 || at >= p.row_words + p.scale_words) return;
  if (at < p.row_words)
    to.row[at] = word;
  else
    to.scales[(at - p.row_words) * kNumRanks * p.at.max_tokens] = word;
}

/// The same with a record that comes in packets. One warp; false when a packet does not come.
DEVICE bool expand_packets(const LatencyDispatchParams& p, const CallShared& s, int src, const u8* from,
                           const Target& mine, u32 wanted, Share share) {
  const u64 tag = s.receive_tag;
  const int num_packets = (p.meta_words + p.row_words + p.scale_words + 2) / 3;
  const Range range = piece(num_packets, share.num_parts, share.part);
  bool is_whole = true;
#pragma unroll 1
  for (int first = range.begin; first < range.end; first += 32 * kPacketBatch) {
    const int base = first + lane_idx();
    Vec16 v[kPacketBatch];
#pragma unroll
    for (int b = 0; b < kPacketBatch; ++b)
      if (base + 32 * b < range.end) v[b] = ld_relaxed_sys_128(from + 16 * (base + 32 * b));
#pragma unroll
    for (int b = 0; b < kPacketBatch; ++b)
      if (base + 32 * b < range.end && v[b].word[3] != static_cast<u32>(tag))
        is_whole &= wait_packet(p.call, s, tag, from + 16 * (base + 32 * b), src, v[b]);
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const WordPlaces to = word_places(p, target_of_lane(mine, __ffs(left) - 1));
#pragma unroll
      for (int b = 0; b < kPacketBatch; ++b) {
        if (base + 32 * b >= range.end) continue;
        const int at = base + 32 * b - p.meta_words;
        put_word(p, to, at, v[b].word[0]);
        put_word(p, to, at + num_packets, v[b].word[1]);
        put_word(p, to, at + 2 * num_packets, v[b].word[2]);
      }
    }
  }
  return __ballot_sync(~0u, is_whole) == ~0u;
}
