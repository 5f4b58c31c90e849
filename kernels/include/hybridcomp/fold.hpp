// The operations that make one element of two ranks': in integers where the result is one of the two, so that
// neither the instruction set nor a flush-to-zero mode decides a bit of it.
//
// The larger and the smaller of two floats are those of IEEE 754-2019 (maximum, minimum): NaN where one is
// NaN, and +0 above -0. A NaN that results is always the same one, as that of a sum (`quieted`).
#pragma once

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

// A type of float by its bits: Bits, with Signed of the same length.
template <typename BitsType, typename SignedType, BitsType Infinity, BitsType Nan>
struct FloatBits {
  using Bits = BitsType;
  using Signed = SignedType;
  static constexpr Bits kInfinity = Infinity, kNan = Nan;
  static constexpr Bits kMagnitude = static_cast<Bits>(static_cast<Bits>(~Bits(0)) >> 1);
};
using Float32Bits = FloatBits<std::uint32_t, std::int32_t, Real<float>::kInfinity, Real<float>::kNan>;
using Float64Bits = FloatBits<std::uint64_t, std::int64_t, Real<double>::kInfinity, Real<double>::kNan>;
using Float16Bits = FloatBits<std::uint16_t, std::int16_t, 0x7C00, 0x7E00>;
using BFloat16Bits = FloatBits<std::uint16_t, std::int16_t, 0x7F80, 0x7FC0>;

// Return a number that orders floats as their values, -0 below +0; and, given that number, the float.
template <typename F>
HC_HD typename F::Signed ordered(typename F::Signed bits) {
  const typename F::Signed magnitude = F::kMagnitude;
  return bits < 0 ? static_cast<typename F::Signed>(bits ^ magnitude) : bits;
}

template <typename F>
HC_HD bool is_nan(typename F::Bits bits) {
  using Signed = typename F::Signed;  // magnitudes are positive; signed comparisons are cheaper
  return static_cast<Signed>(bits & F::kMagnitude) > static_cast<Signed>(F::kInfinity);
}

// Return the larger of two floats, or with `Smaller` the smaller.
template <typename F, bool Smaller>
HC_HD typename F::Bits extreme(typename F::Bits a, typename F::Bits b) {
  using Bits = typename F::Bits;
  using Signed = typename F::Signed;
  const Signed x = ordered<F>(static_cast<Signed>(a)), y = ordered<F>(static_cast<Signed>(b));
  const Signed one = (x > y) != Smaller ? x : y;
  const Bits found = static_cast<Bits>(ordered<F>(one));
  const bool one_is_nan = is_nan<F>(a), other_is_nan = is_nan<F>(b);
  return one_is_nan || other_is_nan ? F::kNan : found;
}

}  // namespace hybridcomp
