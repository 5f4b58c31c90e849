// Where the count sketch puts an element: hashes, signs and the order of three estimates. One source for host
// and device, so that all ranks place, sum and peel alike.
#pragma once

#include "arithmetic.hpp"
#include "random.hpp"

namespace hybridcomp {

constexpr int kSketchHashes = 3;

// One of the three counters of an element: a row of the sketch, and the sign its value is added with.
struct SketchPlace {
  std::uint32_t row;
  bool negative;
};

// What hash `which` (0 .. 2) of a seed draws its bits with.
HC_HD RandomKey sketch_key(std::uint64_t seed, int which) {
  return random_key(seed, static_cast<std::uint32_t>(which));
}

// The place that a hash gives a block. Each hash has `third` rows of its own, so that an element's counters
// are three different ones.
HC_HD SketchPlace sketch_place(RandomKey key, std::uint32_t block, std::uint32_t third, int which) {
  const std::uint32_t h = random_bits(key, block);
  const std::uint32_t row = static_cast<std::uint32_t>((static_cast<std::uint64_t>(h) * third) >> 32);
  return {static_cast<std::uint32_t>(which) * third + row, (h & 1u) != 0};
}

template <typename T>
HC_HD T sketch_signed(T x, bool negative) {
  return negative ? -x : x;
}

// The median of three estimates; NaN if any is not finite.
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
