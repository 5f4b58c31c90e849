// MPC's bit planes and zeros in AVX2's registers.
#pragma once

#include <cstring>

#include "codecs/common/compress256.hpp"
#include "codecs/lossless/mpc.hpp"

#if defined(__AVX2__)

namespace hybridcomp::HC_ISA {
namespace {

inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store256(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }

// -- BIT of words of 32 bits -------------------------------------------------------------------------------

// Turn words into rows of planes: the top bits of 32 bytes are a mask, a tile's lane.
inline void words_to_planes(const std::uint32_t* words, std::uint32_t* rows) {
  const __m256i by_byte =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i halves_together = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (std::size_t at = 0; at < kMpcChunk; at += 32) {
    __m256i w[4];  // in each half four words' bytes 0, then their bytes 1, ...
    for (std::size_t k = 0; k < 4; ++k) w[k] = _mm256_shuffle_epi8(load256(words + at + 8 * k), by_byte);
    const __m256i ab01 = _mm256_unpacklo_epi32(w[0], w[1]), ab23 = _mm256_unpackhi_epi32(w[0], w[1]);
    const __m256i cd01 = _mm256_unpacklo_epi32(w[2], w[3]), cd23 = _mm256_unpackhi_epi32(w[2], w[3]);
    const __m256i planes[4] = {_mm256_unpackhi_epi64(ab23, cd23), _mm256_unpacklo_epi64(ab23, cd23),
                               _mm256_unpackhi_epi64(ab01, cd01), _mm256_unpacklo_epi64(ab01, cd01)};
    std::uint8_t* row = reinterpret_cast<std::uint8_t*>(rows) + at / 8;
    for (const __m256i plane : planes) {  // the highest byte first
      __m256i x = _mm256_permutevar8x32_epi32(plane, halves_together);
      for (int bit = 0; bit < 8; ++bit, row += kMpcRowBytes) {
        const int mask = _mm256_movemask_epi8(x);
        std::memcpy(row, &mask, 4);
        x = _mm256_add_epi8(x, x);
      }
    }
  }
}

// Transpose matrices of 8 x 8 bits, a row a byte, by swapping blocks of 1, 2 and 4 bits; this is one such
// step.
template <int Distance>
inline __m256i swap_blocks(__m256i x, std::uint64_t mask) {
  const __m256i t = _mm256_and_si256(_mm256_xor_si256(x, _mm256_srli_epi64(x, Distance)),
                                     _mm256_set1_epi64x(static_cast<long long>(mask)));
  return _mm256_xor_si256(_mm256_xor_si256(x, t), _mm256_slli_epi64(t, Distance));
}
inline __m256i transposed8(__m256i x) {
  x = swap_blocks<7>(x, 0x00AA00AA00AA00AAull);
  x = swap_blocks<14>(x, 0x0000CCCC0000CCCCull);
  return swap_blocks<28>(x, 0x00000000F0F0F0F0ull);
}

// Turn eight rows of bits, the highest first, into bytes: those of words 16 j on in the lower half of
// bytes[j], those of words 128 + 16 j on in the upper one.
inline void rows_to_bytes(const std::uint8_t* rows, __m256i bytes[8]) {
  __m256i r[8], pairs[8], fours[8];
  for (std::size_t bit = 0; bit < 8; ++bit) r[bit] = load256(rows + (7 - bit) * kMpcRowBytes);
  for (int i = 0; i < 4; ++i) {
    pairs[i] = _mm256_unpacklo_epi8(r[2 * i], r[2 * i + 1]);
    pairs[4 + i] = _mm256_unpackhi_epi8(r[2 * i], r[2 * i + 1]);
  }
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 2; ++i) {
      const __m256i a = pairs[4 * half + 2 * i], b = pairs[4 * half + 2 * i + 1];
      fours[4 * half + i] = _mm256_unpacklo_epi16(a, b);
      fours[4 * half + 2 + i] = _mm256_unpackhi_epi16(a, b);
    }
  for (int i = 0; i < 4; ++i) {
    bytes[2 * i] = transposed8(_mm256_unpacklo_epi32(fours[2 * i], fours[2 * i + 1]));
    bytes[2 * i + 1] = transposed8(_mm256_unpackhi_epi32(fours[2 * i], fours[2 * i + 1]));
  }
}

inline void planes_to_words(const std::uint32_t* rows, std::uint32_t* words) {
  const auto* bits = reinterpret_cast<const std::uint8_t*>(rows);
  for (std::size_t at = 0; at < kMpcChunk; at += 256) {
    __m256i bytes[4][8];
    for (std::size_t k = 0; k < 4; ++k) rows_to_bytes(bits + at / 8 + (3 - k) * 8 * kMpcRowBytes, bytes[k]);
    for (std::size_t j = 0; j < 8; ++j) {
      const __m256i low01 = _mm256_unpacklo_epi8(bytes[0][j], bytes[1][j]);
      const __m256i high01 = _mm256_unpackhi_epi8(bytes[0][j], bytes[1][j]);
      const __m256i low23 = _mm256_unpacklo_epi8(bytes[2][j], bytes[3][j]);
      const __m256i high23 = _mm256_unpackhi_epi8(bytes[2][j], bytes[3][j]);
      const __m256i w[4] = {_mm256_unpacklo_epi16(low01, low23), _mm256_unpackhi_epi16(low01, low23),
                            _mm256_unpacklo_epi16(high01, high23), _mm256_unpackhi_epi16(high01, high23)};
      for (std::size_t q = 0; q < 4; ++q) {
        std::uint32_t* const to = words + at + 16 * j + 4 * q;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(w[q]));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 128), _mm256_extracti128_si256(w[q], 1));
      }
    }
  }
}

// -- LNV1s and ZE of lanes of 32 bits
// ------------------------------------------------------------------------

// Subtract from each row the row before; write a bitmap of the lanes that are not zero, and these lanes.
// Returns the end of the lanes; up to 32 bytes more are written.
inline std::uint8_t* drop_zero_lanes(const std::uint32_t* rows, std::size_t count, std::uint8_t* bitmap,
                                     std::uint8_t* kept) {
  constexpr std::size_t kVectors = kMpcRowBytes / 32;
  __m256i before[kVectors] = {};
  for (std::size_t k = 0; k < count; ++k)
    for (std::size_t v = 0; v < kVectors; ++v, rows += 8) {
      const __m256i row = load256(rows), d = _mm256_sub_epi32(row, before[v]);
      before[v] = row;
      const __m256i zero = _mm256_cmpeq_epi32(d, _mm256_setzero_si256());
      const auto mask = static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zero))) ^ 0xFFu;
      *bitmap++ = static_cast<std::uint8_t>(mask);
      store256(kept, compressed(lanes_of(mask), d));
      kept += 4 * __builtin_popcount(mask);
    }
  return kept;
}

// The inverse; reads no further than the lanes.
inline void restore_zero_lanes(const std::uint8_t* bitmap, const std::uint8_t* kept, std::size_t count,
                               std::uint32_t* rows) {
  constexpr std::size_t kVectors = kMpcRowBytes / 32;
  const __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i sum[kVectors] = {};
  for (std::size_t k = 0; k < count; ++k)
    for (std::size_t v = 0; v < kVectors; ++v, rows += 8) {
      const std::uint32_t mask = *bitmap++;
      const int present = __builtin_popcount(mask);
      const __m256i lanes = _mm256_maskload_epi32(reinterpret_cast<const int*>(kept),
                                                  _mm256_cmpgt_epi32(_mm256_set1_epi32(present), place));
      sum[v] = _mm256_add_epi32(sum[v], expanded(mask, lanes));
      kept += 4 * present;
      store256(rows, sum[v]);
    }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
