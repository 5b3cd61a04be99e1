// The elements of a reduction, `kWords` words of a row at a time.
//
// `kElement` and `kReduction` are generated constants. Halves are summed in float32 and rounded once, at the end;
// float32 and float64 round after each addition, integers wrap. The first operand stands as it is, the others come in
// ascending rank order, so every rank and every run has the same bits. MIN and MAX of a NaN and a number are NaN;
// of two zeros the first one stands. AVG (floats only) is SUM divided by the number of operands, before halves are
// rounded.
#pragma once
#include "../../common/user.cuh"
#include "../../ptx/convert.cuh"

enum Element : int { kBytes = 0, kBfloat16, kFloat16, kFloat32, kFloat64, kInt8, kUint8, kInt32, kInt64, kInt16 };
enum Reduction : int { kSum = 0, kProduct, kMin, kMax, kAnd, kOr, kXor, kAvg };
CONSTANT bool kIsHalf = kElement == kBfloat16 || kElement == kFloat16;

/// Consecutive words of a row.
template <int kWords>
struct Words {
  u32 word[kWords];
};

DEVICE float summed(float a, float b) { return __fadd_rn(a, b); }
DEVICE double summed(double a, double b) { return a + b; }
DEVICE u32 summed(u32 a, u32 b) { return a + b; }
DEVICE i32 summed(i32 a, i32 b) { return static_cast<i32>(static_cast<u32>(a) + static_cast<u32>(b)); }
DEVICE i64 summed(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) + static_cast<u64>(b)); }
DEVICE float multiplied(float a, float b) { return __fmul_rn(a, b); }
DEVICE double multiplied(double a, double b) { return a * b; }
DEVICE u32 multiplied(u32 a, u32 b) { return a * b; }
DEVICE i32 multiplied(i32 a, i32 b) { return static_cast<i32>(static_cast<u32>(a) * static_cast<u32>(b)); }
DEVICE i64 multiplied(i64 a, i64 b) { return static_cast<i64>(static_cast<u64>(a) * static_cast<u64>(b)); }

template <class T>
DEVICE T reduced(T a, T b) {
  if (kReduction == kSum || kReduction == kAvg) return summed(a, b);
  if (kReduction == kProduct) return multiplied(a, b);
  if (a != a) return a;
  if (b != b) return b;
  if (kReduction == kMin) return b < a ? b : a;
  return b > a ? b : a;
}

DEVICE u32 reduced_bytes(u32 a, u32 b) {
  u32 r = 0;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 8) {
    if (kElement == kInt8) {
      const i32 one = static_cast<i32>(a << (24 - shift)) >> 24, other = static_cast<i32>(b << (24 - shift)) >> 24;
      r |= (static_cast<u32>(reduced(one, other)) & 0xFF) << shift;
    } else {
      r |= (reduced(a >> shift & 0xFF, b >> shift & 0xFF) & 0xFF) << shift;
    }
  }
  return r;
}

DEVICE u32 reduced_shorts(u32 a, u32 b) {
  const i32 low = reduced(static_cast<i32>(a << 16) >> 16, static_cast<i32>(b << 16) >> 16);
  const i32 high = reduced(static_cast<i32>(a) >> 16, static_cast<i32>(b) >> 16);
  return (static_cast<u32>(low) & 0xFFFF) | static_cast<u32>(high) << 16;
}

/// Elements of at most a word, no halves.
DEVICE u32 reduced_word(u32 a, u32 b) {
  if (kReduction == kAnd) return a & b;
  if (kReduction == kOr) return a | b;
  if (kReduction == kXor) return a ^ b;
  if (kElement == kFloat32) return __float_as_uint(reduced(__uint_as_float(a), __uint_as_float(b)));
  if (kElement == kInt32) return static_cast<u32>(reduced(static_cast<i32>(a), static_cast<i32>(b)));
  return kElement == kInt16 ? reduced_shorts(a, b) : reduced_bytes(a, b);
}

/// Elements of two words.
DEVICE u64 reduced_pair(u64 a, u64 b) {
  if (kReduction == kAnd) return a & b;
  if (kReduction == kOr) return a | b;
  if (kReduction == kXor) return a ^ b;
  if (kElement == kInt64) return static_cast<u64>(reduced(static_cast<i64>(a), static_cast<i64>(b)));
  return double_bits(reduced(bits_to_double(a), bits_to_double(b)));
}

/// A running reduction. `add` the operands in rank order, then take the `result`.
template <int kWords>
class Accumulator {
 public:
  DEVICE void add(const Words<kWords>& w) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (kIsHalf) {
        const float low = half_to_float(static_cast<u16>(w.word[i]));
        const float high = half_to_float(static_cast<u16>(w.word[i] >> 16));
        half_[2 * i % kHalves] = is_empty_ ? low : reduced(half_[2 * i % kHalves], low);
        half_[(2 * i + 1) % kHalves] = is_empty_ ? high : reduced(half_[(2 * i + 1) % kHalves], high);
      } else if (kElement == kFloat64 || kElement == kInt64) {
        if (i % 2 == 0) continue;
        const u64 b = pair(w.word[i - 1], w.word[i]);
        const u64 r = is_empty_ ? b : reduced_pair(pair(words_.word[i - 1], words_.word[i]), b);
        words_.word[i - 1] = static_cast<u32>(r);
        words_.word[i] = static_cast<u32>(r >> 32);
      } else {
        words_.word[i] = is_empty_ ? w.word[i] : reduced_word(words_.word[i], w.word[i]);
      }
    }
    is_empty_ = false;
    ++count_;
  }

  DEVICE Words<kWords> result() const {
    Words<kWords> r = words_;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float low = mean(half_[2 * i % kHalves]), high = mean(half_[(2 * i + 1) % kHalves]);
      if (kReduction == kAvg && kElement == kFloat32)
        r.word[i] = __float_as_uint(mean(__uint_as_float(words_.word[i])));
      if (kReduction == kAvg && kElement == kFloat64 && i % 2 == 1) {
        const u64 bits = double_bits(bits_to_double(pair(words_.word[i - 1], words_.word[i])) / count_);
        r.word[i - 1] = static_cast<u32>(bits);
        r.word[i] = static_cast<u32>(bits >> 32);
      }
      if (kElement == kBfloat16) r.word[i] = float2_to_bf16x2(low, high);
      if (kElement == kFloat16) r.word[i] = float_to_f16(low) | static_cast<u32>(float_to_f16(high)) << 16;
    }
    return r;
  }

 private:
  static DEVICE float half_to_float(u16 bits) {
    return kElement == kBfloat16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
  DEVICE float mean(float sum) const { return kReduction == kAvg ? sum / static_cast<float>(count_) : sum; }
  static DEVICE u64 pair(u32 low, u32 high) { return low | static_cast<u64>(high) << 32; }

  static constexpr int kHalves = ROOM(kIsHalf ? 2 * kWords : 1, 2 * kWords);
  float half_[kHalves] = {};
  Words<kWords> words_ = {};
  bool is_empty_ = true;
  int count_ = 0;
};
