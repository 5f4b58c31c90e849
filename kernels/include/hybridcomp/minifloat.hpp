// Floating-point numbers of 8 and 4 bits in blocks that share a scale: the rounding rules of `fp8`, `mxfp8`
// and `mxfp4`, for host and device, and their payload's prefix. Formats and shared exponents are those of the
// OCP specifications "8-bit Floating Point" (OFP8) 1.0 and "Microscaling Formats" (MX) 1.0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

// Formats, by their code in a prefix.
enum MinifloatFormat : std::uint32_t { kE4M3 = 0, kE5M2 = 1, kE2M1 = 2 };

// Prefix of the payload. After it come a scale per block (float for fp8, E8M0 for MX) and the elements'
// codes: a byte each, or two E2M1 in a byte, element 2j in the low half.
struct MinifloatPrefix {
  std::uint32_t block;   // elements that share a scale
  std::uint32_t format;  // MinifloatFormat
};
static_assert(sizeof(MinifloatPrefix) == 8, "the prefix is 8 bytes on the wire");

constexpr std::uint32_t kMxBlock = 32;
constexpr std::uint8_t kMxNan = 0xFF;

// A block whose largest magnitude is below 2^-90 decodes to zeros: then no decoded number and no scale is a
// denormal float, and a denormal element rounds to zero, so that flush-to-zero modes change nothing.
constexpr std::uint32_t kMinifloatSmallest = 0x12800000u;

template <MinifloatFormat F>
struct Minifloat;

template <>
struct Minifloat<kE4M3> {
  static constexpr int kBits = 8, kMantissa = 3;
  static constexpr int kMinExponent = -6;               // least exponent of the normal numbers
  static constexpr int kMaxExponent = 8;                // exponent of the largest number
  static constexpr std::uint32_t kLimit = 0x43E00000u;  // 448, the largest number
};
template <>
struct Minifloat<kE5M2> {
  static constexpr int kBits = 8, kMantissa = 2;
  static constexpr int kMinExponent = -14, kMaxExponent = 15;
  static constexpr std::uint32_t kLimit = 0x47600000u;  // 57344
};
template <>
struct Minifloat<kE2M1> {
  static constexpr int kBits = 4, kMantissa = 1;
  static constexpr int kMinExponent = 0, kMaxExponent = 2;
  static constexpr std::uint32_t kLimit = 0x40C00000u;  // 6
};

// Constants of minifloat_of. With e the exponent of |y|, or the format's least one if that is larger, the
// numbers of the format around y are 2^(e - mantissa bits) apart, and that is the unit of the last bit of a
// float from 2^(e + kDrop) on. So |y| + 2^(e + kDrop) rounds |y| to a multiple of it, to nearest even, and
// has the multiple in its last bits. The code is that multiple plus (e - least e) << mantissa bits: a
// constant added along, an even one, puts the difference right in the bits of a code.
template <MinifloatFormat F>
struct Rounding {
  static constexpr int kDrop = 23 - Minifloat<F>::kMantissa;
  static constexpr std::uint32_t kLeast = static_cast<std::uint32_t>(Minifloat<F>::kMinExponent + 127) << 23;
  static constexpr std::uint32_t kSign = 1u << (Minifloat<F>::kBits - 1);
  static constexpr std::uint32_t kCode = kSign - 1;
  static constexpr std::uint32_t kAdd =
      (static_cast<std::uint32_t>(kDrop) << 23) + ((0u - (kLeast >> kDrop)) & kCode);
  static_assert(kAdd % 2 == 0, "an odd constant would turn ties to odd");
};

// Return the code of y rounded to nearest even, for |y| that rounds to at most the largest number.
template <MinifloatFormat F>
HC_HD std::uint32_t minifloat_of(float y) {
  using R = Rounding<F>;
  const std::uint32_t a = bits_of(y) & 0x7FFFFFFFu;
  const std::uint32_t own = a & 0x7F800000u;
  const std::uint32_t e = own > R::kLeast ? own : R::kLeast;
  const std::uint32_t sum = bits_of(float_of(a) + float_of(e + R::kAdd)) + (e >> R::kDrop);
  return (sum & R::kCode) | ((bits_of(y) >> (32 - Minifloat<F>::kBits)) & R::kSign);
}

// Return the same, where a larger |y| becomes the largest number.
template <MinifloatFormat F>
HC_HD std::uint32_t minifloat_saturated(float y) {
  const std::uint32_t a = bits_of(y) & 0x7FFFFFFFu;
  const std::uint32_t limited = a < Minifloat<F>::kLimit ? a : Minifloat<F>::kLimit;
  return minifloat_of<F>(float_of(limited | (bits_of(y) & 0x80000000u)));
}

// Return the value of a code: NaN for E4M3's 0x7F and 0xFF, infinity and NaN for E5M2's as in IEEE 754.
template <MinifloatFormat F>
HC_HD float minifloat_value(std::uint32_t code) {
  if constexpr (F == kE5M2) {  // the upper half of a half
    return float_of(half_to_float_bits(static_cast<std::uint16_t>(code << 8)));
  } else {
    constexpr int kMantissa = Minifloat<F>::kMantissa;
    const std::uint32_t sign = (code & Rounding<F>::kSign) << (32 - Minifloat<F>::kBits);
    const std::uint32_t a = code & Rounding<F>::kCode;
    const std::uint32_t normal =
        (a << Rounding<F>::kDrop) + (static_cast<std::uint32_t>(Minifloat<F>::kMinExponent + 126) << 23);
    // Below the normal numbers the value is a multiple of the smallest number, the unit of the last bit of
    // `base`.
    constexpr std::uint32_t kBase =
        static_cast<std::uint32_t>(Minifloat<F>::kMinExponent - kMantissa + 23 + 127) << 23;
    const std::uint32_t denormal = bits_of(float_of(kBase | a) - float_of(kBase));
    const std::uint32_t finite = a < (1u << kMantissa) ? denormal : normal;
    return float_of(sign | (F == kE4M3 && a == 0x7Fu ? Real<float>::kNan : finite));
  }
}

// Return the scale of a block of fp8 whose largest magnitude has the bits `peak`. Doubles are rounded to
// float first, so that a block with magnitudes beyond float's decodes to NaN.
template <MinifloatFormat F>
HC_HD BlockScale<float> minifloat_scale(std::uint32_t peak) {
  return block_scale<float>(peak < kMinifloatSmallest ? 0u : peak, float_of(Minifloat<F>::kLimit));
}

// Shared exponent of a block of MX, floor(log2(peak)) less the format's largest, as E8M0 (2^(stored - 127)).
// It needs no clamp: a peak from 2^-90 to below 2^128 makes it 22 to 252.
struct MxScale {
  std::uint8_t stored;
  float inverse;  // 1 / scale, exact; 0 where every code is 0
};
template <MinifloatFormat F>
HC_HD MxScale mx_scale(std::uint32_t peak) {
  if (peak >= Real<float>::kInfinity) return {kMxNan, 0.0f};
  if (peak < kMinifloatSmallest) return {0, 0.0f};
  const std::uint32_t stored = (peak >> 23) - static_cast<std::uint32_t>(Minifloat<F>::kMaxExponent);
  return {static_cast<std::uint8_t>(stored), float_of((254u - stored) << 23)};
}

HC_HD float mx_scale_value(std::uint8_t stored) {
  if (stored == kMxNan) return float_of(Real<float>::kNan);
  return float_of(stored ? static_cast<std::uint32_t>(stored) << 23 : 0x00400000u);
}

// A decoded element is minifloat_value(code) * scale, in float, for both kinds of scale.

}  // namespace hybridcomp
