// Send half of `LatencyBuffer`'s combine: what a block must know of the call and of the handle, and the sums of the
// experts' rows of one rank, which go back to the tokens' ranks. combine.cuh says how it all fits together.
#pragma once
#include "../../common/lanes.cuh"
#include "call.cuh"

constexpr int kMaxTopk = 32;
constexpr int kRowBatch = 4;                               // rows that are read at once
constexpr int kPartialShares = 3;                          // blocks that sum a partial that goes in packets
constexpr int kRowParts = kFlagsOfToken;                   // of a partial that goes as a row, each with a flag
constexpr int kRowShares = 2;                              // blocks that sum a token,
constexpr int kPacketShares = 5;                           // and one whose partials come in packets
CONSTANT int kRankBatch = kNumRanks <= 4 ? kNumRanks : 3;  // ranks whose partials are read at once

/// The rows of a token of a peer, in summing order.
struct TokenRows {
  i32 count;
  i32 row[kMaxTopk];
  float weight[kMaxTopk];
};

struct CombineShared {
  CallShared call;
  u32 served;                 // ranks whose tokens this rank has
  u32 sent_to;                // ranks that took part in the dispatch
  u32 first_ranks;            // of the token that this block sums first
  i32 num_tokens[kMaxRanks];  // of each rank's dispatch
  TokenRows rows[kMaxWarps];  // one for each warp to find
};

DEVICE u64* weight_at(const LatencyCombineParams& p, u64 region, u64 tag, int src, int token, int k) {
  return reinterpret_cast<u64*>(region + p.weights_offset) + section_of(p.at, tag, src) * p.weights_section +
         token * p.num_topk + k;
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
    const u32 value = p.refused    ? kHeadRefused
                      : !is_served ? kHeadExcluded
                                   : static_cast<u32>(p.kind) << kHeadKindShift;
    st_relaxed_sys(head_at(p.at, s.call.peer[tid], tag, p.call.rank), marked(tag, value));
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
        st_relaxed_sys(weight_at(p, s.call.peer[d], tag, p.call.rank, token, i - token * p.num_topk), word);
  }
}

/// A token of a rank.
struct Pair {
  int src, token;
};
CONSTANT int kNumPeers = kNumRanks > 1 ? kNumRanks - 1 : 1;

/// The pairs come token by token, for each beginning behind this rank. Where there are more of them than blocks
/// (`num_tokens` of the largest source is not 0), this rank's own come last: they need no link, so all blocks feed it.
DEVICE Pair pair_of(const LatencyCombineParams& p, int index, int num_tokens) {
  if (num_tokens && index >= (kNumRanks - 1) * num_tokens) return {p.call.rank, index - (kNumRanks - 1) * num_tokens};
  const int in_turn = num_tokens ? kNumPeers : kNumRanks;
  const int token = num_tokens ? index / kNumPeers : index / kNumRanks;
  const int src = p.call.rank + 1 + index - token * in_turn;
  return {src < kNumRanks ? src : src - kNumRanks, token};
}

/// What the handle knows of a pair: lane k's row and weight, and which tokens came.
struct Entry {
  Pair pair;
  i32 row;
  float weight;
  u32 bits;
};
DEVICE Entry load_entry(const LatencyCombineParams& p, Pair pair) {
  const int lane = lane_idx();
  Entry entry = {pair, -1, 0.0f, 0};
  if (pair.token >= p.at.max_tokens) return entry;
  const i64 at = (static_cast<i64>(pair.src) * p.at.max_tokens + pair.token) * p.num_topk + lane;
  if (lane < p.num_topk) {
    entry.row = reinterpret_cast<const i32*>(p.recv_rows)[at];
    entry.weight = reinterpret_cast<const float*>(p.recv_weights)[at];
  }
  entry.bits = reinterpret_cast<const u32*>(p.recv_info)[pair.src * (1 + p.token_words) + 1 + pair.token / 32];
  return entry;
}

/// Finds the rows of a token of a rank, `count` 0 when there are none. One warp.
DEVICE void find_rows(const LatencyCombineParams& p, CombineShared& s, const Entry& entry, bool is_wanted,
                      TokenRows& found) {
  const int lane = lane_idx();
  const Pair pair = entry.pair;
  const bool is_here = is_wanted && (entry.bits >> pair.token % 32 & 1);
  i32 row = is_here && lane < p.num_topk && entry.row < p.num_rows ? entry.row : -1;
  float weight = entry.weight;
  u32 given = 0;
  bool is_late = false;
  if (p.has_weights && row >= 0) {
    if (wait_marked(p.call, s.call, s.call.send_tag,
                    weight_at(p, p.call.own, s.call.send_tag, pair.src, pair.token, lane), pair.src, given)) {
      weight = __uint_as_float(given);
    } else {
      red_or_shared(&s.call.late, 1u << pair.src);  // it is late for this call
      is_late = true;
    }
  }
  if (__ballot_sync(~0u, is_late)) row = -1;  // nothing then: no sum of some rows may pass for that of all
  const u32 wanted = __ballot_sync(~0u, row >= 0);
  if (row >= 0) {
    const int position = __popc(wanted & lanes_below());
    found.row[position] = row;
    found.weight[position] = weight;
  }
  if (lane == 0) found.count = __popc(wanted);
}

/// Some channels of a sum, two in each word of y.
template <int kWords>
struct Sums {
  float value[2 * kWords];
};
template <int kWords>
DEVICE Sums<kWords> no_sums() {
  Sums<kWords> sums;
#pragma unroll
  for (int i = 0; i < 2 * kWords; ++i) sums.value[i] = -0.0f;
  return sums;
}
template <int kWords>
DEVICE void add_words(Sums<kWords>& sums, float weight, const u32* words) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float low = bf16_to_float(static_cast<u16>(words[i]));
    const float high = bf16_to_float(static_cast<u16>(words[i] >> 16));
    sums.value[2 * i] = __fadd_rn(sums.value[2 * i], __fmul_rn(weight, low));
    sums.value[2 * i + 1] = __fadd_rn(sums.value[2 * i + 1], __fmul_rn(weight, high));
  }
}
DEVICE const u8* row_of_y(const LatencyCombineParams& p, const TokenRows& rows, int n) {
  return reinterpret_cast<const u8*>(p.y) + rows.row[n] * p.y_stride;
}

/// A unit of a partial is 16 bytes at the token's rank: eight bfloat16 or four float32 channels.
template <bool kIsWide>
struct Unit {
  static constexpr int kWords = kIsWide ? 2 : 4;
  struct __align__(4 * kWords) Words {
    u32 word[kWords];
  };
};

/// Adds a unit of all rows of a token, some at once.
template <bool kIsWide>
DEVICE void add_rows(const LatencyCombineParams& p, Sums<Unit<kIsWide>::kWords>& sums, const TokenRows& rows,
                     int unit) {
  using Words = typename Unit<kIsWide>::Words;
#pragma unroll 1
  for (int n = 0; n < rows.count; n += kRowBatch) {
    Words v[kRowBatch];
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i)
      if (n + i < rows.count) v[i] = reinterpret_cast<const Words*>(row_of_y(p, rows, n + i))[unit];
#pragma unroll
    for (int i = 0; i < kRowBatch; ++i)
      if (n + i < rows.count) add_words<Unit<kIsWide>::kWords>(sums, rows.weight[n + i], v[i].word);
  }
}

/// Rounds a unit and stores it in the record at `to`.
template <bool kIsWide>
DEVICE void store_unit(const Sums<Unit<kIsWide>::kWords>& sums, u8* to, int unit) {
  constexpr int kWords = Unit<kIsWide>::kWords;
  Vec16 out;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    out.word[i] = kIsWide ? __float_as_uint(sums.value[i % (2 * kWords)])
                          : float2_to_bf16x2(sums.value[2 * i % (2 * kWords)], sums.value[(2 * i + 1) % (2 * kWords)]);
  st_vec16(to + 16 * unit, out);
}

/// The next of the block's items that has rows.
DEVICE int next_item(const CombineShared& s, int item) {
  const int num_warps = static_cast<int>(blockDim.x / 32);
  for (++item; item < num_warps && s.rows[item].count == 0;) ++item;
  return item;
}

/// Where a partial goes: the place of (this rank, token) at the token's rank.
DEVICE u8* partial_at(const LatencyCombineParams& p, const CombineShared& s, Pair pair, bool is_packed) {
  const u64 peer = s.call.peer[pair.src];
  return is_packed ? packets_at(p.at, peer, s.call.send_tag, p.call.rank, pair.token)
                   : row_at(p.at, peer, s.call.send_tag, p.call.rank, pair.token);
}

/// An item of rows: a part of a pair's partial.
struct RowItem {
  Pair pair;
  Range units;
  int part;
};
template <bool kIsWide>
DEVICE RowItem row_item(const LatencyCombineParams& p, int index, int num_tokens) {
  const int part = index % kRowParts;
  const int num_units = p.hidden / (2 * Unit<kIsWide>::kWords);
  return {pair_of(p, index / kRowParts, num_tokens), piece(num_units, kRowParts, part), part};
}

/// The place of a flag: every part of a partial has one.
DEVICE u64* part_flag(const LatencyCombineParams& p, u64 region, u64 tag, int src, int token, int part) {
  return reinterpret_cast<u64*>(region + p.at.flags_offset) + section_of(p.at, tag, src) * p.at.flag_section +
         token * kRowParts + part;
}

/// Sends the block's items as rows. No flag is released before the block has stored all: the link is the bottleneck to
/// the end, and each release costs a trip. `first`: index of item 0, the others follow a grid apart. All threads.
template <bool kIsWide>
DEVICE void send_rows(const LatencyCombineParams& p, CombineShared& s, int first, int num_tokens) {
  constexpr int kWords = Unit<kIsWide>::kWords;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int grid = static_cast<int>(gridDim.x);
  const u64 tag = s.call.send_tag;
#pragma unroll 1
  for (int i = next_item(s, -1); i < num_warps; i = next_item(s, i)) {
    const RowItem item = row_item<kIsWide>(p, first + grid * i, num_tokens);
    u8* to = partial_at(p, s, item.pair, false);
    if (lane_idx() == 0) perhaps_stall(tag, p.call.rank, 4);
#pragma unroll 1
    for (int unit = item.units.begin + static_cast<int>(threadIdx.x); unit < item.units.end;
         unit += static_cast<int>(blockDim.x)) {
      Sums<kWords> sums = no_sums<kWords>();
      add_rows<kIsWide>(p, sums, s.rows[i], unit);
      store_unit<kIsWide>(sums, to, unit);
    }
  }
  __syncthreads();
  const int mine = lane_idx();
  if (warp_idx() != num_warps - 1 || mine >= num_warps || s.rows[mine].count == 0) return;
  const RowItem sent = row_item<kIsWide>(p, first + grid * mine, num_tokens);
  perhaps_stall(tag, p.call.rank, 5);
  st_release_sys(part_flag(p, s.call.peer[sent.pair.src], tag, p.call.rank, sent.pair.token, sent.part), tag);
}

/// Words 3i ... 3i + 2 of a row of y; half of each if the record is float32.
template <bool kIsWide>
DEVICE void load_words(const u8* row, int i, int num_words, u32 (&words)[3]) {
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const int at = 3 * i + k;
    words[k] = 0;
    if (at < num_words)
      words[k] = kIsWide ? reinterpret_cast<const u16*>(row)[at] : reinterpret_cast<const u32*>(row)[at];
  }
}

/// Sends a share of a partial in packets: three words each, six bfloat16 or three float32 channels. All threads.
template <bool kIsWide>
DEVICE void send_packets(const LatencyCombineParams& p, const CombineShared& s, const TokenRows& rows, Pair pair,
                         int part) {
  constexpr int kPackets = 2;  // of a thread at once
  const u64 tag = s.call.send_tag;
  const int step = static_cast<int>(blockDim.x);
  const int num_words = p.hidden / (kIsWide ? 1 : 2);
  const Range range = piece((num_words + 2) / 3, kPartialShares, part);
  u8* to = partial_at(p, s, pair, true);
  if (lane_idx() == 0) perhaps_stall(tag, p.call.rank, 4);
#pragma unroll 1
  for (int i = range.begin + static_cast<int>(threadIdx.x); i < range.end; i += kPackets * step) {
    Sums<3> sums[kPackets] = {no_sums<3>(), no_sums<3>()};
#pragma unroll 1
    for (int n = 0; n < rows.count; n += kRowBatch) {
      u32 words[kRowBatch][kPackets][3];
#pragma unroll
      for (int r = 0; r < kRowBatch; ++r)
#pragma unroll
        for (int j = 0; j < kPackets; ++j)
          if (n + r < rows.count) load_words<kIsWide>(row_of_y(p, rows, n + r), i + j * step, num_words, words[r][j]);
#pragma unroll
      for (int r = 0; r < kRowBatch; ++r)
#pragma unroll
        for (int j = 0; j < kPackets; ++j)
          if (n + r < rows.count) add_words<3>(sums[j], rows.weight[n + r], words[r][j]);
    }
#pragma unroll
    for (int j = 0; j < kPackets; ++j) {
      Vec16 v;
#pragma unroll
      for (int k = 0; k < 3; ++k)
        v.word[k] = kIsWide ? __float_as_uint(sums[j].value[2 * k])
                            : float2_to_bf16x2(sums[j].value[2 * k], sums[j].value[2 * k + 1]);
      v.word[3] = static_cast<u32>(tag);
      if (i + j * step < range.end) st_relaxed_sys_128(to + 16 * (i + j * step), v);
    }
  }
}

/// Ranks whose tokens are here and that have few of them, so that partials go to them in packets.
DEVICE u32 packed_ranks(const LatencyCombineParams& p, const CombineShared& s) {
  u32 ranks = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src) ranks |= static_cast<u32>(s.num_tokens[src] <= p.at.packet_tokens) << src;
  return ranks;
}

/// The first pair of this warp, if all ranks have as many tokens as this one: looked up while the call is being opened.
DEVICE Pair likely_pair(const LatencyCombineParams& p) {
  const int index = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * warp_idx();
  const bool is_packed = p.num_tokens <= p.at.packet_tokens;
  return is_packed ? pair_of(p, index / kPartialShares, 0) : pair_of(p, index / kRowParts, p.num_tokens);
}

/// Sends the partials of this block's share of the pairs of `ranks`, which all get packets or all get rows. `known`: an
/// entry that has been read. All threads.
template <bool kIsWide, bool kIsPacked>
DEVICE void reducer(const LatencyCombineParams& p, CombineShared& s, u32 ranks, const Entry& known) {
  constexpr int kShares = kIsPacked ? kPartialShares : kRowParts;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int grid = static_cast<int>(gridDim.x);
  if (!ranks) return;
  int most = 0;
#pragma unroll
  for (int src = 0; src < kNumRanks; ++src)
    if (ranks >> src & 1) most = max(most, s.num_tokens[src]);
  const int num_items = kShares * kNumRanks * most;
  const int in_order = kIsPacked ? 0 : most;
#pragma unroll 1
  for (int first = static_cast<int>(blockIdx.x); first < num_items; first += grid * num_warps) {
    const int index = first + grid * warp_idx();
    const Pair mine = pair_of(p, index / kShares, in_order);
    const bool is_wanted = index < num_items && (ranks >> mine.src & 1) && mine.token < s.num_tokens[mine.src];
    const bool is_known = mine.src == known.pair.src && mine.token == known.pair.token;
    find_rows(p, s, is_known ? known : load_entry(p, mine), is_wanted, s.rows[warp_idx()]);
    __syncthreads();
    if (kIsPacked) {
#pragma unroll 1
      for (int item = next_item(s, -1); item < num_warps; item = next_item(s, item)) {
        const int at = first + grid * item;
        send_packets<kIsWide>(p, s, s.rows[item], pair_of(p, at / kShares, in_order), at % kShares);
      }
    } else {
      send_rows<kIsWide>(p, s, first, in_order);
    }
    __syncthreads();
  }
}
