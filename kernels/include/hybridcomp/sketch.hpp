// Places of elements in the count sketch: hashes, signs and the order of three estimates. One source for host
// and device, so that all ranks place, sum and peel alike.
#pragma once

#include "arithmetic.hpp"
#include "random.hpp"

namespace hybridcomp {

constexpr int kSketchHashes = 3;

// One of an element's three counters: a row of the sketch, and the sign with which the value is added.
struct SketchPlace {
  std::uint32_t row;
  bool negative;
};

// Return the key with which hash `which` (0 .. 2) of a seed draws its bits.
HC_HD RandomKey sketch_key(std::uint64_t seed, int which) {
  return random_key(seed, static_cast<std::uint32_t>(which));
}

// Return the place that a hash gives a block. Each hash has `third` rows of its own, so that an element's
// counters are three different ones.
HC_HD SketchPlace sketch_place(RandomKey key, std::uint32_t block, std::uint32_t third, int which) {
  const std::uint32_t h = random_bits(key, block);
  const std::uint32_t row = static_cast<std::uint32_t>((static_cast<std::uint64_t>(h) * third) >> 32);
  return {static_cast<std::uint32_t>(which) * third + row, (h & 1u) != 0};
}

template <typename T>
HC_HD T sketch_signed(T x, bool negative) {
  return negative ? -x : x;
}

// Return the median of three estimates; NaN if any is not finite.
template <typename T>
HC_HD T sketch_median(T a, T b, T c) {
  if (magnitude(a) >= Real<T>::kInfinity || magnitude(b) >= Real<T>::kInfinity ||
      magnitude(c) >= Real<T>::kInfinity)
    return float_of(Real<T>::kNan);
  const T low = a < b ? a : b, high = a < b ? b : a;
  const T upper = high < c ? high : c;
  return low < upper ? upper : low;
}

}  // namespace hybridcomp
