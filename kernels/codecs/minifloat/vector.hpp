// Values that share a scale to codes and back: plain loops, and vector code where it is faster.
#pragma once

#include "codecs/common/tile.hpp"
#include "hybridcomp/minifloat.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <MinifloatFormat F, bool Saturate>
inline std::uint32_t code_of(float y) {
  if constexpr (Saturate)
    return minifloat_saturated<F>(y);
  else
    return minifloat_of<F>(y);
}

#if defined(__AVX512F__)

// code_of in 16 lanes.
template <MinifloatFormat F, bool Saturate>
inline __m512i codes_of(__m512 y) {
  using R = Rounding<F>;
  const auto all = [](std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); };
  const __m512i u = _mm512_castps_si512(y);
  __m512i a = _mm512_and_si512(u, all(0x7FFFFFFFu));
  if constexpr (Saturate)  // the smaller magnitude, without a sign
    a = _mm512_castps_si512(
        _mm512_maskz_range_ps(0xFFFF, y, _mm512_castsi512_ps(all(Minifloat<F>::kLimit)), 0xA));
  const __m512i e = _mm512_maskz_max_epi32(0xFFFF, _mm512_and_si512(a, all(0x7F800000u)), all(R::kLeast));
  const __m512 magic = _mm512_castsi512_ps(_mm512_add_epi32(e, all(R::kAdd)));
  const __m512i sum = _mm512_add_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), magic)),
                                       _mm512_maskz_srli_epi32(0xFFFF, e, R::kDrop));
  // The bits of kCode from the sum, the others (of which the sign is the only one) from y.
  return _mm512_ternarylogic_epi32(all(R::kCode), sum,
                                   _mm512_maskz_srli_epi32(0xFFFF, u, 32 - Minifloat<F>::kBits), 0xCA);
}

// Find the largest magnitudes of 16 microscaling blocks.
inline void peaks16(const float* x, std::uint32_t* peaks) {
  __m512i v[16];
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const auto larger = [](__m512i a, __m512i b) { return _mm512_maskz_max_epi32(0xFFFF, a, b); };
  for (int i = 0; i < 16; ++i) {
    prefetch_ahead(x + 32 * i, kMxBlock * sizeof(float));
    v[i] = larger(_mm512_and_si512(_mm512_loadu_si512(x + 32 * i), magnitude),
                  _mm512_and_si512(_mm512_loadu_si512(x + 32 * i + 16), magnitude));
  }
  // Two vectors become one with half the lanes of each, until one has a lane of each block: within 128 bits
  // first, then across.
  for (int i = 0; i < 8; ++i)
    v[i] = larger(_mm512_maskz_unpacklo_epi32(0xFFFF, v[2 * i], v[2 * i + 1]),
                  _mm512_maskz_unpackhi_epi32(0xFFFF, v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    v[i] = larger(_mm512_maskz_unpacklo_epi64(0xFF, v[2 * i], v[2 * i + 1]),
                  _mm512_maskz_unpackhi_epi64(0xFF, v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    v[i] = larger(_mm512_maskz_shuffle_i32x4(0xFFFF, v[2 * i], v[2 * i + 1], 0x44),
                  _mm512_maskz_shuffle_i32x4(0xFFFF, v[2 * i], v[2 * i + 1], 0xEE));
  _mm512_storeu_si512(peaks, larger(_mm512_maskz_shuffle_i32x4(0xFFFF, v[0], v[1], 0x88),
                                    _mm512_maskz_shuffle_i32x4(0xFFFF, v[0], v[1], 0xDD)));
}

// Encode 64 values, of which the first 32 are multiplied by one factor and the others by another; a factor of
// 0 makes codes of 0, for NaN too.
template <MinifloatFormat F, bool Saturate>
inline void encode64(const float* x, float first, float second, std::uint8_t* codes) {
  const __m512 f = _mm512_set1_ps(first), s = _mm512_set1_ps(second);
  const __m512i a = codes_of<F, Saturate>(_mm512_mul_ps(_mm512_loadu_ps(x), f));
  const __m512i b = codes_of<F, Saturate>(_mm512_mul_ps(_mm512_loadu_ps(x + 16), f));
  const __m512i c = codes_of<F, Saturate>(_mm512_mul_ps(_mm512_loadu_ps(x + 32), s));
  const __m512i d = codes_of<F, Saturate>(_mm512_mul_ps(_mm512_loadu_ps(x + 48), s));
  // Packing works within 128 bits and leaves groups of four codes as a transposed 4 x 4 matrix.
  const __m512i mixed = _mm512_packus_epi16(_mm512_packus_epi32(a, b), _mm512_packus_epi32(c, d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __mmask16 used = static_cast<__mmask16>((first != 0.0f ? 0x00FF : 0) | (second != 0.0f ? 0xFF00 : 0));
  const __m512i bytes = _mm512_maskz_permutexvar_epi32(used, order, mixed);
  if constexpr (Minifloat<F>::kBits == 8) {
    _mm512_storeu_si512(codes, bytes);
  } else {  // each pair of bytes: low + 16 * high
    const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_maskz_cvtepi16_epi8(0xFFFFFFFFu, pairs));
  }
}

// Blocks whose peaks are found at once, and values that are encoded at once.
constexpr std::size_t kPeaks = 16, kEncoded = 64;

inline void peaks_at_once(const float* x, std::uint32_t* peaks) { peaks16(x, peaks); }

template <MinifloatFormat F, bool Saturate>
inline void encode_at_once(const float* x, float inverse, std::uint8_t* codes) {
  encode64<F, Saturate>(x, inverse, inverse, codes);
}

#elif defined(__AVX2__)

// code_of in 8 lanes.
template <MinifloatFormat F, bool Saturate>
inline __m256i codes_of(__m256 y) {
  using R = Rounding<F>;
  const auto all = [](std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); };
  const __m256i u = _mm256_castps_si256(y);
  __m256i a = _mm256_and_si256(u, all(0x7FFFFFFFu));
  if constexpr (Saturate) a = _mm256_min_epi32(a, all(Minifloat<F>::kLimit));
  const __m256i e = _mm256_max_epi32(_mm256_and_si256(a, all(0x7F800000u)), all(R::kLeast));
  const __m256 magic = _mm256_castsi256_ps(_mm256_add_epi32(e, all(R::kAdd)));
  const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(a), magic)),
                                       _mm256_srli_epi32(e, R::kDrop));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(u, 32 - Minifloat<F>::kBits), all(R::kSign));
  return _mm256_or_si256(_mm256_and_si256(sum, all(R::kCode)), sign);
}

constexpr std::size_t kPeaks = 8, kEncoded = 32;

// Find the largest magnitudes of 8 microscaling blocks.
inline void peaks_at_once(const float* x, std::uint32_t* peaks) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const auto larger = [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); };
  const auto at = [&](std::size_t i) {
    return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), magnitude);
  };
  __m256i v[8];
  for (std::size_t i = 0; i < 8; ++i) {
    prefetch_ahead(x + 32 * i, kMxBlock * sizeof(float));
    v[i] = larger(larger(at(32 * i), at(32 * i + 8)), larger(at(32 * i + 16), at(32 * i + 24)));
  }
  // Two vectors become one with half the lanes of each, until one has a lane of each block: within 128 bits
  // first, then across.
  for (int i = 0; i < 4; ++i)
    v[i] =
        larger(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    v[i] =
        larger(_mm256_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(peaks), larger(_mm256_permute2x128_si256(v[0], v[1], 0x20),
                                                                _mm256_permute2x128_si256(v[0], v[1], 0x31)));
}

// Encode 32 values; a factor of 0 makes codes of 0, for NaN too.
template <MinifloatFormat F, bool Saturate>
inline void encode_at_once(const float* x, float inverse, std::uint8_t* codes) {
  const __m256 f = _mm256_set1_ps(inverse);
  __m256i c[4];
  for (int i = 0; i < 4; ++i) c[i] = codes_of<F, Saturate>(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), f));
  // Packing works within 128 bits and leaves groups of four codes as a transposed 4 x 2 matrix.
  const __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(c[0], c[1]), _mm256_packus_epi32(c[2], c[3]));
  const __m256i used = _mm256_castps_si256(_mm256_cmp_ps(f, _mm256_setzero_ps(), _CMP_NEQ_OQ));
  const __m256i bytes =
      _mm256_and_si256(used, _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  if constexpr (Minifloat<F>::kBits == 8) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  } else {  // each pair of bytes: low + 16 * high
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                     _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  }
}

#endif

// Encode m values (N, if that is not 0) that share a scale. Saturate: values may be beyond the largest.
template <MinifloatFormat F, bool Saturate, std::size_t N>
void encode_values(const float* __restrict x, std::size_t m, float inverse, std::uint8_t* __restrict codes) {
  const std::size_t n = N ? N : m;
  std::size_t i = 0;
#if defined(__AVX2__)
  for (; i + kEncoded <= n; i += kEncoded)
    encode_at_once<F, Saturate>(x + i, inverse, codes + i / (8 / Minifloat<F>::kBits));
#endif
  if constexpr (Minifloat<F>::kBits == 8) {
    for (; i < n; ++i) codes[i] = static_cast<std::uint8_t>(code_of<F, Saturate>(x[i] * inverse));
  } else {
    while (i < n) {  // all codes first, in loops that the compiler vectorizes, then pairs of them
      const std::size_t len = N && N <= kMxBlock ? N : smaller(kMxBlock, n - i);
      std::uint8_t single[kMxBlock] = {};
      for (std::size_t j = 0; j < len; ++j)
        single[j] = static_cast<std::uint8_t>(code_of<F, Saturate>(x[i + j] * inverse));
      for (std::size_t j = 0; j < (len + 1) / 2; ++j)
        codes[i / 2 + j] = pack_nibbles(single[2 * j], single[2 * j + 1]);
      i += len;
    }
  }
}

// Find the largest magnitudes of whole microscaling blocks, as many as this instruction set takes at once;
// returns their number.
inline std::size_t peaks_mx(const float* x, std::size_t blocks, std::uint32_t* peaks) {
  std::size_t b = 0;
#if defined(__AVX2__)
  for (; b + kPeaks <= blocks; b += kPeaks) peaks_at_once(x + b * kMxBlock, peaks + b);
#else
  (void)x, (void)blocks, (void)peaks;
#endif
  return b;
}

// Encode whole microscaling blocks, as many as this instruction set takes at once; returns their number. A
// block with an inverse of 0 gets codes of 0.
template <MinifloatFormat F>
std::size_t encode_mx(const float* x, const float* inverse, std::size_t blocks, std::uint8_t* codes) {
  std::size_t b = 0;
#if defined(__AVX512F__)
  constexpr std::size_t kPair = 2 * kMxBlock;
  static_assert(kPair == 64);
  for (; b + 2 <= blocks; b += 2, x += kPair, codes += kPair / (8 / Minifloat<F>::kBits))
    encode64<F, true>(x, inverse[b], inverse[b + 1], codes);
#elif defined(__AVX2__)
  static_assert(kMxBlock == kEncoded);
  for (; b < blocks; ++b, x += kMxBlock, codes += kMxBlock / (8 / Minifloat<F>::kBits))
    encode_at_once<F, true>(x, inverse[b], codes);
#else
  (void)x, (void)inverse, (void)blocks, (void)codes;
#endif
  return b;
}

template <bool Add>
inline void put(float* out, float value) {
  if constexpr (Add)
    *out = quieted(*out + value);
  else
    *out = value;
}

#if defined(__AVX2__)

// Turn 16 codes of 8 bits into halves: E5M2 is the upper byte of a half, E4M3 has another bias, 7 for 15, so
// that its halves are too small by 2^8. Halves convert to float the same in all modes, denormal ones too.
template <MinifloatFormat F>
inline __m256i halves_of(const std::uint8_t* codes) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  if constexpr (F == kE5M2) return _mm256_slli_epi16(wide, 8);
  const __m256i half =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
  const __m256i most = _mm256_set1_epi16(0x7F);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(wide, most), most);
  return _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
}

#endif

#if defined(__AVX512F__)

// Decode 16 values.
template <MinifloatFormat F, bool Add>
inline void decode16(const std::uint8_t* codes, float scale, float* out) {
  __m512 v;
  if constexpr (F == kE2M1) {  // from a table; the permutation looks at the low 4 bits of each lane
    const __m512 table =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    std::int32_t low, high;
    std::memcpy(&low, codes, sizeof(low));
    std::memcpy(&high, codes + 4, sizeof(high));
    const __m512i words = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xFF00, high);
    const __m512i index = _mm512_maskz_srlv_epi32(0xFFFF, words, shifts);
    v = _mm512_maskz_permutexvar_ps(0xFFFF, index, table);
  } else {
    v = _mm512_maskz_cvtph_ps(0xFFFF, halves_of<F>(codes));
    if constexpr (F == kE4M3) v = _mm512_mul_ps(v, _mm512_set1_ps(256.0f));
  }
  v = _mm512_mul_ps(v, _mm512_set1_ps(scale));
  _mm512_storeu_ps(out, Add ? quieted(_mm512_add_ps(_mm512_loadu_ps(out), v)) : v);
}

#elif defined(__AVX2__)

template <MinifloatFormat F, bool Add>
inline void decode16(const std::uint8_t* codes, float scale, float* out) {
  __m256 v[2];
  if constexpr (F ==
                kE2M1) {  // magnitudes from a table; the permutation looks at the low 3 bits of each lane
    const __m256 table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int i = 0; i < 2; ++i) {
      std::int32_t packed;
      std::memcpy(&packed, codes + 4 * i, sizeof(packed));
      const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(packed), shifts);
      const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(index, 3), 31));
      v[i] = _mm256_or_ps(_mm256_permutevar8x32_ps(table, index), sign);
    }
  } else {
    const __m256i halves = halves_of<F>(codes);
    v[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    v[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
    if constexpr (F == kE4M3)
      for (__m256& half : v) half = _mm256_mul_ps(half, _mm256_set1_ps(256.0f));
  }
  for (int i = 0; i < 2; ++i) {
    float* const to = out + 8 * i;
    const __m256 value = _mm256_mul_ps(v[i], _mm256_set1_ps(scale));
    _mm256_storeu_ps(to, Add ? quieted(_mm256_add_ps(_mm256_loadu_ps(to), value)) : value);
  }
}

#endif

// The inverse: m values (N, if that is not 0) into `out`, or added to it.
template <MinifloatFormat F, std::size_t N, bool Add>
void decode_values(const std::uint8_t* __restrict codes, std::size_t m, float scale, float* __restrict out) {
  const std::size_t n = N ? N : m;
  std::size_t i = 0;
#if defined(__AVX2__)
  for (; i + 16 <= n; i += 16) decode16<F, Add>(codes + i / (8 / Minifloat<F>::kBits), scale, out + i);
#endif
  if constexpr (Minifloat<F>::kBits == 8) {
    for (; i < n; ++i) put<Add>(out + i, minifloat_value<F>(codes[i]) * scale);
  } else {
    for (; i < n; ++i) put<Add>(out + i, minifloat_value<F>(codes[i / 2] >> (i % 2 * 4)) * scale);
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
