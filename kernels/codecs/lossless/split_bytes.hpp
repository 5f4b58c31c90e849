// 64 words in AVX-512 registers, taken apart into planes of bytes and put together again.
#pragma once

#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

namespace hybridcomp::HC_ISA {
namespace {

// Intrinsics with a full mask replace plain ones that GCC 12 takes for uses of uninitialized registers.

// Split 64 words of Width bytes into planes. The words fill as many registers as they have planes.
template <int Width>
void split_bytes(const __m512i* words, __m512i* planes);
template <int Width>
void join_bytes(const __m512i* planes, __m512i* words);

// Reorder each lane of 16 bytes: four words' bytes 0, then their bytes 1, ... This is its own inverse.
inline __m512i transpose_4x4(__m512i x) {
  return _mm512_shuffle_epi8(
      x, _mm512_maskz_broadcast_i32x4(0xFFFF,
                                      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

template <>
inline void split_bytes<2>(const __m512i* words, __m512i* planes) {
  const __m512i by_byte = _mm512_maskz_broadcast_i32x4(
      0xFFFF, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const __m512i a = _mm512_shuffle_epi8(words[0], by_byte), b = _mm512_shuffle_epi8(words[1], by_byte);
  planes[0] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14), b);
  planes[1] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15), b);
}

template <>
inline void join_bytes<2>(const __m512i* planes, __m512i* words) {
  const __m512i by_word = _mm512_maskz_broadcast_i32x4(
      0xFFFF, _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
  const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  words[0] = _mm512_shuffle_epi8(_mm512_permutex2var_epi64(planes[0], low, planes[1]), by_word);
  words[1] = _mm512_shuffle_epi8(_mm512_permutex2var_epi64(planes[0], high, planes[1]), by_word);
}

// The split goes by quarters: 32 bits of each register's lanes of 16 bytes belong to one plane.
template <>
inline void split_bytes<4>(const __m512i* words, __m512i* planes) {
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i second = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  const __m512i a = transpose_4x4(words[0]), b = transpose_4x4(words[1]);
  const __m512i c = transpose_4x4(words[2]), d = transpose_4x4(words[3]);
  const __m512i ab01 = _mm512_permutex2var_epi32(a, first, b), ab23 = _mm512_permutex2var_epi32(a, second, b);
  const __m512i cd01 = _mm512_permutex2var_epi32(c, first, d), cd23 = _mm512_permutex2var_epi32(c, second, d);
  planes[0] = _mm512_maskz_shuffle_i64x2(0xFF, ab01, cd01, 0x44);
  planes[1] = _mm512_maskz_shuffle_i64x2(0xFF, ab01, cd01, 0xEE);
  planes[2] = _mm512_maskz_shuffle_i64x2(0xFF, ab23, cd23, 0x44);
  planes[3] = _mm512_maskz_shuffle_i64x2(0xFF, ab23, cd23, 0xEE);
}

template <>
inline void join_bytes<4>(const __m512i* planes, __m512i* words) {
  const __m512i low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
  const __m512i high = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
  const __m512i ab01 = _mm512_maskz_shuffle_i64x2(0xFF, planes[0], planes[1], 0x44);
  const __m512i cd01 = _mm512_maskz_shuffle_i64x2(0xFF, planes[0], planes[1], 0xEE);
  const __m512i ab23 = _mm512_maskz_shuffle_i64x2(0xFF, planes[2], planes[3], 0x44);
  const __m512i cd23 = _mm512_maskz_shuffle_i64x2(0xFF, planes[2], planes[3], 0xEE);
  words[0] = transpose_4x4(_mm512_permutex2var_epi32(ab01, low, ab23));
  words[1] = transpose_4x4(_mm512_permutex2var_epi32(ab01, high, ab23));
  words[2] = transpose_4x4(_mm512_permutex2var_epi32(cd01, low, cd23));
  words[3] = transpose_4x4(_mm512_permutex2var_epi32(cd01, high, cd23));
}

template <>
inline void split_bytes<8>(const __m512i* words, __m512i* planes) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512i low[4], high[4];
  for (int i = 0; i < 4; ++i) {
    low[i] = _mm512_permutex2var_epi32(words[2 * i], even, words[2 * i + 1]);
    high[i] = _mm512_permutex2var_epi32(words[2 * i], odd, words[2 * i + 1]);
  }
  split_bytes<4>(low, planes);
  split_bytes<4>(high, planes + 4);
}

template <>
inline void join_bytes<8>(const __m512i* planes, __m512i* words) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  __m512i low[4], high[4];
  join_bytes<4>(planes, low);
  join_bytes<4>(planes + 4, high);
  for (int i = 0; i < 4; ++i) {
    words[2 * i] = _mm512_permutex2var_epi32(low[i], first, high[i]);
    words[2 * i + 1] = _mm512_permutex2var_epi32(low[i], second, high[i]);
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
