// Streams many blocks at a time: a block in each 32-bit lane of vectors, all at the same bit plane. This file
// has the code that both directions share; lanes512.hpp and lanes256.hpp have the vectors.
#pragma once

#include "codecs/zfp/blocks.hpp"

#if defined(__AVX2__)

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kLaneWords = 4;  // most words of a block: 128 bits

// 32-bit parts of an integer, the most significant first.
template <typename T>
constexpr int kParts = sizeof(T) / 4;

// The smallest exponent of a block that the vectors take: 2^(planes - 2 - exponent) and every product are
// normal numbers or below one, so that it does not matter whether denormals are flushed to zero.
template <typename T>
constexpr int kLeastExponent = Zfp<T>::kPlanes - 1;

}  // namespace
}  // namespace hybridcomp::HC_ISA

#if defined(__AVX512BW__)
#include "codecs/zfp/lanes512.hpp"
#else
#include "codecs/zfp/lanes256.hpp"
#endif

namespace hybridcomp::HC_ISA {
namespace {

// Swap the bits at `mask` with those `Distance` above.
template <int Distance>
inline Lanes swap_bits(Lanes x, std::uint32_t mask) {
  const Lanes t = exclusive_and(right<Distance>(x), x, all(mask));
  return exclusive(x, t, left<Distance>(t));
}

// Return the top bytes of four integers as eight nibbles, a bit plane each, the most significant first from
// the top.
inline Lanes nibbles_of(const Lanes u[4]) {
  const Lanes high = both_or(u[3], all(0xFF000000u), right<24>(u[0]));
  Lanes x = both_or(right<8>(u[1]), all(0x00FF0000u), high);
  x = both_or(right<16>(u[2]), all(0x0000FF00u), x);
  x = swap_bits<12>(x, 0x0000F0F0u);
  x = swap_bits<6>(x, 0x00CC00CCu);
  return swap_bits<3>(x, 0x0A0A0A0Au);
}

// The inverse: bytes of values 0, 2, 1, 3 from the lowest.
inline Lanes bytes_of(Lanes x) {
  x = swap_bits<3>(x, 0x0A0A0A0Au);
  x = swap_bits<6>(x, 0x00CC00CCu);
  return swap_bits<12>(x, 0x0000F0F0u);
}

// Call f.template operator()<Words>() for blocks of so many bits.
template <typename F>
inline void with_words(unsigned bits, F f) {
  switch ((bits - 1) / 32) {
    case 0:
      return f.template operator()<1>();
    case 1:
      return f.template operator()<2>();
    case 2:
      return f.template operator()<3>();
    default:
      return f.template operator()<4>();
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
