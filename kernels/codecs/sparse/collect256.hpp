// Selecting by vectors of eight elements, moved together by a permutation: AVX2 has no compressing store.
#pragma once

#include "codecs/common/compress256.hpp"
#include "codecs/common/tile.hpp"
#include "codecs/sparse/largest.hpp"
#include "codecs/sparse/sparse.hpp"

#if defined(__AVX2__)

namespace hybridcomp::HC_ISA {
namespace {

// Return the byte positions of 16-bit elements from their lanes.
inline __m128i positions16(__m128i lanes) {
  const __m128i wide = _mm_cvtepu8_epi16(lanes);
  return _mm_add_epi16(_mm_mullo_epi16(wide, _mm_set1_epi16(0x0202)), _mm_set1_epi16(0x0100));
}

// Eight elements of 32 or of 16 bits. Magnitudes are positive as signed integers, which AVX2 compares.
template <typename U>
struct Eight;

template <>
struct Eight<std::uint32_t> {
  using Vector = __m256i;
  static Vector all(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static Vector load(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Vector key(Vector x) { return _mm256_and_si256(x, all(Keys<std::uint32_t>::kMask)); }
  static Vector above(Vector a, Vector b) { return _mm256_cmpgt_epi32(a, b); }
  static Vector equal(Vector a, Vector b) { return _mm256_cmpeq_epi32(a, b); }
  static Vector either(Vector a, Vector b) { return _mm256_or_si256(a, b); }
  static bool none(Vector x) { return _mm256_testz_si256(x, x); }
  static std::uint32_t mask(Vector x) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(x)));
  }
  static void put(__m128i lanes, Vector x, std::uint32_t* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), compressed(lanes, x));
  }
};

template <>
struct Eight<std::uint16_t> {
  using Vector = __m128i;
  static Vector all(std::uint16_t x) { return _mm_set1_epi16(static_cast<short>(x)); }
  static Vector load(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static Vector key(Vector x) { return _mm_and_si128(x, all(Keys<std::uint16_t>::kMask)); }
  static Vector above(Vector a, Vector b) { return _mm_cmpgt_epi16(a, b); }
  static Vector equal(Vector a, Vector b) { return _mm_cmpeq_epi16(a, b); }
  static Vector either(Vector a, Vector b) { return _mm_or_si128(a, b); }
  static bool none(Vector x) { return _mm_testz_si128(x, x); }
  static std::uint32_t mask(Vector x) {
    return static_cast<std::uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(x, _mm_setzero_si128())));
  }
  static void put(__m128i lanes, Vector x, std::uint16_t* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(x, positions16(lanes)));
  }
};

// Return the signed integer that exactly the keys reaching `limit` are above: no key reaches a limit beyond
// all keys.
template <typename U>
constexpr U below_limit(U limit) {
  return limit > Keys<U>::kMask ? Keys<U>::kMask : static_cast<U>(limit - 1);
}

// Return the first `count` of the bits set.
inline std::uint32_t first_bits(std::uint32_t mask, std::uint64_t count) {
  std::uint32_t kept = 0;
  for (; mask && count; --count, mask &= mask - 1) kept |= mask & (0u - mask);
  return kept;
}

// Chunks without selected elements are skipped as long as the last stretch of elements had few: else the
// branch is mispredicted so often that moving no elements costs less.
constexpr std::size_t kStretch = 1024, kFewOfStretch = 8;

// Collect the selected elements of whole chunks, from `at` on, as long as there are ties to count if kTies.
// Stores write no further than the elements that are read already, since values and indices may be the
// inputs.
template <typename U, bool kListed, bool kTies>
void collect_chunks(const std::uint8_t* src, std::size_t m, const std::uint16_t* from, Selection* selection,
                    std::uint16_t* indices, U* values, std::size_t* place, std::size_t* used) {
  using E = Eight<U>;
  using Vector = typename E::Vector;
  constexpr std::size_t kVectors = kChunk / 8;
  const U lowest = static_cast<U>(kTies ? selection->tie : selection->all);
  const Vector low = E::all(below_limit<U>(lowest)), tie = E::all(static_cast<U>(selection->tie));
  const Vector all = E::all(below_limit<U>(static_cast<U>(selection->all)));
  std::uint64_t ties = selection->ties;
  std::size_t at = *place, count = *used, before = count;
  bool few = true;
  for (; at + kChunk <= m && (!kTies || ties); at += kChunk) {
    if (at % kStretch == 0) {
      few = count - before < kFewOfStretch;
      before = count;
    }
    for (std::size_t line = 0; line < kChunk * sizeof(U); line += 64)
      prefetch_ahead(src + at * sizeof(U) + line);
    Vector x[kVectors], reach[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
      x[v] = E::load(src + (at + 8 * v) * sizeof(U));
      reach[v] = E::above(E::key(x[v]), low);
    }
    static_assert(kVectors == 4);
    if (few && E::none(E::either(E::either(reach[0], reach[1]), E::either(reach[2], reach[3])))) continue;
    for (std::size_t v = 0; v < kVectors; ++v) {
      std::uint32_t mask = E::mask(reach[v]);
      if constexpr (kTies) {
        std::uint32_t equal = E::mask(E::equal(E::key(x[v]), tie));
        if (static_cast<std::uint64_t>(__builtin_popcount(equal)) > ties) equal = first_bits(equal, ties);
        ties -= static_cast<std::uint64_t>(__builtin_popcount(equal));
        mask = E::mask(E::above(E::key(x[v]), all)) | equal;
      }
      const __m128i lanes = lanes_of(mask);
      __m128i index;
      if constexpr (kListed)
        index = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at + 8 * v)),
                                 positions16(lanes));
      else
        index = _mm_add_epi16(_mm_cvtepu8_epi16(lanes), _mm_set1_epi16(static_cast<short>(at + 8 * v)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(indices + count), index);
      E::put(lanes, x[v], values + count);
      count += static_cast<std::size_t>(__builtin_popcount(mask));
    }
  }
  selection->ties = ties;
  *place = at;
  *used = count;
}

// Write those of n elements whose key is below `limit`, or reaches it, to `values` (which may be src, and has
// room for eight more); returns their number. `place` tells how many elements were looked at.
template <typename U>
std::size_t keep_eights(const std::uint8_t* src, std::size_t n, U limit, bool reaching, U* values,
                        std::size_t* place) {
  using E = Eight<U>;
  const typename E::Vector low = E::all(below_limit<U>(limit));
  const std::uint32_t flip = reaching ? 0 : 0xFF;
  std::size_t at = 0, count = 0;
  for (; at + 8 <= n; at += 8) {
    const typename E::Vector x = E::load(src + at * sizeof(U));
    const std::uint32_t mask = E::mask(E::above(E::key(x), low)) ^ flip;
    E::put(lanes_of(mask), x, values + count);
    count += static_cast<std::size_t>(__builtin_popcount(mask));
  }
  *place = at;
  return count;
}

}  // namespace
}  // namespace hybridcomp::HC_ISA

#endif
