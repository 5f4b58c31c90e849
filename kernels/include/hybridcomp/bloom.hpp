// Bits of a Bloom filter that stand for an element. One source for host and device, so that all ranks set and
// find the same.
#pragma once

#include "random.hpp"

namespace hybridcomp {

constexpr std::uint32_t kMostBloomHashes = 32;

// The two keys with which an element's probes are drawn; smaller key numbers are the count sketch's.
struct BloomKeys {
  RandomKey first, second;
};

HC_HD BloomKeys bloom_keys(std::uint64_t seed) { return {random_key(seed, 3), random_key(seed, 4)}; }

// The probes of an element: an arithmetic sequence modulo 2^32, which is as good as independent hashes
// (Kirsch and Mitzenmacher: "Less Hashing, Same Performance", 2006). The step is odd, so that no two are
// alike.
struct BloomProbes {
  std::uint32_t at, step;
};

HC_HD BloomProbes bloom_probes(BloomKeys keys, std::uint32_t element) {
  return {random_bits(keys.first, element), random_bits(keys.second, element) | 1u};
}

// Return the bit that a probe stands for in a filter of `bits` bits.
HC_HD std::uint32_t bloom_bit(std::uint32_t probe, std::uint32_t bits) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(probe) * bits) >> 32);
}

}  // namespace hybridcomp
