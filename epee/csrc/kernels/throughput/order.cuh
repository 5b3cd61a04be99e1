// Sums rows in an order that the caller asks for (`ep/throughput/order.py`). Plain, not fast: for programs that must
// match another library's bits.
//
// Runs behind a combine, by which all ranks have learnt where everybody's rows lie. A block takes a token: one thread
// finds its rows and puts them in order, all threads sum, 16 bytes each. A second kernel meets the peers: behind it the
// rows may be written again. When the combine has failed here, both do nothing. They are part of its call: they use its
// tag, and nothing advances.
#pragma once
#include "../../common/call.cuh"
#include "../../common/experts.cuh"
#include "../../common/work.cuh"
#include "../../ptx/convert.cuh"

enum OrderBy : int { kByRank = 0, kByLastK, kByK };
enum OrderPayload : int { kOrderBf16 = 0, kOrderF16, kOrderF32 };
constexpr int kMaxOrdered = 32;
constexpr int kOrderLanes = 8;

/// The rows of a token, in the order in which they are added. `ends_part` marks the last row of a rank's partial sum.
struct OrderedRows {
  i32 count;
  u64 address[kMaxOrdered];
  float weight[kMaxOrdered];
  i32 ends_part[kMaxOrdered];
};

/// Where rank `d`'s rows lie, 0 when it has not joined the combine `tag`. A rank that copies its rows may be at it
/// still: the one at `place`, counted from our first one there, is waited for. One thread.
DEVICE u64 rows_of_rank(const OrderParams& p, u64 tag, int d, i32 place) {
  const u64 word = ld_acquire_sys(call_word(p.call, p.call.rank, kControlCombineReadyOffset, d, tag));
  const u64 slot = word >> 8 & 0x7F;
  if (word >> 32 != (tag & 0xFFFFFFFF) || slot >= static_cast<u64>(p.num_slots)) return 0;
  const bool is_copied = word >> 8 & 0x80;  // our own rows are not copied: they are read where they are
  if (d == p.call.rank && is_copied) return p.y;
  const u64* staged = local_words(p.call, kControlStagedOffset) + d * kMaxStagedChunks + place / kStagedRows;
  if (is_copied && !wait_for(p.call, tag, staged, tag, d, 4)) return 0;
  return p.slots[d] + slot * p.slot_bytes;
}

/// The last k of a token whose expert lives on rank `d`, -1 for none.
DEVICE int last_k_on(const OrderParams& p, i64 token, int d) {
  const i32* experts = reinterpret_cast<const i32*>(p.expert_of) + token * p.num_topk;
  for (int k = p.num_topk - 1; k >= 0; --k)
    if (experts[k] >= 0 && owner_of(experts[k], p.num_local_experts) == d) return k;
  return -1;
}

DEVICE void append(OrderedRows& rows, const OrderParams& p, u64 tag, int d, i64 row, float weight, i32 place) {
  if (!is_row(row, p.max_rows) || rows.count == kMaxOrdered) return;  // nobody copies a dropped row
  const u64 base = rows_of_rank(p, tag, d, place);
  if (!base) return;
  rows.address[rows.count] = base + static_cast<u64>(row * p.row_bytes);
  rows.weight[rows.count] = weight;
  rows.ends_part[rows.count] = 0;
  ++rows.count;
}

/// Appends the row of (token, k) of the expert layout.
DEVICE void append_slot(OrderedRows& rows, const OrderParams& p, u64 tag, i64 token, int k) {
  const i64 at = token * p.num_topk + k;
  const i32 expert = reinterpret_cast<const i32*>(p.expert_of)[at];
  if (expert < 0) return;
  const i64 row = reinterpret_cast<const i32*>(p.row_base)[expert] + reinterpret_cast<const i32*>(p.ordinals)[at];
  const float weight = p.weights_of ? reinterpret_cast<const float*>(p.weights_of)[at] : 1.0f;
  // place 0: this layout's rows are never copied meanwhile
  append(rows, p, tag, owner_of(expert, p.num_local_experts), row, weight, 0);
}

/// Appends what rank `d` has of a token.
DEVICE void append_rank(OrderedRows& rows, const OrderParams& p, u64 tag, i64 token, int d) {
  if (p.is_expert) {
    for (int k = 0; k < p.num_topk; ++k) {
      const i32 expert = reinterpret_cast<const i32*>(p.expert_of)[token * p.num_topk + k];
      if (expert >= 0 && owner_of(expert, p.num_local_experts) == d) append_slot(rows, p, tag, token, k);
    }
  } else {
    const i32 place = reinterpret_cast<const i32*>(p.send_prefix)[token * kNumRanks + d];
    const i32 base = reinterpret_cast<const i32*>(p.row_base)[p.num_experts + d];
    if (place >= 0) append(rows, p, tag, d, base + place, 1.0f, place);
  }
  if (rows.count) rows.ends_part[rows.count - 1] = 1;
}

/// One thread: the rows of a token in order.
DEVICE void order_rows(const OrderParams& p, u64 tag, i64 token, OrderedRows& rows) {
  rows.count = 0;
  if (p.by == kByK) {
    for (int k = 0; k < p.num_topk; ++k) append_slot(rows, p, tag, token, k);
  } else if (p.by == kByRank) {
    for (int d = 0; d < kNumRanks; ++d) append_rank(rows, p, tag, token, d);
  } else {
    for (int k = 0; k < p.num_topk; ++k) {
      const i32 expert = reinterpret_cast<const i32*>(p.expert_of)[token * p.num_topk + k];
      const int d = expert < 0 ? -1 : owner_of(expert, p.num_local_experts);
      if (d >= 0 && last_k_on(p, token, d) == k) append_rank(rows, p, tag, token, d);
    }
  }
}

/// Element `i` of 16 bytes of payload.
DEVICE float element(const OrderParams& p, const Vec16& v, int i) {
  if (p.payload == kOrderF32) return __uint_as_float(v.word[i]);
  const u16 bits = static_cast<u16>(v.word[i / 2] >> (i % 2 * 16));
  return p.payload == kOrderBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

/// A sum as the payload's bits.
DEVICE u32 rounded(const OrderParams& p, float v) {
  if (p.payload == kOrderF32) return __float_as_uint(v);
  return p.payload == kOrderBf16 ? float2_to_bf16x2(v, 0.0f) & 0xFFFF : float_to_f16(v);
}

/// Rounds a float to the payload's precision.
DEVICE float through_payload(const OrderParams& p, float v) {
  if (p.payload == kOrderF32) return v;
  const u16 bits = static_cast<u16>(rounded(p, v));
  return p.payload == kOrderBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

/// Element `i` of a bias for the piece of the output at byte `at`.
DEVICE float bias_element(const OrderParams& p, u64 bias, i64 at, int i) {
  const u8* from = reinterpret_cast<const u8*>(bias);
  if (p.payload != kOrderF32 && p.is_bias_f32) return reinterpret_cast<const float*>(from + 2 * at)[i];
  return element(p, ld_vec16(from + at), i);
}

/// Sums 16 bytes of a token's output, at byte `at` of the output and `offset` of the rows. One thread.
DEVICE void sum_piece(const OrderParams& p, const OrderedRows& rows, i64 at, int offset) {
  const int num_lanes = p.payload == kOrderF32 ? 4 : kOrderLanes;
  float sum[kOrderLanes], part[kOrderLanes];
#pragma unroll
  for (int i = 0; i < kOrderLanes; ++i) {
    sum[i] = part[i] = -0.0f;
    if (i >= num_lanes || !p.bias_first) continue;
    if (p.bias_0) sum[i] = __fadd_rn(sum[i], bias_element(p, p.bias_0, at, i));
    if (p.bias_1) sum[i] = __fadd_rn(sum[i], bias_element(p, p.bias_1, at, i));
  }
#pragma unroll 1
  for (int e = 0; e < rows.count; ++e) {
    const Vec16 row = ld_vec16(reinterpret_cast<const u8*>(rows.address[e]) + offset);
#pragma unroll
    for (int i = 0; i < kOrderLanes; ++i) {
      if (i >= num_lanes) continue;
      const float value = p.is_expert ? __fmul_rn(rows.weight[e], element(p, row, i)) : element(p, row, i);
      if (p.by == kByK || !p.is_expert) {
        sum[i] = __fadd_rn(sum[i], value);
        continue;
      }
      part[i] = __fadd_rn(part[i], value);
      if (!rows.ends_part[e]) continue;
      sum[i] = __fadd_rn(sum[i], p.round_partials ? through_payload(p, part[i]) : part[i]);
      part[i] = -0.0f;
    }
  }
  Vec16 out = {{0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kOrderLanes; ++i) {
    if (i >= num_lanes) continue;
    if (!rows.count && !(p.bias_first && p.bias_0)) sum[i] = 0.0f;
    if (!p.bias_first && p.bias_0) sum[i] = __fadd_rn(sum[i], bias_element(p, p.bias_0, at, i));
    if (!p.bias_first && p.bias_1) sum[i] = __fadd_rn(sum[i], bias_element(p, p.bias_1, at, i));
    if (p.payload == kOrderF32)
      out.word[i % 4] = __float_as_uint(sum[i]);
    else
      out.word[i / 2] |= rounded(p, sum[i]) << (i % 2 * 16);
  }
  st_vec16(reinterpret_cast<u8*>(p.out) + at, out);
}

namespace epee {

__global__ void __launch_bounds__(256, 1) combine_throughput_order(const __grid_constant__ OrderParams p) {
  __shared__ OrderedRows rows;
  __shared__ i32 is_good;
  const u64 tag = current_tag(p.call) - 1;  // of the combine before
  if (threadIdx.x == 0) is_good = !has_failed(p.call, tag);
  __syncthreads();
  if (!is_good) return;
#pragma unroll 1
  for (int token = static_cast<int>(blockIdx.x); token < p.num_tokens; token += static_cast<int>(gridDim.x)) {
    if (threadIdx.x == 0) {
      perhaps_stall(tag, p.call.rank, 13);
      order_rows(p, tag, token, rows);
    }
    __syncthreads();
    const i64 start = static_cast<i64>(token) * p.row_bytes;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * 16; i < p.row_bytes; i += static_cast<int>(blockDim.x) * 16)
      sum_piece(p, rows, start + i, i);
    __syncthreads();
  }
}

/// Waits until rank `peer` has read our rows, or has given up. False, with a report, when not.
DEVICE bool wait_reader(const Call& call, u64 tag, int peer) {
  const u64* word = local_words(call, kControlBarrierOffset) + peer;
  const u64 start = global_time_ns();
  u64 got;
  const auto has_read = [&] {
    got = ld_acquire_sys(word);
    return has_reached(got, tag);  // it may have met others since
  };
  return bounded_wait<kPollsPerLook>(has_read, [&] {
    if (!has_given_up(call, tag, peer)) return must_stop(call, tag, start, peer, tag, got >> 16, 5);
    report_failure(call, tag, {kPeerGaveUp, peer, 0, 0, 3});
    return true;
  });
}

__global__ void __launch_bounds__(32, 1) combine_throughput_order_end(const __grid_constant__ BarrierParams p) {
  const u64 tag = current_tag(p.call) - 1;
  const int peer = static_cast<int>(threadIdx.x);
  const bool is_peer = peer < kNumRanks && is_in(active_ranks(p.call), peer);
  const bool is_bad = has_failed(p.call, tag);
  bool has_met = false;
  if (is_peer && !is_bad) {
    st_release_sys(control_words(p.call, peer, kControlBarrierOffset) + p.call.rank, barrier_word(tag, 0));
    has_met = wait_reader(p.call, tag, peer);
    // it may have given up while our rows were being summed: it says so before its rows are overwritten
    if (has_met && has_given_up(p.call, tag, peer)) report_failure(p.call, tag, {kPeerGaveUp, peer, 0, 0, 3});
  }
  if (__ballot_sync(~0u, is_peer && !has_met) && is_peer) tell_given_up(p.call, tag, peer);
}

}  // namespace epee
