// zfp's fixed-rate coding of one-dimensional blocks of four values (Lindstrom, "Fixed-Rate Compressed
// Floating-Point Arrays", 2014; https://zfp.readthedocs.io, "Algorithm"), bit-compatible with zfp 1.0 as it
// is built by default (no rounding mode, subnormals kept).
//
// A block of `bits` bits, least significant first: one bit "not all zero"; the exponent field E (zfp's common
// exponent plus the type's bias); then the bit planes of the transformed integers, most significant first,
// cut off where the bits end. Where zfp's own code leaves C undefined, this follows its documentation: a
// block whose values are below 2^-98 (2^-962) overflows zfp's float scale, here its integers are exact.
#pragma once

#include <cstdint>

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

constexpr int kZfpValues = 4;  // values of a block

template <typename T>
struct Zfp;

template <>
struct Zfp<float> {
  static constexpr int kExponentBits = 8, kBias = 127, kMantissa = 23, kPlanes = 32;
  static constexpr std::uint32_t kNegabinary = 0xAAAAAAAAu;
  // A block that decodes to infinity needs its header and two planes' first bits: see zfp_non_finite.
  static constexpr std::uint32_t kLeastBits = 11, kMostBits = 128;
};

template <>
struct Zfp<double> {
  static constexpr int kExponentBits = 11, kBias = 1023, kMantissa = 52, kPlanes = 64;
  static constexpr std::uint64_t kNegabinary = 0xAAAAAAAAAAAAAAAAull;
  static constexpr std::uint32_t kLeastBits = 14, kMostBits = 256;
};

template <typename T>
constexpr int kZfpHeaderBits = 1 + Zfp<T>::kExponentBits;
template <typename T>
constexpr int kZfpMaxExponent = (1 << Zfp<T>::kExponentBits) - 1;  // largest value of the field E

// -- floating point to integers and back -----------------------------------------------------------------

// Return the field E of a block of finite values whose largest magnitude has the bits `peak`; 0 if all are
// zero. The values are below 2^(E - bias): frexp's exponent, not below the smallest normal number's.
template <typename T>
HC_HD int zfp_exponent(typename Real<T>::Bits peak) {
  const int field = static_cast<int>(peak >> Zfp<T>::kMantissa);
  return peak == 0 ? 0 : field + 1;
}

// Return x * 2^(planes - 2 - exponent), towards zero, in integers: exact for denormals too, in all modes of
// the processor. The caller takes care of an exponent of all ones in x.
template <typename T>
HC_HD typename Real<T>::Signed zfp_fixed(T x, int e) {
  using Bits = typename Real<T>::Bits;
  constexpr int kMantissa = Zfp<T>::kMantissa, kWidth = Zfp<T>::kPlanes;
  const Bits m = magnitude(x);
  const int field = static_cast<int>(m >> kMantissa);
  const Bits hidden = Bits(field != 0) << kMantissa;
  const Bits significand = (m & ((Bits(1) << kMantissa) - 1)) | hidden;
  int shift = e - (field != 0 ? field : 1);
  shift = shift < kWidth - 1 ? shift : kWidth - 1;
  const Bits whole = (significand << (kWidth - 2 - kMantissa)) >> shift;
  const Bits negative = bits_of(x) >> (kWidth - 1);
  return static_cast<typename Real<T>::Signed>((whole ^ (Bits(0) - negative)) + negative);
}

// Return i * 2^(exponent - (planes - 2)) as zfp computes it: i rounded to T, times the power of two rounded
// to T, which is zero for the smallest exponents. Where the product could be denormal it is formed in
// integers.
template <typename T>
HC_HD T zfp_float(typename Real<T>::Signed i, int e) {
  using Bits = typename Real<T>::Bits;
  constexpr int kMantissa = Zfp<T>::kMantissa, kDown = Zfp<T>::kPlanes - 2;
  const T value = static_cast<T>(i);
  if (e > kDown) return value * float_of(static_cast<Bits>(e - kDown) << kMantissa);
  const Bits sign = bits_of(value) & ~Real<T>::kMagnitude;
  const Bits m = magnitude(value);
  if (m == 0 || e <= kDown - kMantissa) return float_of(sign);
  const int field = static_cast<int>(m >> kMantissa) + e - kDown - Zfp<T>::kBias;
  const Bits fraction = m & ((Bits(1) << kMantissa) - 1);
  if (field >= 1) return float_of(sign | (static_cast<Bits>(field) << kMantissa) | fraction);
  const int shift = 1 - field;
  if (shift > kMantissa + 1) return float_of(sign);
  const Bits significand = fraction | (Bits(1) << kMantissa);
  const Bits odd = (significand >> shift) & 1;
  return float_of(sign | ((significand + ((Bits(1) << (shift - 1)) - 1) + odd) >> shift));
}

// -- the transform -----------------------------------------------------------------------------------------

// Signed type of an unsigned one, which may be a vector.
template <typename U>
struct ZfpSigned;
template <>
struct ZfpSigned<std::uint32_t> {
  using Type = std::int32_t;
};
template <>
struct ZfpSigned<std::uint64_t> {
  using Type = std::int64_t;
};

// Shift right with the sign.
template <typename U>
HC_HD U zfp_half(U x) {
  return (U)((typename ZfpSigned<U>::Type)x >> 1);
}

// Do the lifting steps, and write the integers in base -2. Sums wrap: hostile streams may overflow them.
template <typename U>
HC_HD void zfp_forward(U v[4], U negabinary) {
  U x = v[0], y = v[1], z = v[2], w = v[3];
  x = zfp_half(x + w), w -= x;
  z = zfp_half(z + y), y -= z;
  x = zfp_half(x + z), z -= x;
  w = zfp_half(w + y), y -= w;
  w += zfp_half(y), y -= zfp_half(w);
  v[0] = (x + negabinary) ^ negabinary;
  v[1] = (y + negabinary) ^ negabinary;
  v[2] = (z + negabinary) ^ negabinary;
  v[3] = (w + negabinary) ^ negabinary;
}

template <typename U>
HC_HD void zfp_inverse(U v[4], U negabinary) {
  U x = (v[0] ^ negabinary) - negabinary, y = (v[1] ^ negabinary) - negabinary;
  U z = (v[2] ^ negabinary) - negabinary, w = (v[3] ^ negabinary) - negabinary;
  y += zfp_half(w), w -= zfp_half(y);
  y += w, w += w - y;
  z += x, x += x - z;
  y += z, z += z - y;
  w += x, x += x - w;
  v[0] = x, v[1] = y, v[2] = z, v[3] = w;
}

// Write the integers of a block with a NaN or an infinity: its E is all ones and its mean 2^(planes - 2), so
// that every value decodes to 2^(bias + 1), which is infinity.
template <typename U>
HC_HD void zfp_non_finite(U v[4]) {
  v[0] = U(1) << (8 * sizeof(U) - 2);
  v[1] = v[2] = v[3] = 0;
}

// Return how many bit planes a block of this exponent has: zfp ends at 2^-1074, two bits of the transform's
// growth and two more below.
template <typename T>
HC_HD int zfp_planes(int e) {
  const int planes = e - Zfp<T>::kBias + 1074 + 4;
  return planes < Zfp<T>::kPlanes ? planes : Zfp<T>::kPlanes;
}

// -- a bit plane ---------------------------------------------------------------------------------------

// `known` values have a bit set in a higher plane, or precede one that has. Their bits come as they are; the
// others in runs: 1 if any is left with its bit set, then zeros up to it and a one (left out for the last
// value); 0 if none is left.
struct ZfpPlane {
  std::uint8_t bits;    // the code, or the plane's four bits, value 0 lowest
  std::uint8_t length;  // bits of the code
  std::uint8_t known;   // known values after the plane
};

HC_HD constexpr ZfpPlane zfp_plane_code(unsigned plane, unsigned known) {
  unsigned code = plane & ((1u << known) - 1), length = known;
  while (known < 4) {
    const bool any = (plane >> known) != 0;
    code |= unsigned(any) << length++;
    if (!any) break;
    for (; known < 3; ++known) {
      const unsigned bit = (plane >> known) & 1;
      code |= bit << length++;
      if (bit) break;
    }
    ++known;
  }
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(length),
          static_cast<std::uint8_t>(known)};
}

// The inverse; any bits may follow `code`.
HC_HD constexpr ZfpPlane zfp_plane_bits(unsigned code, unsigned known) {
  unsigned plane = code & ((1u << known) - 1), length = known;
  while (known < 4) {
    if (((code >> length++) & 1) == 0) break;
    while (known < 3 && ((code >> length++) & 1) == 0) ++known;
    plane |= 1u << known++;
  }
  return {static_cast<std::uint8_t>(plane), static_cast<std::uint8_t>(length),
          static_cast<std::uint8_t>(known)};
}
constexpr unsigned kZfpCodeBits = 7;  // the longest code

// Return the plane decoded from the last bits of a block, followed by zeros, `missing` of which it took. If
// they were the zeros of a run, the run reached the last value; zfp sets the value where the bits ended.
HC_HD unsigned zfp_cut_run(unsigned plane, unsigned known_before, int missing) {
  return missing > 0 && known_before < 4 && (plane & 8u) ? (plane & 7u) | (8u >> missing) : plane;
}

}  // namespace hybridcomp
