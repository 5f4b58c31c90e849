// Rounding rules of the shared-scale quantizer `lattice`: one scale for a whole tensor, the same on all
// ranks, so that integers of different ranks add up. See arithmetic.hpp for the operations allowed here.
#pragma once

#include "arithmetic.hpp"
#include "random.hpp"

namespace hybridcomp {

// Return the largest integer that one of `ranks` contributions may have for their sum to fit `bits` bits; 0:
// too many ranks.
HC_HD std::int32_t lattice_limit(int bits, std::uint32_t ranks) {
  return static_cast<std::int32_t>(((1u << (bits - 1)) - 1u) / ranks);
}

// Type in which integers of `Bits` bits are computed from values of type T: float's 24 bits do not hold 32.
template <typename T, int Bits>
struct LatticeCompute {
  using Type = T;
};
template <>
struct LatticeCompute<float, 32> {
  using Type = double;
};

// Return the scale for a largest magnitude `peak` (as bits of T), in the computing type; widening it is
// exact.
template <typename T, int Bits>
HC_HD BlockScale<typename LatticeCompute<T, Bits>::Type> lattice_scale(typename Real<T>::Bits peak,
                                                                       std::int32_t limit) {
  using C = typename LatticeCompute<T, Bits>::Type;
  if (sizeof(C) == sizeof(T))
    return block_scale<C>(static_cast<typename Real<C>::Bits>(peak), static_cast<C>(limit));
  // For float into 32 bits, a tensor with a peak below 2^-90 becomes zero, so that a denormal element of any
  // tensor is less than half a step and modes that take it for zero change nothing.
  if (peak >= Real<T>::kInfinity) return {float_of(Real<C>::kNan), C(0)};
  if (peak < (Real<T>::kSmallest + (typename Real<T>::Bits(10) << 23))) return {C(0), C(0)};
  return block_scale<C>(magnitude(static_cast<C>(float_of(peak))), static_cast<C>(limit));
}

// Return the nearest integer to x * inverse, ties to even; -limit .. limit by the choice of the inverse.
template <typename C>
HC_HD std::int32_t lattice_nearest(C x, C inverse) {
  return static_cast<std::int32_t>(quantized(x, inverse));
}

// Return x * inverse rounded up or down at random, so that the expectation is x * inverse. The product's
// distance from its nearest integer is exact, so the chances follow from the distance at every magnitude.
template <typename C>
HC_HD std::int32_t lattice_stochastic(C x, C inverse, std::int32_t limit, std::uint32_t random) {
  const C magic = float_of(Real<C>::kRoundBits);
  const typename Real<C>::Bits smallest_normal = typename Real<C>::Bits(1) << (sizeof(C) == 4 ? 23 : 52);
  const C y = (magnitude(x) < smallest_normal ? C(0) : x) * inverse;
  const C sum = y + magic;
  const C distance = y - (sum - magic);
  const C turn = distance + dither(random, C(0)) + magic;  // -1, 0 or 1 above `magic`
  const std::int32_t zero = static_cast<std::int32_t>(bits_of(magic));
  const std::int32_t q =
      (static_cast<std::int32_t>(bits_of(sum)) - zero) + (static_cast<std::int32_t>(bits_of(turn)) - zero);
  const std::int32_t low = q < -limit ? -limit : q;  // the peak times the inverse may be just above the limit
  return low > limit ? limit : low;
}

// Return the value of an integer: T is the message's computing type.
template <typename T, int Bits>
HC_HD T lattice_value(std::int32_t q, typename LatticeCompute<T, Bits>::Type scale) {
  return static_cast<T>(static_cast<typename LatticeCompute<T, Bits>::Type>(q) * scale);
}

}  // namespace hybridcomp
