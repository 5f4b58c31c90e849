// Rules of the block quantizers beyond the plain ones of arithmetic.hpp: ranges with an offset, stochastic
// rounding, two-bit integers and the Hadamard transform.
#pragma once

#include "random.hpp"

namespace hybridcomp {

// -- floats as integers of the same order ----------------------------------------------------------------

HC_HD std::int32_t ordered(float x) {
  const std::int32_t b = static_cast<std::int32_t>(bits_of(x));
  return b ^ static_cast<std::int32_t>(static_cast<std::uint32_t>(b >> 31) & 0x7FFFFFFFu);
}
HC_HD std::int64_t ordered(double x) {
  const std::int64_t b = static_cast<std::int64_t>(bits_of(x));
  return b ^ static_cast<std::int64_t>(static_cast<std::uint64_t>(b >> 63) & 0x7FFFFFFFFFFFFFFFull);
}
HC_HD float from_ordered(std::int32_t key) {
  return float_of(static_cast<std::uint32_t>(key) ^ (static_cast<std::uint32_t>(key >> 31) & 0x7FFFFFFFu));
}
HC_HD double from_ordered(std::int64_t key) {
  return float_of(static_cast<std::uint64_t>(
      key ^ static_cast<std::int64_t>(static_cast<std::uint64_t>(key >> 63) & 0x7FFFFFFFFFFFFFFFull)));
}

// -- a block's range, with an offset ---------------------------------------------------------------------

// value = 2 * (offset + q * stored), q = rint((x / 2 - offset) * inverse) from 0 to `levels`. Values are
// halved, so that a range from the lowest to the largest number does not overflow; halving and doubling are
// exact.
template <typename T>
struct AffineScale {
  T stored;
  T offset;
  T inverse;  // 0 where every q is 0
};

// Return the scale and offset of a block. `peak`: its largest magnitude (not finite: all becomes NaN); `low`,
// `high`: its smallest and largest value. Limits below kSmallest count as zero, and a range below it as none:
// no number here is ever denormal.
template <typename T>
HC_HD AffineScale<T> affine_scale(typename Real<T>::Bits peak, T low, T high, T levels) {
  const T nan = float_of(Real<T>::kNan);
  if (peak >= Real<T>::kInfinity) return {nan, nan, T(0)};
  const T bottom = magnitude(low) < Real<T>::kSmallest ? T(0) : low * T(0.5);
  const T top = magnitude(high) < Real<T>::kSmallest ? T(0) : high * T(0.5);
  const T range = top - bottom;
  if (magnitude(range) < Real<T>::kSmallest) return {T(0), bottom, T(0)};
  T stored = range / levels;
  // At the ends of the range of T the last step may lead past it: make the steps a little smaller.
  if (magnitude((bottom + levels * stored) * T(2)) == Real<T>::kInfinity)
    stored = float_of(bits_of(stored) - 4);
  return {stored, bottom, levels / range};
}

template <typename T>
HC_HD T affine_value(T q, T stored, T offset) {
  return (offset + q * stored) * T(2);
}

// -- rounding --------------------------------------------------------------------------------------------

// Return rint(x * inverse + a dither from `bits`), for q from -limit to limit: unbiased to 2^-17 of a step.
HC_HD std::int32_t quantized_stochastic(float x, float inverse, std::uint32_t bits) {
  return static_cast<std::int32_t>(
      bits_of(x * inverse + dither(bits, 0.0f) + float_of(Real<float>::kRoundBits)) -
      Real<float>::kRoundBits);
}
HC_HD std::int32_t quantized_stochastic(double x, double inverse, std::uint32_t bits) {
  return static_cast<std::int32_t>(
      bits_of(x * inverse + dither(bits, 0.0) + float_of(Real<double>::kRoundBits)) -
      Real<double>::kRoundBits);
}

HC_HD std::int32_t clamped(std::int32_t q, std::int32_t low, std::int32_t high) {
  const std::int32_t raised = q < low ? low : q;
  return raised > high ? high : raised;
}

// -- fields of a byte ------------------------------------------------------------------------------------

// Return field `part` (of `Bits` bits) of a byte as a signed or as an unsigned integer.
template <int Bits>
HC_HD std::int32_t signed_field(std::uint8_t byte, int part) {
  constexpr std::uint32_t kMask = (1u << Bits) - 1, kSign = 1u << (Bits - 1);
  const std::uint32_t field = (static_cast<std::uint32_t>(byte) >> (part * Bits)) & kMask;
  return static_cast<std::int32_t>(field ^ kSign) - static_cast<std::int32_t>(kSign);
}
template <int Bits>
HC_HD std::int32_t unsigned_field(std::uint8_t byte, int part) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(byte) >> (part * Bits)) & ((1u << Bits) - 1));
}

// -- the randomized Hadamard transform -------------------------------------------------------------------

// A block's signs are flipped at random, then log2(length) stages of butterflies follow, with distances 1, 2,
// 4, ...: (a, b) becomes (a + b, a - b). No stage divides: the inverse is the same stages, then times 1 /
// length, then the same signs. Inputs below kSmallest count as zero, so that every sum is zero or a multiple
// of 2^-123 (2^-952 for double) and never denormal; blocks whose transform stays below kSmallestTransformed
// become zero for the same reason.
template <typename T>
struct Hadamard;
template <>
struct Hadamard<float> {
  static constexpr std::uint32_t kSmallestTransformed = 0x17800000u;  // 2^-80
};
template <>
struct Hadamard<double> {
  static constexpr std::uint64_t kSmallestTransformed = 0x0AF0000000000000ull;  // 2^-848
};

// Return the element with its random sign. `bits`: its random bits, of which the highest is used.
HC_HD float flipped(float x, std::uint32_t bits) { return float_of(bits_of(x) ^ (bits & 0x80000000u)); }
HC_HD double flipped(double x, std::uint32_t bits) {
  return float_of(bits_of(x) ^
                  static_cast<std::uint64_t>(static_cast<std::uint64_t>(bits & 0x80000000u) << 32));
}

template <typename T>
HC_HD T flushed(T x) {
  return magnitude(x) < Real<T>::kSmallest ? T(0) : x;
}

}  // namespace hybridcomp
