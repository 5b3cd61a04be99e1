// Rows in a user's memory, which may begin and end anywhere, sixteen bytes at a time.
#pragma once
#include "../ptx/memory.cuh"

/// By how many bytes at a time ragged memory is accessed.
DEVICE int ragged_step(const u8* p, int valid) {
  const u64 bits = reinterpret_cast<u64>(p) | static_cast<u64>(valid);
  return bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

/// Sixteen bytes of which only `valid` exist, at any address; zeros behind them. Inline loops, not functions: a call
/// would make the fast path around it keep its values in memory.
DEVICE Vec16 load_ragged(const u8* p, int valid) {
  u64 half[2] = {0, 0};
  const int step = ragged_step(p, valid);
#pragma unroll 1
  for (int i = 0; i < valid; i += step) {
    const u64 piece = step == 4   ? *reinterpret_cast<const u32*>(p + i)
                      : step == 2 ? *reinterpret_cast<const u16*>(p + i)
                                  : p[i];
    if (i < 8)
      half[0] |= piece << (8 * i);
    else
      half[1] |= piece << (8 * i - 64);
  }
  return {{static_cast<u32>(half[0]), static_cast<u32>(half[0] >> 32), static_cast<u32>(half[1]),
           static_cast<u32>(half[1] >> 32)}};
}
DEVICE void store_ragged(u8* p, int valid, const Vec16& v) {
  const u64 low = v.word[0] | static_cast<u64>(v.word[1]) << 32;
  const u64 high = v.word[2] | static_cast<u64>(v.word[3]) << 32;
  const int step = ragged_step(p, valid);
#pragma unroll 1
  for (int i = 0; i < valid; i += step) {
    const u64 piece = i < 8 ? low >> (8 * i) : high >> (8 * i - 64);
    if (step == 4)
      *reinterpret_cast<u32*>(p + i) = static_cast<u32>(piece);
    else if (step == 2)
      *reinterpret_cast<u16*>(p + i) = static_cast<u16>(piece);
    else
      p[i] = static_cast<u8>(piece);
  }
}

/// The 16 bytes at `offset` of a row of `num_bytes`.
DEVICE Vec16 load_user(const u8* row, i64 offset, i64 num_bytes) {
  const u8* p = row + offset;
  const i64 valid = num_bytes - offset;
  if (valid >= 16 && reinterpret_cast<u64>(p) % 16 == 0) return ld_vec16(p);
  if (valid <= 0) return {{0, 0, 0, 0}};
  return load_ragged(p, valid < 16 ? static_cast<int>(valid) : 16);
}
DEVICE void store_user(u8* row, i64 offset, i64 num_bytes, const Vec16& v) {
  u8* p = row + offset;
  const i64 valid = num_bytes - offset;
  if (valid >= 16 && reinterpret_cast<u64>(p) % 16 == 0) return st_vec16(p, v);
  if (valid > 0) store_ragged(p, valid < 16 ? static_cast<int>(valid) : 16, v);
}
