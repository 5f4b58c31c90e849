// Lanes of zfp's blocks in AVX2's vectors: eight of 32 bits, and their conversion from and to float values.
// Tables are of bytes, looked up by shuffles: a gather costs several times as much on many processors.
#pragma once

#include "codecs/zfp/blocks.hpp"

#if defined(__AVX2__) && !defined(__AVX512BW__)
#include <immintrin.h>

namespace hybridcomp {
using ZfpLanes32 = std::uint32_t __attribute__((vector_size(32)));
template <>
struct ZfpSigned<ZfpLanes32> {
  using Type = std::int32_t __attribute__((vector_size(32)));
};
}  // namespace hybridcomp

namespace hybridcomp::HC_ISA {
namespace {

using Lanes = __m256i;  // lanes of 32 bits, one for each block
using Mask = __m256i;   // mask of lanes: all bits of a lane are set, or none
constexpr std::size_t kLanes = 8, kLaneValues = kLanes * kZfpValues;
constexpr int kSideBySide = 3;  // vectors of blocks: each plane waits for the one before

// Whether the blocks of values of this type are taken: AVX2 does not convert doubles to 64-bit integers.
template <typename T>
constexpr bool kHasLanes = sizeof(T) == 4;

inline Lanes all(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline Lanes load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store(void* p, Lanes x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline Lanes left(Lanes x, Lanes count) { return _mm256_sllv_epi32(x, count); }  // 0 from 32 up
inline Lanes right(Lanes x, Lanes count) { return _mm256_srlv_epi32(x, count); }
template <int Count>
inline Lanes left(Lanes x) {
  return _mm256_slli_epi32(x, Count);
}
template <int Count>
inline Lanes right(Lanes x) {
  return _mm256_srli_epi32(x, Count);
}
inline Lanes left_by(Lanes x, int count) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(count)); }
inline Lanes right_by(Lanes x, int count) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(count)); }
inline Lanes both(Lanes a, Lanes b) { return _mm256_and_si256(a, b); }
inline Lanes either(Lanes a, Lanes b) { return _mm256_or_si256(a, b); }
inline Lanes either(Lanes a, Lanes b, Lanes c) { return either(either(a, b), c); }
inline Lanes exclusive(Lanes a, Lanes b) { return _mm256_xor_si256(a, b); }
inline Lanes plus(Lanes a, Lanes b) { return _mm256_add_epi32(a, b); }
inline Lanes minus(Lanes a, Lanes b) { return _mm256_sub_epi32(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_epi32(a, b); }  // as signed integers
inline Lanes both_or(Lanes a, Lanes b, Lanes c) { return either(both(a, b), c); }
inline Lanes or_exclusive(Lanes a, Lanes b, Lanes c) { return either(a, exclusive(b, c)); }
inline Lanes exclusive_and(Lanes a, Lanes b, Lanes c) { return both(exclusive(a, b), c); }
inline Lanes exclusive(Lanes a, Lanes b, Lanes c) { return exclusive(exclusive(a, b), c); }

// Take the next nibble, from the highest on; returns it with bit 4 set.
inline Lanes next_plane(Lanes& planes) {
  const Lanes plane = either(right<28>(planes), all(16));
  planes = left<4>(planes);
  return plane;
}

// Masks; the numbers compared are positive as signed ones too.
inline Mask less(Lanes a, Lanes b) { return _mm256_cmpgt_epi32(b, a); }
inline Mask zero(Lanes x) { return _mm256_cmpeq_epi32(x, _mm256_setzero_si256()); }
inline Mask inverted(Mask m) { return exclusive(m, all(~0u)); }
inline Mask common_bits(Lanes a, Lanes b) { return inverted(zero(both(a, b))); }
inline Mask none_of_lanes() { return _mm256_setzero_si256(); }
inline Mask both_masks(Mask a, Mask b) { return both(a, b); }
inline Mask either_mask(Mask a, Mask b) { return either(a, b); }
inline std::uint32_t bits_of_mask(Mask m) {
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m)));
}
inline bool any(Mask m) { return bits_of_mask(m) != 0; }
inline bool every(Mask m) { return bits_of_mask(m) == 0xFF; }
inline Lanes chosen(Mask m, Lanes yes, Lanes no) { return _mm256_blendv_epi8(no, yes, m); }
inline Lanes kept(Mask m, Lanes x) { return both(m, x); }

// -- tables: of sixteen bytes, or several of them ----------------------------------------------------------

using LaneEntry = std::uint8_t;

inline Lanes table16(const LaneEntry* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}

// Look up a lane's bits 0 to 3; no other bits are set, or none above 6. Entry 0 is zero, so that the lane's
// other bytes get zero.
inline Lanes shuffled(const LaneEntry* table, Lanes index) {
  return _mm256_shuffle_epi8(table16(table), index);
}

inline Lanes pick16(Lanes index, const LaneEntry* table) { return shuffled(table, index); }

// Look up bits 0 to 3 in the lanes of a mask, whatever entry 0 is; other lanes get `others`, which is zero in
// the mask's lanes.
inline Lanes pick16_if(Mask which, Lanes others, Lanes index, const LaneEntry* table) {
  const Lanes zeros = either(all(0x80808000u), inverted(which));  // a byte with the top bit set gets zero
  return either(others, shuffled(table, both_or(index, all(15), zeros)));
}

// Look up a lane's bits 0 to 4; entry 0 is zero, and bytes of the index that are negative get zero. A shuffle
// gives zero for bytes with the top bit set: that costs less than blending the results of two.
inline Lanes pick32(Lanes index, const LaneEntry* table) {
  const Lanes low = _mm256_adds_epu8(index, _mm256_set1_epi8(0x70));  // top bits from 16 up
  const Lanes high = _mm256_sub_epi8(index, _mm256_set1_epi8(0x10));  // and below 16
  return either(shuffled(table, low), shuffled(table + 16, high));
}

// Number of bits of each integer from 0 to 15.
struct HighestBit {
  LaneEntry of[16] = {};
  constexpr HighestBit() {
    for (unsigned bits = 1; bits < 16; ++bits) of[bits] = static_cast<LaneEntry>(of[bits / 2] + 1);
  }
};
alignas(16) constexpr HighestBit kHighestBit;

// -- values ------------------------------------------------------------------------------------------------

template <typename T>
struct LaneValues;

template <>
struct LaneValues<float> {
  // Lane 4 h + l is block 2 l + h.
  static constexpr std::size_t block_of(int lane) {
    return static_cast<std::size_t>(lane % 4 * 2 + lane / 4);
  }

  // Reorder lanes from the order of blocks to block_of's, and back.
  static Lanes from_blocks(Lanes x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  }
  static Lanes to_blocks(Lanes x) {
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  // Read the integers of eight blocks in base -2, and the exponent's field; `some` gets the blocks that are
  // not all zero, `rare` those whose integers must be made otherwise.
  static void read(const float* x, Lanes parts[1][4], Lanes& exponent, Mask& some, Mask& rare) {
    Lanes v[4];
    for (int i = 0; i < 4; ++i) v[i] = load(x + 8 * i);
    transpose(v);
    const Lanes sign = all(Real<float>::kMagnitude);
    const Lanes peak = _mm256_max_epi32(_mm256_max_epi32(both(v[0], sign), both(v[1], sign)),
                                        _mm256_max_epi32(both(v[2], sign), both(v[3], sign)));
    exponent = plus(right<23>(peak), all(1));
    some = inverted(zero(peak));
    rare = both(some, either(less(exponent, all(kLeastExponent<float>)), less(all(255), exponent)));
    // 2^(30 - (exponent - 127))
    const __m256 scale = _mm256_castsi256_ps(left<23>(minus(all(284), exponent)));
    ZfpLanes32 u[4];
    for (int i = 0; i < 4; ++i)
      u[i] = (ZfpLanes32)_mm256_cvttps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(v[i]), scale));
    zfp_forward(u, ZfpLanes32{} + Zfp<float>::kNegabinary);
    for (int i = 0; i < 4; ++i) parts[0][i] = (Lanes)u[i];
  }

  // The inverse; writes zeros where not `some`.
  static void write(const Lanes parts[1][4], Lanes exponent, Mask some, float* x) {
    ZfpLanes32 u[4];
    for (int i = 0; i < 4; ++i) u[i] = (ZfpLanes32)parts[0][i];
    zfp_inverse(u, ZfpLanes32{} + Zfp<float>::kNegabinary);
    // 2^(exponent - 127 - 30)
    const __m256 scale = _mm256_castsi256_ps(left<23>(minus(exponent, all(30))));
    Lanes v[4];
    for (int i = 0; i < 4; ++i)
      v[i] = both(some, _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps((Lanes)u[i]), scale)));
    transpose(v);
    for (int i = 0; i < 4; ++i) store(x + 8 * i, v[i]);
  }

 private:
  // Reorder vectors of two blocks each to value i of every block in v[i], or back.
  static void transpose(Lanes v[4]) {
    const Lanes a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const Lanes c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    v[0] = _mm256_unpacklo_epi64(a, c);
    v[1] = _mm256_unpackhi_epi64(a, c);
    v[2] = _mm256_unpacklo_epi64(b, d);
    v[3] = _mm256_unpackhi_epi64(b, d);
  }
};

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
