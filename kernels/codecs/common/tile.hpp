// Helpers that the loops of every family share: tiles of the four floating-point types in their computing
// type.
#pragma once

#include <cstring>

#include "codecs/common/kernels.hpp"
#include "hybridcomp/arithmetic.hpp"

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kTile = 2048;  // elements converted at a time: 8 or 16 KiB, well inside L1

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Prefetch memory that a loop comes to later, after `ahead` bytes: the processor's own prefetching waits
// where the loop computes for long, after a mispredicted branch, and at the end of every page. The memory may
// be past the end of the data.
inline void prefetch_ahead(const void* p, std::size_t bytes = 64, std::size_t ahead = 2048) {
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(p) + ahead;
  for (std::size_t i = 0; i < bytes; i += 64) __builtin_prefetch(reinterpret_cast<const void*>(from + i));
}

template <typename T>
inline bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % alignof(T) == 0;
}

// For vectors as for single values.
using hybridcomp::quieted;
#if defined(__AVX512F__)
inline __m512 quieted(__m512 x) {
  const __m512i nan = _mm512_set1_epi32(static_cast<int>(Real<float>::kNan));
  return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_ps(nan));
}
inline __m512d quieted(__m512d x) {
  const __m512i nan = _mm512_set1_epi64(static_cast<long long>(Real<double>::kNan));
  return _mm512_mask_mov_pd(x, _mm512_cmp_pd_mask(x, x, _CMP_UNORD_Q), _mm512_castsi512_pd(nan));
}
#elif defined(__AVX2__)
inline __m256 quieted(__m256 x) {
  const __m256i nan = _mm256_set1_epi32(static_cast<int>(Real<float>::kNan));
  return _mm256_blendv_ps(x, _mm256_castsi256_ps(nan), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
#endif

inline void half_to_float(const std::uint16_t* src, float* dst, std::size_t n) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(dst + i, _mm512_maskz_cvtph_ps(
                                  0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
#endif
  for (; i < n; ++i) dst[i] = float_of(half_to_float_bits(src[i]));
}

inline void float_to_half(const float* src, std::uint16_t* dst, std::size_t n) {
  std::size_t i = 0;
#if defined(__F16C__)
  // The instruction keeps part of a NaN's payload: replace it, as float_to_half_bits does.
  const __m128i sign = _mm_set1_epi16(static_cast<short>(0x8000)), infinity = _mm_set1_epi16(0x7C00);
  const __m128i nan = _mm_set1_epi16(0x7E00);
  for (; i + 8 <= n; i += 8) {
    prefetch_ahead(src + i);
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT);
    const __m128i is_nan = _mm_cmpgt_epi16(_mm_andnot_si128(sign, h), infinity);
    const __m128i canonical = _mm_or_si128(_mm_and_si128(sign, h), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm_blendv_epi8(h, canonical, is_nan));
  }
#endif
  for (; i < n; ++i) dst[i] = float_to_half_bits(bits_of(src[i]));
}

inline void bfloat_to_float(const std::uint16_t* src, float* dst, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) dst[i] = float_of(bfloat_to_float_bits(src[i]));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// float_to_bfloat_bits in 8 lanes.
inline __m256i bfloats_of(__m256i f) {
  const __m256i high = _mm256_srli_epi32(f, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(f, _mm256_set1_epi32(0x7FFF)), odd), 16);
  const __m256i nan =
      _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)), _mm256_set1_epi32(0x7FC0));
  const __m256i is_nan = _mm256_cmpgt_epi32(_mm256_and_si256(f, _mm256_set1_epi32(0x7FFFFFFF)),
                                            _mm256_set1_epi32(Real<float>::kInfinity));
  return _mm256_blendv_epi8(rounded, nan, is_nan);
}
#endif

inline void float_to_bfloat(const float* src, std::uint16_t* dst, std::size_t n) {
  std::size_t i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    prefetch_ahead(src + i);
    const auto* from = reinterpret_cast<const __m256i*>(src + i);
    const __m256i mixed =
        _mm256_packus_epi32(bfloats_of(_mm256_loadu_si256(from)), bfloats_of(_mm256_loadu_si256(from + 1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_permute4x64_epi64(mixed, 0xD8));
  }
#endif
  for (; i < n; ++i) dst[i] = float_to_bfloat_bits(bits_of(src[i]));
}

// A dtype's storage type, the type T it is computed in, and its conversions.
template <DTypeCode D>
struct Element;

template <>
struct Element<kFloat32> {
  using Storage = float;
  using Compute = float;
};
template <>
struct Element<kFloat64> {
  using Storage = double;
  using Compute = double;
};
template <>
struct Element<kFloat16> {
  using Storage = std::uint16_t;
  using Compute = float;
};
template <>
struct Element<kBFloat16> {
  using Storage = std::uint16_t;
  using Compute = float;
};

template <DTypeCode D>
using StorageOf = typename Element<D>::Storage;
template <DTypeCode D>
using ComputeOf = typename Element<D>::Compute;

#if defined(__AVX512F__)
// Read sixteen elements of up to 32 bits as floats.
template <DTypeCode D>
inline __m512 floats_at(const std::uint8_t* src) {
  if constexpr (D == kFloat32) return _mm512_loadu_ps(src);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  if constexpr (D == kFloat16) return _mm512_maskz_cvtph_ps(0xFFFF, half);
  return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, _mm512_maskz_cvtepu16_epi32(0xFFFF, half), 16));
}
#endif

#if defined(__AVX2__)
// Read eight elements of up to 32 bits as floats.
template <DTypeCode D>
inline __m256 eight_floats_at(const std::uint8_t* src) {
  if constexpr (D == kFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(src));
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src));
  if constexpr (D == kFloat16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
#endif

// Return m <= kTile elements at `src` as values of their computing type: the memory itself where it can be
// used as it is, else `buffer`.
template <DTypeCode D>
const ComputeOf<D>* view(const std::uint8_t* src, std::size_t m, ComputeOf<D>* buffer) {
  if constexpr (D == kFloat32 || D == kFloat64) {
    if (aligned<StorageOf<D>>(src)) return reinterpret_cast<const StorageOf<D>*>(src);
    std::memcpy(buffer, src, m * sizeof(StorageOf<D>));
  } else {
    alignas(64) std::uint16_t copy[kTile];
    const std::uint16_t* storage = reinterpret_cast<const std::uint16_t*>(src);
    if (!aligned<std::uint16_t>(src)) {
      std::memcpy(copy, src, m * 2);
      storage = copy;
    }
    if constexpr (D == kFloat16)
      half_to_float(storage, buffer, m);
    else
      bfloat_to_float(storage, buffer, m);
  }
  return buffer;
}

// Write m <= kTile computed values to `dst` as elements of type D, rounding to nearest even once.
template <DTypeCode D, typename T>
void store(const T* src, std::uint8_t* dst, std::size_t m) {
  using S = StorageOf<D>;
  alignas(64) S copy[kTile];
  S* out = aligned<S>(dst) ? reinterpret_cast<S*>(dst) : copy;
  if constexpr (D == kFloat32 || D == kFloat64) {
    for (std::size_t i = 0; i < m; ++i) out[i] = static_cast<S>(src[i]);
  } else if constexpr (sizeof(T) == 8) {
    for (std::size_t i = 0; i < m; ++i) {
      const std::uint32_t odd = double_to_float_bits_odd(bits_of(src[i]));
      out[i] = D == kFloat16 ? float_to_half_bits(odd) : float_to_bfloat_bits(odd);
    }
  } else if constexpr (D == kFloat16) {
    float_to_half(src, out, m);
  } else {
    float_to_bfloat(src, out, m);
  }
  if (out == copy) std::memcpy(dst, copy, m * sizeof(S));
}

template <DTypeCode D, typename T>
void store_add(const T* src, std::uint8_t* dst, std::size_t m) {
  using S = StorageOf<D>;
  alignas(64) S copy[kTile];
  S* out = reinterpret_cast<S*>(dst);
  if (!aligned<S>(dst)) {
    std::memcpy(copy, dst, m * sizeof(S));
    out = copy;
  }
  for (std::size_t i = 0; i < m; ++i) out[i] = quieted(out[i] + static_cast<S>(src[i]));
  if (out == copy) std::memcpy(dst, copy, m * sizeof(S));
}

// Return the largest magnitude of m values (N, if that is not 0), as an integer.
template <typename T, std::size_t N>
typename Real<T>::Bits peak_of(const T* x, std::size_t m) {
  using Signed = typename Real<T>::Signed;  // magnitudes are positive; signed maxima are cheaper on old CPUs
  const std::size_t n = N ? N : m;
  Signed peak = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Signed a = static_cast<Signed>(magnitude(x[i]));
    peak = a > peak ? a : peak;
  }
  return static_cast<typename Real<T>::Bits>(peak);
}

// Calls f.template operator()<D>() for the dtype `code`.
template <typename F>
void with_dtype(DTypeCode code, F f) {
  switch (code) {
    case kFloat32:
      return f.template operator()<kFloat32>();
    case kFloat64:
      return f.template operator()<kFloat64>();
    case kFloat16:
      return f.template operator()<kFloat16>();
    case kBFloat16:
      return f.template operator()<kBFloat16>();
  }
}

// Write or add a tile of m computed values to elements at .. at + m of `out`. `add` only to kFloat32 or
// kFloat64.
template <typename T>
void put_tile(const T* values, std::size_t m, std::uint8_t* out, std::size_t at, DTypeCode out_dtype,
              bool add) {
  with_dtype(out_dtype, [&]<DTypeCode D>() {
    std::uint8_t* to = out + at * sizeof(StorageOf<D>);
    if constexpr (D == kFloat32 || D == kFloat64) {
      if (add) return store_add<D>(values, to, m);
    }
    store<D>(values, to, m);
  });
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
