// How a token becomes a record, and a record becomes rows of the result.
//
// A record is meta | row | scales. Meta is a u64 for each k: weight above; below the physical expert (16 bits,
// kNoExpert for none), the number of this rank's earlier tokens that chose the same expert (15 bits), and whether an
// earlier k of the token did (the topmost bit), in which case the row is written once only. The row is bfloat16, or
// e4m3 by blocks of 128 channels with a scale each.
#pragma once
#include "../../common/experts.cuh"
#include "../../ptx/convert.cuh"
#include "call.cuh"

constexpr u32 kNoExpert = 0x7FFF;
constexpr u32 kRepeated = 0x8000;  // in `ids`: no first choice of this expert in its token
constexpr int kRowShares = 4;      // warps that expand a row,
constexpr int kPacketShares =
    kPacketWarps;  // and one that comes in packets: a packet for each lane if it is FP8 of 7168
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

/// Quantises sixteen channels of each thread; eight threads share a block of 128, whose scale is written. All lanes of
/// a warp.
DEVICE Vec16 quantise(const LatencyDispatchParams& p, int unit, const Input& in, u8* scales) {
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
  if (16 * unit >= p.hidden || unit % 8) return out;
  const u32 bits = __float_as_uint(scale.scale);
  if (p.scale_kind == kUe8m0Scales)
    scales[unit / 8] = static_cast<u8>(bits >> 23);
  else
    reinterpret_cast<u32*>(scales)[unit / 8] = bits;
  return out;
}

DEVICE int packets_of_record(const LatencyDispatchParams& p) {
  return (p.meta_words + p.row_words + p.scale_words + 2) / 3;
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
  const i32 local = expert - first_expert_of(p.call.rank, p.num_local_experts);
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

/// What a lane has of a share of a record that lies in memory: units of the row, 32 apart, and a scale.
template <bool kFp8>
struct RowPart {
  static constexpr int kBatch = kFp8 ? 4 : 8;  // all of it, if the row has 7168 channels
  Vec16 v[kBatch];
  u32 scale;
};
template <bool kFp8>
DEVICE void load_units(RowPart<kFp8>& part, const u8* row, int base, int end) {
#pragma unroll
  for (int b = 0; b < RowPart<kFp8>::kBatch; ++b)
    if (base + 32 * b < end) part.v[b] = ld_vec16(row + 16 * (base + 32 * b));
}
DEVICE Range units_of(const LatencyDispatchParams& p, Share share) {
  return piece(p.row_words / 4, share.num_parts, share.part);
}
/// The scale of lane `lane_idx()`: at most 32 of a share, as hidden is 16384 at most. -1 for none.
DEVICE int scale_of_lane(const LatencyDispatchParams& p, Share share) {
  const Range scales = piece(p.scale_words, share.num_parts, share.part);
  return scales.begin + lane_idx() < scales.end ? scales.begin + lane_idx() : -1;
}

/// The beginning of a share of the record at `from`.
template <bool kFp8>
DEVICE RowPart<kFp8> load_part(const LatencyDispatchParams& p, const u8* from, Share share) {
  RowPart<kFp8> part;
  const u8* row = from + 4 * p.meta_words;
  const Range range = units_of(p, share);
  const int scale = scale_of_lane(p, share);
  load_units<kFp8>(part, row, range.begin + lane_idx(), range.end);
  part.scale = kFp8 && scale >= 0 ? reinterpret_cast<const u32*>(row + 4 * p.row_words)[scale] : 0;
  return part;
}

/// Copies a share of a record to the rows of all its experts here; `part` is the beginning of it. One warp.
template <bool kFp8>
DEVICE void expand_row(const LatencyDispatchParams& p, const u8* from, const Target& mine, u32 wanted, Share share,
                       RowPart<kFp8> part) {
  constexpr int kBatch = RowPart<kFp8>::kBatch;
  const Range range = units_of(p, share);
  const int scale = kFp8 ? scale_of_lane(p, share) : -1;
#pragma unroll 1
  for (int base = range.begin + lane_idx(), n = 0;; ++n) {
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const Target to = target_of_lane(mine, __ffs(left) - 1);
      u8* row = result_row(p, to.row);
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
        if (base + 32 * b < range.end) st_vec16(row + 16 * (base + 32 * b), part.v[b]);
      if (kFp8 && n == 0 && scale >= 0) *result_scale(p, to, scale) = part.scale;
    }
    base += 32 * kBatch;
    if (base - lane_idx() >= range.end) return;
    load_units<kFp8>(part, from + 4 * p.meta_words, base, range.end);
  }
}

/// Puts word `at` of a record, counted behind its meta, where it belongs.
DEVICE void put_word(const LatencyDispatchParams& p, u32* row, u32* scales, int at, u32 word) {
  if (at < 0 || at >= p.row_words + p.scale_words) return;
  if (at < p.row_words)
    row[at] = word;
  else
    scales[(at - p.row_words) * kNumRanks * p.at.max_tokens] = word;
}

/// Copies a share of a record that comes in packets. `v` is lane's first packet as it was found; packets follow
/// `32 * num_parts` apart. One warp; false when a packet does not come.
DEVICE bool expand_packets(const LatencyDispatchParams& p, const CallShared& s, int src, const u8* from,
                           const Target& mine, u32 wanted, Share share, Vec16 v) {
  const u64 tag = s.receive_tag;
  const int num_packets = packets_of_record(p);
  bool is_whole = true;
#pragma unroll 1
  for (int i = 32 * share.part + lane_idx();;) {
    const bool is_mine = i < num_packets;
    if (is_mine && v.word[3] != static_cast<u32>(tag)) is_whole &= wait_packet(p.call, s, tag, from + 16 * i, src, v);
    const int at = i - p.meta_words;
#pragma unroll 1
    for (u32 left = wanted; left; left &= left - 1) {
      const Target to = target_of_lane(mine, __ffs(left) - 1);
      u32* row = reinterpret_cast<u32*>(result_row(p, to.row));
      u32* scales = result_scale(p, to, 0);
      if (!is_mine) continue;
      put_word(p, row, scales, at, v.word[0]);
      put_word(p, row, scales, at + num_packets, v.word[1]);
      put_word(p, row, scales, at + 2 * num_packets, v.word[2]);
    }
    i += 32 * share.num_parts;
    if (i - lane_idx() >= num_packets) break;
    if (i < num_packets) v = ld_relaxed_sys_128(from + 16 * i);
  }
  return __ballot_sync(~0u, is_whole) == ~0u;
}
