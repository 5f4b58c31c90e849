// Bitmaps of non-zeros, and of elements that a Bloom filter may hold; compiled once per instruction set.
#include <algorithm>

#include "codecs/common/tile.hpp"
#include "codecs/sketch/sketch.hpp"
#include "hybridcomp/bloom.hpp"

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace hybridcomp::HC_ISA {
namespace {

template <typename U>
std::uint64_t bits_set(const std::uint8_t* src, std::size_t m) {
  std::uint64_t word = 0;
  for (std::size_t i = 0; i < m; ++i) {
    U x;
    std::memcpy(&x, src + i * sizeof(U), sizeof(U));
    word |= static_cast<std::uint64_t>(x != 0) << i;
  }
  return word;
}

template <typename U>
std::uint64_t whole_word(const std::uint8_t* src) {
#if defined(__AVX512BW__)
  constexpr int kPer = static_cast<int>(64 / sizeof(U));  // elements in a vector
  std::uint64_t word = 0;
  for (int v = 0; v < 64 / kPer; ++v) {
    const __m512i x = _mm512_loadu_si512(src + v * 64);
    std::uint64_t mask;
    if constexpr (sizeof(U) == 2)
      mask = _mm512_test_epi16_mask(x, x);
    else if constexpr (sizeof(U) == 4)
      mask = _mm512_test_epi32_mask(x, x);
    else
      mask = _mm512_test_epi64_mask(x, x);
    word |= mask << (v * kPer);
  }
  return word;
#else
  return bits_set<U>(src, 64);
#endif
}

template <typename U>
std::size_t mask_all(const std::uint8_t* src, std::size_t n, std::uint8_t* words) {
  std::size_t count = 0;
  for (std::size_t at = 0; at < n; at += 64, words += 8) {
    const std::uint8_t* from = src + at * sizeof(U);
    const std::uint64_t word = n - at >= 64 ? whole_word<U>(from) : bits_set<U>(from, n - at);
    count += static_cast<std::size_t>(__builtin_popcountll(word));
    std::memcpy(words, &word, 8);
  }
  return count;
}

std::size_t mask(const void* src, std::size_t size, std::size_t n, std::uint8_t* words) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (size == 2) return mask_all<std::uint16_t>(from, n, words);
  if (size == 4) return mask_all<std::uint32_t>(from, n, words);
  return mask_all<std::uint64_t>(from, n, words);
}

// Return the word of the bitmap that begins at element `base`. In a filter that is as full as it should be,
// each probe passes half of the elements that it does not hold: the first probes are made for all elements at
// once, the others for those left.
std::uint64_t held(const std::uint32_t* filter, const BloomShape& shape, BloomKeys keys, std::uint32_t base) {
  constexpr std::uint32_t kTogether = 3;
  const std::uint32_t together = std::min(shape.hashes, kTogether);
  std::uint32_t at[64], step[64], hit[64];
  for (std::uint32_t i = 0; i < 64; ++i) {
    const BloomProbes probes = bloom_probes(keys, base + i);
    at[i] = probes.at;
    step[i] = probes.step;
    hit[i] = 1;
  }
  for (std::uint32_t h = 0; h < together; ++h)
    for (std::uint32_t i = 0; i < 64; ++i) {
      const std::uint32_t bit = bloom_bit(at[i], shape.bits);
      hit[i] &= filter[bit / 32] >> (bit % 32);
      at[i] += step[i];
    }
  std::uint64_t word = 0;
  for (std::uint32_t i = 0; i < 64; ++i) word |= static_cast<std::uint64_t>(hit[i]) << i;
  if (together == shape.hashes) return word;
  std::uint64_t found = 0;
  for (; word; word &= word - 1) {
    const int i = __builtin_ctzll(word);
    std::uint32_t probe = at[i], left = shape.hashes - together;
    for (; left; --left, probe += step[i]) {
      const std::uint32_t bit = bloom_bit(probe, shape.bits);
      if (!(filter[bit / 32] >> (bit % 32) & 1)) break;
    }
    found |= static_cast<std::uint64_t>(left == 0) << i;
  }
  return found;
}

std::size_t query(const std::uint64_t* filter, const BloomShape& shape, std::size_t n, std::uint8_t* words) {
  const BloomKeys keys = bloom_keys(shape.seed);
  const auto* const halves = reinterpret_cast<const std::uint32_t*>(filter);
  std::size_t count = 0;
  for (std::size_t at = 0; at < n; at += 64, words += 8) {
    std::uint64_t word = held(halves, shape, keys, static_cast<std::uint32_t>(at));
    if (n - at < 64) word &= (std::uint64_t(1) << (n - at)) - 1;
    count += static_cast<std::size_t>(__builtin_popcountll(word));
    std::memcpy(words, &word, 8);
  }
  return count;
}

}  // namespace

extern const SketchKernels sketch_kernels;
const SketchKernels sketch_kernels = {mask, query};

}  // namespace hybridcomp::HC_ISA
