// The elements of a reduction, `kWords` words of a row at a time.
//
// `kElement` and `kReduction` are generated constants. Halves are summed in float32 and rounded once, at the end;
// float32 and float64 round after each addition, integers wrap. The first operand stands as it is, the others come in
// ascending rank order, so every rank and every run has the same bits. MIN and MAX of a NaN and a number are NaN;
// of two zeros the first one stands. AVG (floats only) is SUM divided by the number of operands, before halves are
// rounded.
#pragma once
#include "../../ptx/convert.cuh"
#include "../../ptx/memory.cuh"

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

// --- user memory, which may begin and end anywhere ---

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
