// AVX-512 version of ints.hpp: the integers of a block are four registers, a bit plane is a mask.
#pragma once

#include "codecs/common/tile.hpp"
#include "hybridcomp/bounded.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kB = kBoundedBlock;
constexpr std::size_t kGroupBytes = 64;  // eight planes, which are packed together
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

struct Ints {
  __m512i v[4];
};

// bounded_stored for sixteen values, none of which is NaN.
template <DTypeCode D>
inline __m512 stored(__m512 y) {
  if constexpr (D == kFloat16) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(y, kNearest));
  } else if constexpr (D == kBFloat16) {
    const __m512i bits = _mm512_castps_si512(y);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
  } else {
    return y;
  }
}

// Quantize a full block of elements to integers; returns whether every value holds (no integer is too large).
// An integer that does not fit, or of NaN, becomes INT32_MIN, which is too large: other results of NaN are
// not used.
template <DTypeCode D>
inline bool integers_of(const std::uint8_t* src, const BoundedStep<ComputeOf<D>>& step, Ints* q) {
  constexpr int kLargerMagnitude = 0x0B;  // VRANGE's immediate: the larger magnitude, as a positive number
  if constexpr (D == kFloat64) {
    const __m512d inverse = _mm512_set1_pd(step.inverse), size = _mm512_set1_pd(step.step);
    __m512d worst = _mm512_setzero_pd();
    for (int i = 0; i < 4; ++i) {
      __m256i part[2];
      for (int j = 0; j < 2; ++j) {
        const __m512d x = _mm512_loadu_pd(src + i * 128 + j * 64);
        part[j] = _mm512_cvt_roundpd_epi32(_mm512_mul_pd(x, inverse), kNearest);
        const __m512d y = _mm512_mul_pd(_mm512_cvtepi32_pd(part[j]), size);
        worst = _mm512_range_pd(worst, _mm512_sub_pd(x, y), kLargerMagnitude);
      }
      q->v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(part[0]), part[1], 1);
    }
    return _mm512_cmp_pd_mask(worst, _mm512_set1_pd(step.limit), _CMP_LE_OQ) == 0xFF;
  } else {
    constexpr int kBytes = 16 * sizeof(StorageOf<D>);
    const __m512 inverse = _mm512_set1_ps(step.inverse), size = _mm512_set1_ps(step.step);
    __m512 worst = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      const __m512 x = floats_at<D>(src + i * kBytes);
      q->v[i] = _mm512_cvt_roundps_epi32(_mm512_mul_ps(x, inverse), kNearest);
      const __m512 y = stored<D>(_mm512_mul_ps(_mm512_cvt_roundepi32_ps(q->v[i], kNearest), size));
      worst = _mm512_range_ps(worst, _mm512_sub_ps(x, y), kLargerMagnitude);
    }
    return _mm512_cmp_ps_mask(worst, _mm512_set1_ps(step.limit), _CMP_LE_OQ) == 0xFFFF;
  }
}

// Write the differences of neighbours. The first integer is left out of them: d[0] = 0.
inline void differences_of(const Ints& q, Ints* d) {
  __m512i before = _mm512_broadcastd_epi32(_mm512_castsi512_si128(q.v[0]));
  for (int i = 0; i < 4; ++i) {
    d->v[i] = _mm512_sub_epi32(q.v[i], _mm512_alignr_epi32(q.v[i], before, 15));
    before = q.v[i];
  }
}

// `sum` or'ed with the spreads of sixteen integers.
inline __m512i with_spread(__m512i sum, __m512i q) {
  constexpr int kOrXor = 0xF6;  // a | (b ^ c)
  return _mm512_ternarylogic_epi32(sum, q, _mm512_add_epi32(q, q), kOrXor);
}

inline __m512i spread_of(const Ints& q) {
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) sum = with_spread(sum, q.v[i]);
  return sum;
}

inline std::uint32_t delta_spread(const Ints& d) {
  return static_cast<std::uint32_t>(_mm512_reduce_or_epi32(spread_of(d)));
}

// Find the spreads of all integers, and of the first kBoundedSample differences: both "or"s of sixteen lanes
// at once.
inline void spreads_of(const Ints& q, std::uint32_t* plain, std::uint32_t* sample) {
  const __m512i first = _mm512_broadcastd_epi32(_mm512_castsi512_si128(q.v[0]));
  const __m512i d = _mm512_sub_epi32(q.v[0], _mm512_alignr_epi32(q.v[0], first, 15));
  const __m512i a = spread_of(q), b = with_spread(_mm512_setzero_si512(), d);
  const __m256i a8 = _mm256_or_si256(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
  const __m256i b8 = _mm256_or_si256(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
  const __m256i both =
      _mm256_or_si256(_mm256_unpacklo_epi64(a8, b8), _mm256_unpackhi_epi64(a8, b8));  // a a b b, twice
  const __m128i four = _mm_or_si128(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
  const __m128i two = _mm_or_si128(four, _mm_shuffle_epi32(four, 0xB1));
  *plain = static_cast<std::uint32_t>(_mm_cvtsi128_si32(two));
  *sample = static_cast<std::uint32_t>(_mm_extract_epi32(two, 2));
}

inline std::int32_t first_of(const Ints& q) { return _mm_cvtsi128_si32(_mm512_castsi512_si128(q.v[0])); }

// Add up differences, from `first` on.
inline void sum_up(Ints* q, std::int32_t first) {
  const __m512i zero = _mm512_setzero_si512(), last = _mm512_set1_epi32(15);
  __m512i carry = _mm512_set1_epi32(first);
  for (int i = 0; i < 4; ++i) {
    __m512i x = q->v[i];
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
    q->v[i] = _mm512_add_epi32(x, carry);
    carry = _mm512_permutexvar_epi32(last, q->v[i]);
  }
}

// Write `planes` bit planes, and bytes that complete their last group of eight.
inline void put_planes(const Ints& q, std::uint32_t planes, std::uint8_t* out) {
  for (std::uint32_t low = 0; low < planes; low += 8, out += kGroupBytes) {
    const __m128i by = _mm_cvtsi32_si128(static_cast<int>(low));
    __m128i part[4];
    for (int i = 0; i < 4; ++i) part[i] = _mm512_cvtepi32_epi8(_mm512_srl_epi32(q.v[i], by));
    const __m256i front = _mm256_inserti128_si256(_mm256_castsi128_si256(part[0]), part[1], 1);
    const __m256i back = _mm256_inserti128_si256(_mm256_castsi128_si256(part[2]), part[3], 1);
    const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(front), back, 1);
    for (int p = 0; p < 8; ++p) {
      const std::uint64_t plane = _mm512_test_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(1 << p)));
      std::memcpy(out + p * 8, &plane, 8);
    }
  }
}

// Return eight planes as 64 bytes.
inline __m512i planes_to_bytes(const std::uint8_t* in) {
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};  // two chains of additions
  for (int p = 0; p < 8; ++p) {
    std::uint64_t plane;
    std::memcpy(&plane, in + p * 8, 8);
    const __m512i bit = _mm512_set1_epi8(static_cast<char>(1 << p));
    sum[p % 2] = _mm512_mask_add_epi8(sum[p % 2], plane, sum[p % 2], bit);
  }
  return _mm512_or_si512(sum[0], sum[1]);
}

// Read `planes` bit planes (0 .. 31) as signed integers; also reads the bytes that complete their last group
// of eight.
inline void get_planes(const std::uint8_t* in, std::uint32_t planes, Ints* q) {
  for (int i = 0; i < 4; ++i) q->v[i] = _mm512_setzero_si512();
  for (std::uint32_t low = 0; low < planes; low += 8, in += kGroupBytes) {
    const __m512i bytes = planes_to_bytes(in);
    const __m128i by = _mm_cvtsi32_si128(static_cast<int>(low));
    const __m128i part[4] = {_mm512_castsi512_si128(bytes), _mm512_extracti32x4_epi32(bytes, 1),
                             _mm512_extracti32x4_epi32(bytes, 2), _mm512_extracti32x4_epi32(bytes, 3)};
    for (int i = 0; i < 4; ++i)
      q->v[i] = _mm512_or_si512(q->v[i], _mm512_sll_epi32(_mm512_cvtepu8_epi32(part[i]), by));
  }
  // This also drops the bits above. With 0 planes nothing was read, and a shift by 32 gives 0 again.
  const __m128i above = _mm_cvtsi32_si128(static_cast<int>(32 - planes));
  for (int i = 0; i < 4; ++i) q->v[i] = _mm512_sra_epi32(_mm512_sll_epi32(q->v[i], above), above);
}

// Write sixteen floats to `out` as elements of type O, or add them.
template <DTypeCode O, bool Add>
inline void put_floats(__m512 y, std::uint8_t* out) {
  if constexpr (O == kFloat32) {
    if constexpr (Add) y = quieted(_mm512_add_ps(_mm512_loadu_ps(out), y));
    _mm512_storeu_ps(out, y);
  } else if constexpr (O == kFloat16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(y, kNearest));
  } else {
    const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(stored<kBFloat16>(y)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(high));
  }
}

// Whether put_values writes elements of type O.
template <DTypeCode O, typename T>
constexpr bool puts() {
  return (O == kFloat64) == (sizeof(T) == 8);
}

// Write the values of a full block to `out` (of any alignment), or add them.
template <DTypeCode O, bool Add, typename T>
inline void put_values(const Ints& q, T step, std::uint8_t* out) {
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      const __m512 y = _mm512_mul_ps(_mm512_cvt_roundepi32_ps(q.v[i], kNearest), _mm512_set1_ps(step));
      put_floats<O, Add>(y, out + i * 16 * sizeof(StorageOf<O>));
    } else {
      const __m256i part[2] = {_mm512_castsi512_si256(q.v[i]), _mm512_extracti64x4_epi64(q.v[i], 1)};
      for (int j = 0; j < 2; ++j) {
        std::uint8_t* const to = out + i * 128 + j * 64;
        __m512d y = _mm512_mul_pd(_mm512_cvtepi32_pd(part[j]), _mm512_set1_pd(step));
        if constexpr (Add) y = quieted(_mm512_add_pd(_mm512_loadu_pd(to), y));
        _mm512_storeu_pd(to, y);
      }
    }
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
