// Rules of the sign quantizer: a bit per element and the block's mean magnitude.
#pragma once

#include "arithmetic.hpp"

namespace hybridcomp {

// Lanes in which the mean's terms are summed (lane j has elements j, j + 16, ...), then added up in pairs 8,
// 4, 2 and 1 apart.
constexpr int kSignLanes = 16;

// Return the term that an element adds to its lane: scaled, so that no sum of 65,536 of the largest numbers
// overflows; tiny ones count as zero, so that no sum is denormal.
HC_HD float sign_term(float x) {
  const float a = float_of(magnitude(x));
  return magnitude(x) < Real<float>::kSmallest ? 0.0f : a * 0x1p-17f;
}
HC_HD double sign_term(double x) {
  const double a = float_of(magnitude(x));
  return magnitude(x) < Real<double>::kSmallest ? 0.0 : a * 0x1p-17;
}

// Return the mean magnitude of m elements from the sum of their terms; NaN unless all were finite.
template <typename T>
HC_HD T sign_mean(T sum, std::uint32_t m) {
  if (magnitude(sum) >= Real<T>::kInfinity) return float_of(Real<T>::kNan);
  const T mean = sum / (static_cast<T>(m) * static_cast<T>(0x1p-17));
  return magnitude(mean) == Real<T>::kInfinity
             ? float_of(static_cast<typename Real<T>::Bits>(Real<T>::kInfinity - 1))
             : mean;
}

}  // namespace hybridcomp
