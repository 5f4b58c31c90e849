// The rounding rules of every kernel, for host and device: each operation that decides a bit of a message is
// here, so that CPU and GPU write the same bytes. Multiply, divide, compare, integer operations and round to
// nearest even only; compile without contraction (-ffp-contract=off, -fmad=false) and without fast-math.
//
// Everything is `static`: the CPU loops are compiled several times for different instruction sets, and an
// inline function with external linkage would be merged into whichever copy the linker sees first.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HC_HD static __host__ __device__ __forceinline__
#else
#define HC_HD static inline __attribute__((always_inline, unused))
#endif

namespace hybridcomp {

HC_HD std::uint32_t bits_of(float x) {
  union {
    float f;
    std::uint32_t u;
  } v;
  v.f = x;
  return v.u;
}
HC_HD std::uint64_t bits_of(double x) {
  union {
    double f;
    std::uint64_t u;
  } v;
  v.f = x;
  return v.u;
}
HC_HD float float_of(std::uint32_t bits) {
  union {
    std::uint32_t u;
    float f;
  } v;
  v.u = bits;
  return v.f;
}
HC_HD double float_of(std::uint64_t bits) {
  union {
    std::uint64_t u;
    double f;
  } v;
  v.u = bits;
  return v.f;
}

// Constants of a computing type that the kernels need: float, or double for double messages.
template <typename T>
struct Real;

template <>
struct Real<float> {
  using Bits = std::uint32_t;
  using Signed = std::int32_t;
  static constexpr Bits kMagnitude = 0x7FFFFFFFu;
  static constexpr Bits kInfinity = 0x7F800000u;
  static constexpr Bits kNan = 0x7FC00000u;
  static constexpr Bits kSmallest = 0x0D800000u;   // 2^-100: below it a block is zero
  static constexpr Bits kRoundBits = 0x4B400000u;  // 1.5 * 2^23
};

template <>
struct Real<double> {
  using Bits = std::uint64_t;
  using Signed = std::int64_t;
  static constexpr Bits kMagnitude = 0x7FFFFFFFFFFFFFFFull;
  static constexpr Bits kInfinity = 0x7FF0000000000000ull;
  static constexpr Bits kNan = 0x7FF8000000000000ull;
  static constexpr Bits kSmallest = 0x07B0000000000000ull;   // 2^-900
  static constexpr Bits kRoundBits = 0x4338000000000000ull;  // 1.5 * 2^52
};

// Return |x| as an integer: ordered like the magnitudes, with infinity above every number and NaN above
// infinity.
HC_HD std::uint32_t magnitude(float x) { return bits_of(x) & Real<float>::kMagnitude; }
HC_HD std::uint64_t magnitude(double x) { return bits_of(x) & Real<double>::kMagnitude; }

// Return a sum or a product, or the usual NaN if it is one: which of two NaNs an addition passes on, and with
// which sign it makes one of infinities, depends on the processor and on the order of the operands in the
// instruction, which the compiler chooses. Every value that is added to other ranks' goes through this.
HC_HD float quieted(float x) {
  return magnitude(x) > Real<float>::kInfinity ? float_of(Real<float>::kNan) : x;
}
HC_HD double quieted(double x) {
  return magnitude(x) > Real<double>::kInfinity ? float_of(Real<double>::kNan) : x;
}

// -- block quantization ----------------------------------------------------------------------------------

template <typename T>
struct BlockScale {
  T stored;   // scale in the message: value = q * stored
  T inverse;  // q = rint(x * inverse); 0 where every q is 0
};

// Return the scale of a block whose largest magnitude is `peak`, for integers of -limit .. limit. Not finite:
// stored is NaN, so that the whole block decodes to NaN. Tiny: zero, so that neither the scale nor a product
// is ever denormal and flush-to-zero modes change nothing. Sources of rounding: two divisions.
template <typename T>
HC_HD BlockScale<T> block_scale(typename Real<T>::Bits peak, T limit) {
  if (peak >= Real<T>::kInfinity) return {float_of(Real<T>::kNan), T(0)};
  if (peak < Real<T>::kSmallest) return {T(0), T(0)};
  const T largest = float_of(peak);
  T stored = largest / limit;
  // At the end of the range the quotient, rounded up, times limit would be infinite: round it down instead.
  if (stored * limit == float_of(Real<T>::kInfinity)) stored = float_of(bits_of(stored) - 1);
  return {stored, limit / largest};
}

// Return rint(x * inverse) as the low bits of an integer. Adding 1.5 * 2^(mantissa bits) rounds to nearest
// even and leaves the integer in the low bits of the sum. |x * inverse| is at most limit * (1 + 2^-22), which
// rounds to at most limit: no clamp is needed. With a non-finite x the caller has inverse = 0 and masks the
// result.
HC_HD std::int32_t quantized(float x, float inverse) {
  return static_cast<std::int32_t>(bits_of(x * inverse + float_of(Real<float>::kRoundBits)));
}
HC_HD std::int64_t quantized(double x, double inverse) {
  return static_cast<std::int64_t>(bits_of(x * inverse + float_of(Real<double>::kRoundBits)));
}

// Pack two signed 4-bit integers into a byte, and unpack them.
HC_HD std::uint8_t pack_nibbles(std::int32_t low, std::int32_t high) {
  return static_cast<std::uint8_t>((low & 15) | ((high & 15) << 4));
}
HC_HD std::int32_t low_nibble(std::uint8_t byte) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(byte) & 15u) ^ 8u) - 8;
}
HC_HD std::int32_t high_nibble(std::uint8_t byte) {
  return static_cast<std::int32_t>((static_cast<std::uint32_t>(byte) >> 4) ^ 8u) - 8;
}

// -- conversions, in integers: exact under flush-to-zero and denormals-are-zero
// ------------------------------

HC_HD std::uint32_t half_to_float_bits(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7FFFu;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;  // exponent bias 15 -> 127
  const std::uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
  const std::uint32_t special = (magnitude << 13) | 0x7F800000u | quiet;  // Inf, NaN
  // A denormal is m * 2^-24: put m into the mantissa of 2^-1 (ulp 2^-24) and subtract 2^-1.
  const std::uint32_t denormal = bits_of(float_of(0x3F000000u | magnitude) - 0.5f);
  const std::uint32_t finite = magnitude < 0x0400u ? denormal : normal;
  return sign | (magnitude >= 0x7C00u ? special : finite);
}

// Round to nearest even; overflow gives infinity, NaN the quiet NaN of the same sign.
HC_HD std::uint16_t float_to_half_bits(std::uint32_t f) {
  const std::uint32_t sign = (f >> 16) & 0x8000u;
  const std::uint32_t a = f & 0x7FFFFFFFu;
  // Normal results: drop 13 bits, rounding; a carry moves the exponent up, to infinity at the top.
  const std::uint32_t normal = (a + 0x0FFFu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  // Below 2^-14: adding 2^-1 (ulp 2^-24) rounds to a multiple of 2^-24. A float denormal becomes zero either
  // way.
  const std::uint32_t denormal = bits_of(float_of(a < 0x38800000u ? a : 0u) + 0.5f) - 0x3F000000u;
  const std::uint32_t small = a < 0x38800000u ? denormal : normal;
  const std::uint32_t finite = a >= 0x477FF000u ? 0x7C00u : small;
  return static_cast<std::uint16_t>(sign | (a > 0x7F800000u ? 0x7E00u : finite));
}

HC_HD std::uint32_t bfloat_to_float_bits(std::uint16_t b) { return static_cast<std::uint32_t>(b) << 16; }

// Round to nearest even; NaN becomes the quiet NaN of the same sign.
HC_HD std::uint16_t float_to_bfloat_bits(std::uint32_t f) {
  const std::uint32_t rounded = (f + 0x7FFFu + ((f >> 16) & 1u)) >> 16;
  const std::uint32_t nan = ((f >> 16) & 0x8000u) | 0x7FC0u;
  return static_cast<std::uint16_t>((f & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

// Return a double as a float rounded to odd: rounding that to nearest even in a shorter type gives the same
// as rounding the double there in one step. NaN stays NaN.
HC_HD std::uint32_t double_to_float_bits_odd(std::uint64_t d) {
  const std::uint32_t sign = static_cast<std::uint32_t>(d >> 32) & 0x80000000u;
  const std::uint64_t a = d & 0x7FFFFFFFFFFFFFFFull;
  if (a > 0x7FF0000000000000ull) return sign | 0x7FC00000u;
  if (a == 0x7FF0000000000000ull) return sign | 0x7F800000u;
  const std::int32_t exponent = static_cast<std::int32_t>(a >> 52) - 1023 + 127;
  if (exponent >= 255) return sign | 0x7F7FFFFFu;
  const std::uint64_t fraction = a & 0x000FFFFFFFFFFFFFull;
  if (exponent >= 1) {
    const std::uint32_t kept =
        (static_cast<std::uint32_t>(exponent) << 23) | static_cast<std::uint32_t>(fraction >> 29);
    return sign | kept | ((fraction & 0x1FFFFFFFull) ? 1u : 0u);
  }
  const std::int32_t shift = 30 - exponent;  // into float's denormals
  if (shift > 54) return sign | (a ? 1u : 0u);
  const std::uint64_t significand = fraction | 0x0010000000000000ull;
  const std::uint64_t lost = significand & ((1ull << shift) - 1);
  return sign | static_cast<std::uint32_t>(significand >> shift) | (lost ? 1u : 0u);
}

}  // namespace hybridcomp
