// Lanes of zfp's blocks in AVX-512's vectors: sixteen of 32 bits, and their conversion from and to values.
#pragma once

#include "codecs/zfp/blocks.hpp"

#if defined(__AVX512BW__)
#include <immintrin.h>

namespace hybridcomp {
using ZfpLanes32 = std::uint32_t __attribute__((vector_size(64)));
using ZfpLanes64 = std::uint64_t __attribute__((vector_size(64)));
template <>
struct ZfpSigned<ZfpLanes32> {
  using Type = std::int32_t __attribute__((vector_size(64)));
};
template <>
struct ZfpSigned<ZfpLanes64> {
  using Type = std::int64_t __attribute__((vector_size(64)));
};
}  // namespace hybridcomp

namespace hybridcomp::HC_ISA {
namespace {

using Lanes = __m512i;   // lanes of 32 bits, one for each block
using Mask = __mmask16;  // mask of lanes
constexpr std::size_t kLanes = 16, kLaneValues = kLanes * kZfpValues;
constexpr int kSideBySide = 2;  // vectors of blocks: each plane waits for the one before

// Whether the blocks of values of this type are taken.
template <typename T>
constexpr bool kHasLanes = true;

inline Lanes all(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline Lanes load(const void* p) { return _mm512_loadu_si512(p); }
inline void store(void* p, Lanes x) { _mm512_storeu_si512(p, x); }
inline Lanes left(Lanes x, Lanes count) { return _mm512_sllv_epi32(x, count); }  // 0 from 32 up
inline Lanes right(Lanes x, Lanes count) { return _mm512_srlv_epi32(x, count); }
template <int Count>
inline Lanes left(Lanes x) {
  return _mm512_slli_epi32(x, Count);
}
template <int Count>
inline Lanes right(Lanes x) {
  return _mm512_srli_epi32(x, Count);
}
inline Lanes left_by(Lanes x, int count) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(count)); }
inline Lanes right_by(Lanes x, int count) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(count)); }
inline Lanes pick(Lanes index, Lanes table) { return _mm512_permutexvar_epi32(index, table); }
inline Lanes both(Lanes a, Lanes b) { return _mm512_and_si512(a, b); }
inline Lanes either(Lanes a, Lanes b) { return _mm512_or_si512(a, b); }
inline Lanes either(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0xFE); }
inline Lanes exclusive(Lanes a, Lanes b) { return _mm512_xor_si512(a, b); }
inline Lanes plus(Lanes a, Lanes b) { return _mm512_add_epi32(a, b); }
inline Lanes minus(Lanes a, Lanes b) { return _mm512_sub_epi32(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_epi32(a, b); }  // as signed integers
inline Lanes both_or(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0xEA); }
// a | (b ^ c), (a ^ b) & c and a ^ b ^ c
inline Lanes or_exclusive(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0xF6); }
inline Lanes exclusive_and(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0x28); }
inline Lanes exclusive(Lanes a, Lanes b, Lanes c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

// Take the next nibble, from the highest on; returns it with bit 4 set.
inline Lanes next_plane(Lanes& planes) {
  planes = _mm512_rol_epi32(planes, 4);
  return both_or(planes, all(15), all(16));
}

// Masks; the numbers compared are positive as signed ones too.
inline Mask less(Lanes a, Lanes b) { return _mm512_cmplt_epu32_mask(a, b); }
inline Mask zero(Lanes x) { return _mm512_testn_epi32_mask(x, x); }
inline Mask common_bits(Lanes a, Lanes b) { return _mm512_test_epi32_mask(a, b); }
inline Mask none_of_lanes() { return 0; }
inline Mask both_masks(Mask a, Mask b) { return a & b; }
inline Mask either_mask(Mask a, Mask b) { return static_cast<Mask>(a | b); }
inline bool any(Mask m) { return m != 0; }
inline bool every(Mask m) { return m == 0xFFFF; }
inline std::uint32_t bits_of_mask(Mask m) { return m; }
inline Lanes chosen(Mask m, Lanes yes, Lanes no) { return _mm512_mask_mov_epi32(no, m, yes); }
inline Lanes kept(Mask m, Lanes x) { return _mm512_maskz_mov_epi32(m, x); }

// -- tables: of sixteen entries, or several of them --------------------------------------------------------

using LaneEntry = std::uint32_t;

// Look up a lane's bits 0 to 3, the same in some lanes, and bits 0 to 4.
inline Lanes pick16(Lanes index, const LaneEntry* table) { return pick(index, load(table)); }
inline Lanes pick16_if(Mask which, Lanes others, Lanes index, const LaneEntry* table) {
  return _mm512_mask_permutexvar_epi32(others, which, index, load(table));
}
inline Lanes pick32(Lanes index, const LaneEntry* table) {
  return _mm512_permutex2var_epi32(load(table), index, load(table + 16));
}

inline Lanes all64(std::uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }

// Sixteen blocks' values and the order of their lanes, for each type, as the other functions take and return
// them.
template <typename T>
struct LaneValues;

template <>
struct LaneValues<float> {
  // Lane 4 l + j is block 4 j + l.
  static constexpr std::size_t block_of(int lane) {
    return static_cast<std::size_t>(lane % 4 * 4 + lane / 4);
  }

  // Reorder lanes from the order of blocks to block_of's, and back.
  static Lanes from_blocks(Lanes x) {
    return pick(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
  }
  static Lanes to_blocks(Lanes x) { return from_blocks(x); }

  // Read the integers of sixteen blocks in base -2, and the exponent's field; `some` gets the blocks that are
  // not all zero, `rare` those whose integers must be made otherwise.
  static void read(const float* x, Lanes parts[1][4], Lanes& exponent, Mask& some, Mask& rare) {
    Lanes v[4];
    for (int i = 0; i < 4; ++i) v[i] = load(x + 16 * i);
    transpose(v);
    const Lanes sign = all(Real<float>::kMagnitude);
    const Lanes peak = _mm512_max_epu32(_mm512_max_epu32(both(v[0], sign), both(v[1], sign)),
                                        _mm512_max_epu32(both(v[2], sign), both(v[3], sign)));
    const Lanes field = _mm512_srli_epi32(peak, 23);
    exponent = plus(field, all(1));
    some = _mm512_test_epi32_mask(peak, peak);
    constexpr int kLeast = kLeastExponent<float>;
    rare = _mm512_mask_cmpge_epu32_mask(some, minus(exponent, all(kLeast)), all(256 - kLeast));
    // 2^(30 - (exponent - 127))
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(minus(all(284), exponent), 23));
    ZfpLanes32 u[4];
    for (int i = 0; i < 4; ++i)
      u[i] = (ZfpLanes32)_mm512_cvttps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(v[i]), scale));
    zfp_forward(u, ZfpLanes32{} + Zfp<float>::kNegabinary);
    for (int i = 0; i < 4; ++i) parts[0][i] = (Lanes)u[i];
  }

  // The inverse; writes zeros where not `some`.
  static void write(const Lanes parts[1][4], Lanes exponent, Mask some, float* x) {
    ZfpLanes32 u[4];
    for (int i = 0; i < 4; ++i) u[i] = (ZfpLanes32)parts[0][i];
    zfp_inverse(u, ZfpLanes32{} + Zfp<float>::kNegabinary);
    // 2^(exponent - 127 - 30)
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(minus(exponent, all(30)), 23));
    Lanes v[4];
    for (int i = 0; i < 4; ++i)
      v[i] = _mm512_castps_si512(_mm512_maskz_mul_ps(some, _mm512_cvtepi32_ps((Lanes)u[i]), scale));
    transpose(v);
    for (int i = 0; i < 4; ++i) _mm512_storeu_si512(x + 16 * i, v[i]);
  }

 private:
  // Reorder vectors of four blocks each to value i of every block in v[i], or back.
  static void transpose(Lanes v[4]) {
    const Lanes a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    const Lanes c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm512_unpacklo_epi64(a, c);
    v[1] = _mm512_unpackhi_epi64(a, c);
    v[2] = _mm512_unpacklo_epi64(b, d);
    v[3] = _mm512_unpackhi_epi64(b, d);
  }
};

template <>
struct LaneValues<double> {
  static constexpr std::size_t block_of(int lane) { return static_cast<std::size_t>(lane); }
  static Lanes from_blocks(Lanes x) { return x; }
  static Lanes to_blocks(Lanes x) { return x; }

  static void read(const double* x, Lanes parts[2][4], Lanes& exponent, Mask& some, Mask& rare) {
    ZfpLanes64 u[2][4];
    Lanes fields[2];
    unsigned nonzero = 0, other = 0;
    for (int h = 0; h < 2; ++h) {  // eight blocks each
      Lanes v[4];
      for (int i = 0; i < 4; ++i) v[i] = load(x + 32 * h + 8 * i);
      gather(v);
      const Lanes sign = all64(Real<double>::kMagnitude);
      const Lanes peak = _mm512_max_epu64(_mm512_max_epu64(both(v[0], sign), both(v[1], sign)),
                                          _mm512_max_epu64(both(v[2], sign), both(v[3], sign)));
      fields[h] = _mm512_add_epi64(_mm512_srli_epi64(peak, 52), all64(1));
      const __mmask8 here = _mm512_test_epi64_mask(peak, peak);
      constexpr int kLeast = kLeastExponent<double>;
      nonzero |= unsigned(here) << (8 * h);
      other |= unsigned(_mm512_mask_cmpge_epu64_mask(here, _mm512_sub_epi64(fields[h], all64(kLeast)),
                                                     all64(2048 - kLeast)))
               << (8 * h);
      // 2^(62 - (exponent - 1023))
      const __m512d scale =
          _mm512_castsi512_pd(_mm512_slli_epi64(_mm512_sub_epi64(all64(2108), fields[h]), 52));
      for (int i = 0; i < 4; ++i)
        u[h][i] = (ZfpLanes64)_mm512_cvttpd_epi64(_mm512_mul_pd(_mm512_castsi512_pd(v[i]), scale));
      zfp_forward(u[h], ZfpLanes64{} + Zfp<double>::kNegabinary);
    }
    const Lanes even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const Lanes odd = plus(even, all(1));
    for (int i = 0; i < 4; ++i) {
      parts[0][i] = _mm512_permutex2var_epi32((Lanes)u[0][i], odd, (Lanes)u[1][i]);
      parts[1][i] = _mm512_permutex2var_epi32((Lanes)u[0][i], even, (Lanes)u[1][i]);
    }
    exponent = _mm512_permutex2var_epi32(fields[0], even, fields[1]);
    some = static_cast<__mmask16>(nonzero);
    rare = static_cast<__mmask16>(other);
  }

  static void write(const Lanes parts[2][4], Lanes exponent, Mask some, double* x) {
    for (int h = 0; h < 2; ++h) {
      const Lanes order =
          plus(_mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), all(8 * h));
      ZfpLanes64 u[4];
      for (int i = 0; i < 4; ++i)
        u[i] = (ZfpLanes64)_mm512_permutex2var_epi32(parts[1][i], order, parts[0][i]);
      zfp_inverse(u, ZfpLanes64{} + Zfp<double>::kNegabinary);
      // 2^(exponent - 1023 - 62)
      const Lanes field = _mm512_permutex2var_epi32(minus(exponent, all(62)), order, _mm512_setzero_si512());
      const __m512d scale = _mm512_castsi512_pd(_mm512_slli_epi64(field, 52));
      const __mmask8 here = static_cast<__mmask8>(some >> (8 * h));
      Lanes v[4];
      for (int i = 0; i < 4; ++i)
        v[i] = _mm512_castpd_si512(_mm512_maskz_mul_pd(here, _mm512_cvtepi64_pd((Lanes)u[i]), scale));
      scatter(v);
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(x + 32 * h + 8 * i, v[i]);
    }
  }

 private:
  static Lanes first() { return _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13); }
  static Lanes second() { return _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15); }

  // Reorder vectors of two blocks each to value i of every block in v[i].
  static void gather(Lanes v[4]) {
    const Lanes a = _mm512_permutex2var_epi64(v[0], first(), v[1]);
    const Lanes b = _mm512_permutex2var_epi64(v[0], second(), v[1]);
    const Lanes c = _mm512_permutex2var_epi64(v[2], first(), v[3]);
    const Lanes d = _mm512_permutex2var_epi64(v[2], second(), v[3]);
    v[0] = _mm512_shuffle_i64x2(a, c, 0x44);
    v[1] = _mm512_shuffle_i64x2(a, c, 0xEE);
    v[2] = _mm512_shuffle_i64x2(b, d, 0x44);
    v[3] = _mm512_shuffle_i64x2(b, d, 0xEE);
  }

  // The inverse.
  static void scatter(Lanes v[4]) {
    const Lanes a = _mm512_shuffle_i64x2(v[0], v[1], 0x44), c = _mm512_shuffle_i64x2(v[0], v[1], 0xEE);
    const Lanes b = _mm512_shuffle_i64x2(v[2], v[3], 0x44), d = _mm512_shuffle_i64x2(v[2], v[3], 0xEE);
    v[0] = _mm512_permutex2var_epi64(a, first(), b);
    v[1] = _mm512_permutex2var_epi64(a, second(), b);
    v[2] = _mm512_permutex2var_epi64(c, first(), d);
    v[3] = _mm512_permutex2var_epi64(c, second(), d);
  }
};

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
