// Between float32 and the narrower payload types; every conversion rounds once, to nearest even.
#pragma once
#include "types.cuh"

DEVICE float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

#ifdef __CUDACC__

DEVICE double bits_to_double(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }
DEVICE u64 double_bits(double v) { return static_cast<u64>(__double_as_longlong(v)); }

/// Two floats to two bfloat16; `low` goes to the lower address.
DEVICE u32 float2_to_bf16x2(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u16 float_to_f16(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE float f16_to_float(u16 bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

/// Two floats to two e4m3, saturating at 448; `low` goes to the lower address.
DEVICE u32 float2_to_e4m3x2(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

#else

DEVICE double bits_to_double(u64 bits) {
  double v;
  memcpy(&v, &bits, 8);
  return v;
}
DEVICE u64 double_bits(double v) {
  u64 bits;
  memcpy(&bits, &v, 8);
  return bits;
}

// To nearest, ties to even, in units of 2^-9 below 2^-6, else to three places behind the point.
DEVICE u32 emulated_float_to_e4m3(float v) {
  const u32 bits = __float_as_uint(v);
  const u32 sign = bits >> 24 & 0x80;
  u32 size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return 0x7F;          // NaN
  if (size >= 0x43E00000) return sign | 0x7E;  // 448 or more
  if (size < 0x3C800000) return sign | static_cast<u32>(nearbyintf(fabsf(v) * 512.0f));
  size += 0x7FFFF + (size >> 20 & 1);
  return sign | ((size >> 20) - (120 << 3));
}
DEVICE u32 float2_to_e4m3x2(float low, float high) {
  return emulated_float_to_e4m3(low) | emulated_float_to_e4m3(high) << 8;
}

// To nearest, ties to even, by adding half of the last kept place, and one less where that place is even.
DEVICE u32 emulated_float_to_bf16(float v) {
  const u32 bits = __float_as_uint(v);
  if (v != v) return 0x7FFF;  // what the hardware gives for every NaN
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 float2_to_bf16x2(float low, float high) {
  return emulated_float_to_bf16(low) | emulated_float_to_bf16(high) << 16;
}
DEVICE u16 float_to_f16(float v) {
  const _Float16 half = static_cast<_Float16>(v);
  u16 bits;
  memcpy(&bits, &half, 2);
  return bits;
}
DEVICE float f16_to_float(u16 bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}

#endif
