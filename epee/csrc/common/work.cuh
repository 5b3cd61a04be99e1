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

/// Whether a row exists that would be row `row` of its receiver. Behind the bound, which is the room there or the
/// capacity of the call, are rows that nobody sends, pulls or adds: all ranks know all counts, so all agree.
DEVICE bool is_row(i64 row, i32 bound) { return row >= 0 && row < bound; }

DEVICE int lane_idx() { return static_cast<int>(threadIdx.x % 32); }
DEVICE int warp_idx() { return static_cast<int>(threadIdx.x / 32); }

/// Bits of the lanes below this one.
DEVICE u32 lanes_below() { return (1u << lane_idx()) - 1; }
