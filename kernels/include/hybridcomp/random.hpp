// Counter-based random bits: a function of a seed and an element's index alone, so that any part of a tensor
// can be drawn anywhere, in any order, on host and device alike.
#pragma once

#include "arithmetic.hpp"

namespace hybridcomp {

// Two words that stand for a seed and the high half of an index.
struct RandomKey {
  std::uint32_t first;
  std::uint32_t second;
};

// Mix 32 bits by a function of low bias (Wellons, "Prospecting for Hash Functions", 2018: lowbias32).
HC_HD std::uint32_t mix32(std::uint32_t h) {
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  h ^= h >> 16;
  return h;
}

// Return the key of elements high * 2^32 .. (high + 1) * 2^32 - 1.
HC_HD RandomKey random_key(std::uint64_t seed, std::uint32_t high) {
  const std::uint32_t a = mix32(static_cast<std::uint32_t>(seed) + 0x9E3779B9u);
  const std::uint32_t b = mix32(a ^ static_cast<std::uint32_t>(seed >> 32));
  const std::uint32_t c = mix32(b + high);
  return {c, mix32(c + 0x9E3779B9u)};
}

// Return 32 random bits for the element whose index ends in `low`. The second key goes in between the
// multiplications, so that streams of two seeds are not one another's permutations.
HC_HD std::uint32_t random_bits(RandomKey key, std::uint32_t low) {
  std::uint32_t h = low ^ key.first;
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= key.second;
  h ^= h >> 15;
  h *= 0x846CA68Bu;
  h ^= h >> 16;
  return h;
}

// Return the dither that stochastic rounding adds before it rounds to nearest: uniform in steps of 2^-16,
// between -1/2 and 1/2, neither of which it reaches. Exact.
HC_HD float dither(std::uint32_t bits, float) {
  return (static_cast<float>(static_cast<std::int32_t>(bits >> 16)) - 32767.5f) * 0x1p-16f;
}
HC_HD double dither(std::uint32_t bits, double) {
  return (static_cast<double>(static_cast<std::int32_t>(bits >> 16)) - 32767.5) * 0x1p-16;
}

}  // namespace hybridcomp
