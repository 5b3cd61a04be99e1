// Small helpers for cutting work into pieces.
#pragma once
#include "../ptx/types.cuh"

/// A half-open range.
struct Range {
  int begin, end;
};

/// Piece `idx` of `total` items cut into `parts` runs of equal length (the last ones may be shorter or empty).
DEVICE Range piece(int total, int parts, int idx) {
  const int length = (total + parts - 1) / parts;
  const int begin = min(total, idx * length);
  return {begin, min(total, begin + length)};
}

DEVICE int round_up(int count, int multiple) { return (count + multiple - 1) / multiple * multiple; }

DEVICE int lane_idx() { return static_cast<int>(threadIdx.x % 32); }
DEVICE int warp_idx() { return static_cast<int>(threadIdx.x / 32); }

/// Bits of the lanes below this one.
DEVICE u32 lanes_below() { return (1u << lane_idx()) - 1; }
