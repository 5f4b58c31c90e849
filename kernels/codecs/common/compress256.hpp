// Tables by which eight lanes are moved together or apart: AVX2 has no compressing or expanding instructions.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>

namespace hybridcomp::HC_ISA {
namespace {

// Tables indexed by a mask of eight lanes; a byte of an entry for each lane.
struct LanesOfMask {
  std::uint64_t set[256] = {};     // the lanes that are set, in order; then lane 0
  std::uint64_t places[256] = {};  // for each set lane, how many set ones are before it; 0x80 for the others
  constexpr LanesOfMask() {
    for (unsigned mask = 0; mask < 256; ++mask)
      for (unsigned lane = 0, at = 0; lane < 8; ++lane) {
        const bool in = mask >> lane & 1;
        places[mask] |= std::uint64_t(in ? at : 0x80) << (8 * lane);
        if (in) set[mask] |= std::uint64_t(lane) << (8 * at++);
      }
  }
};
alignas(64) constexpr LanesOfMask kLanesOfMask;

inline __m128i lanes_of(std::uint32_t mask) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kLanesOfMask.set[mask]));
}

// Move the mask's lanes together; the others may hold anything.
inline __m256i compressed(__m128i lanes, __m256i x) {
  return _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(lanes));
}

// The inverse: move the first lanes to those of the mask, and zeros to the others.
inline __m256i expanded(std::uint32_t mask, __m256i x) {
  const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&kLanesOfMask.places[mask]));
  const __m256i index = _mm256_cvtepi8_epi32(places);  // its low three bits are used
  return _mm256_andnot_si256(_mm256_srai_epi32(index, 31), _mm256_permutevar8x32_epi32(x, index));
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
