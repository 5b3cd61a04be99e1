// What a block of a combine works on, piece by piece, and where the rows of a piece are.
//
// A piece is a token's row, or a chunk of it; pieces go round the pulling blocks, and within a block round the stages
// of shared memory. Rows are found from the handle: how many of ours went to each rank before this token (rank layout),
// or which expert and place each of its k had (expert layout).
#pragma once
#include "../../common/experts.cuh"
#include "../../common/lanes.cuh"
#include "../../common/work.cuh"
#include "lanes.cuh"

/// A row that a lane of the loader found: `position` is its place in the sum, -1 when the lane has none.
struct Found {
  int position, rank;
  i64 row;
  i32 place;  // rank layout: the row counted from our first one there
  float weight;
  int count;  // of the whole token
};

/// Where a lane's row of a token is, as far as loads tell: lane d looks at rank d, or lane k at slot k.
struct Looked {
  i32 base, place;  // rank layout
  i32 expert, ordinal;
  float weight;
};

/// Starts the loads of what `order_rows` needs; nothing waits for them here.
template <bool kExpert>
DEVICE Looked look_up(const CombineParams& p, int token) {
  const int lane = lane_idx();
  Looked l = {0, -1, -1, 0, 1.0f};
  if (kExpert) {
    if (lane < p.num_topk) {
      const i64 at = static_cast<i64>(token) * p.num_topk + lane;
      l.expert = reinterpret_cast<const i32*>(p.expert_of)[at];
      l.ordinal = reinterpret_cast<const i32*>(p.ordinals)[at];
      if (p.weights_of) l.weight = reinterpret_cast<const float*>(p.weights_of)[at];
    }
  } else if (lane < kNumRanks) {
    l.base = reinterpret_cast<const i32*>(p.row_base)[p.num_experts + lane];  // both loads at once
    l.place = reinterpret_cast<const i32*>(p.send_prefix)[static_cast<i64>(token) * kNumRanks + lane];
  }
  return l;
}

/// Sorts the rows of a token. All lanes of a warp.
template <bool kExpert>
DEVICE Found order_rows(const CombineParams& p, const Looked& l) {
  const int lane = lane_idx();
  Found f = {-1, -1, -1, -1, 0.0f, 0};
  if (kExpert) {
    if (l.expert >= 0) {
      f.rank = owner_of(l.expert, p.num_local_experts);
      f.row = reinterpret_cast<const i32*>(p.row_base)[l.expert] + l.ordinal;
      f.weight = l.weight;
    }
  } else if (l.place >= 0) {
    f.rank = lane;
    f.place = l.place;
    f.row = l.base + l.place;
  }
  if (!is_row(f.row, p.max_rows)) f = {-1, -1, -1, -1, 0.0f, 0};
  int before = 0;
#pragma unroll
  for (int d = 0; d < kNumRanks; ++d) {
    const u32 here = __ballot_sync(~0u, f.rank == d);
    if (f.rank == d) f.position = before + __popc(here & lanes_below());
    before += __popc(here);
  }
  f.count = before;
  return f;
}

/// Finds the rows of a token. All lanes of a warp.
template <bool kExpert>
DEVICE Found find_rows(const CombineParams& p, int token) {
  return order_rows<kExpert>(p, look_up<kExpert>(p, token));
}

/// Goes through the pieces of work of a block, a token's row or a chunk of it each, and through the stages beside it.
/// Divides once: a division in each step would be among the longest things in it.
struct Cursor {
  int token, chunk;  // of the row
  int tokens_per_step, chunks_per_step, num_chunks;
  int stage, num_stages;
  u32 use;  // how often the stage was used before

  DEVICE Cursor(const CombineParams& p, int chunks)
      : token(static_cast<int>(blockIdx.x) / chunks),
        chunk(static_cast<int>(blockIdx.x) % chunks),
        tokens_per_step(p.num_pull_blocks / chunks),
        chunks_per_step(p.num_pull_blocks % chunks),
        num_chunks(chunks),
        stage(0),
        num_stages(p.num_stages),
        use(0) {}

  DEVICE void advance() {
    token += tokens_per_step;
    chunk += chunks_per_step;
    if (chunk >= num_chunks) {
      chunk -= num_chunks;
      ++token;
    }
    if (++stage == num_stages) {
      stage = 0;
      ++use;
    }
  }
};
