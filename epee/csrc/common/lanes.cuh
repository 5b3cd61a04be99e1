// Arithmetic on 16 bytes of a row: a thread's share of a sum.
//
// Everything is float32 and rounds after each operation; `--fmad=false` keeps products and sums apart, and the
// intrinsics say so where it counts. What leaves is rounded once more, to the payload's type.
#pragma once
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"

enum Payload : int { kBf16 = 0, kF16, kF32 };

template <int kPayload>
struct Lanes {
  static constexpr int kCount = kPayload == kF32 ? 4 : 8;
  float value[kCount];
};

template <int kPayload>
DEVICE Lanes<kPayload> unpack(const Vec16& v) {
  Lanes<kPayload> r;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (kPayload == kF32) {
      r.value[i] = __uint_as_float(v.word[i]);
    } else if (kPayload == kBf16) {
      r.value[2 * i % Lanes<kPayload>::kCount] = bf16_to_float(static_cast<u16>(v.word[i]));
      r.value[(2 * i + 1) % Lanes<kPayload>::kCount] = bf16_to_float(static_cast<u16>(v.word[i] >> 16));
    } else {
      r.value[2 * i % Lanes<kPayload>::kCount] = f16_to_float(static_cast<u16>(v.word[i]));
      r.value[(2 * i + 1) % Lanes<kPayload>::kCount] = f16_to_float(static_cast<u16>(v.word[i] >> 16));
    }
  }
  return r;
}

template <int kPayload>
DEVICE Vec16 pack(const Lanes<kPayload>& r) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = r.value[2 * i % Lanes<kPayload>::kCount];
    const float high = r.value[(2 * i + 1) % Lanes<kPayload>::kCount];
    if (kPayload == kF32)
      v.word[i] = __float_as_uint(r.value[i]);
    else if (kPayload == kBf16)
      v.word[i] = float2_to_bf16x2(low, high);
    else
      v.word[i] = float_to_f16(low) | static_cast<u32>(float_to_f16(high)) << 16;
  }
  return v;
}

template <int kPayload>
DEVICE void add(Lanes<kPayload>& to, const Lanes<kPayload>& what) {
#pragma unroll
  for (int i = 0; i < Lanes<kPayload>::kCount; ++i) to.value[i] = __fadd_rn(to.value[i], what.value[i]);
}

template <int kPayload>
DEVICE void add_scaled(Lanes<kPayload>& to, float weight, const Lanes<kPayload>& what) {
#pragma unroll
  for (int i = 0; i < Lanes<kPayload>::kCount; ++i)
    to.value[i] = __fadd_rn(to.value[i], __fmul_rn(weight, what.value[i]));
}

template <int kPayload>
DEVICE Lanes<kPayload> filled(float value) {
  Lanes<kPayload> r;
#pragma unroll
  for (int i = 0; i < Lanes<kPayload>::kCount; ++i) r.value[i] = value;
  return r;
}
