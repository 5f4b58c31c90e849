// Sums over a tensor or its sample, in a fixed order; compiled once per instruction set.
#include "codecs/sparse/fit.hpp"

#include "codecs/common/tile.hpp"
#include "hybridcomp/sparse.hpp"

namespace hybridcomp::HC_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)

// Sixteen sums in double: lanes 4 i to 4 i + 3 in part[i].
struct LaneSums {
  __m256d part[4];
  explicit LaneSums(const double* lanes) {
    for (int i = 0; i < 4; ++i) part[i] = _mm256_loadu_pd(lanes + 4 * i);
  }
  void store(double* lanes) const {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(lanes + 4 * i, part[i]);
  }
  // Add f of eight floats, as doubles, to the lower (half 0) or the upper lanes.
  template <typename F>
  void add(int half, __m256i floats, F f) {
    const __m256 x = _mm256_castsi256_ps(floats);
    __m256d* const p = part + 2 * half;
    p[0] = _mm256_add_pd(p[0], f(_mm256_cvtps_pd(_mm256_castps256_ps128(x))));
    p[1] = _mm256_add_pd(p[1], f(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))));
  }
};

inline std::size_t set_lanes(__m256i x) {
  return static_cast<std::size_t>(
      __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(x)))));
}

// Do add_tail for whole groups of kLanes elements; returns how many elements they are. Keys are positive as
// signed integers, which AVX2 compares.
inline std::size_t add_tail_groups(const std::uint32_t* keys, std::size_t n, std::uint32_t limit,
                                   double* lanes, std::size_t* count) {
  const std::uint32_t most = 0x7FFFFFFFu;  // no key reaches a limit beyond it
  const __m256i low = _mm256_set1_epi32(static_cast<int>(limit > most ? most : limit - 1));
  const __m256i tiny = _mm256_set1_epi32(Real<float>::kSmallest - 1);
  LaneSums sums(lanes);
  std::size_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
#pragma GCC unroll 2  // the sums stay in registers
    for (int half = 0; half < 2; ++half) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + at + 8 * half));
      const __m256i reach = _mm256_cmpgt_epi32(x, low);
      *count += set_lanes(reach);
      sums.add(half, _mm256_and_si256(_mm256_and_si256(x, reach), _mm256_cmpgt_epi32(x, tiny)),
               [](__m256d y) { return y; });
    }
  }
  sums.store(lanes);
  return at;
}

#endif

// Count the elements i with keys[i] >= limit and add their magnitudes to the lanes. Vectorized by lanes.
template <typename U>
std::size_t add_tail(const U* keys, std::size_t n, U limit, double* lanes) {
  std::size_t count = 0;
  std::size_t at = 0;
#if defined(__AVX512F__)
  __m512d low = _mm512_loadu_pd(lanes), high = _mm512_loadu_pd(lanes + 8);
  for (; at + kLanes <= n; at += kLanes) {
    if constexpr (sizeof(U) == 4) {
      const __m512i x = _mm512_loadu_si512(keys + at);
      const __mmask16 reach = _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32(static_cast<int>(limit)));
      const __mmask16 large =
          _mm512_mask_cmpge_epu32_mask(reach, x, _mm512_set1_epi32(Real<float>::kSmallest));
      const __m512 kept = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(large, x));
      low = _mm512_add_pd(low, _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, kept, 0)));
      high = _mm512_add_pd(high, _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, kept, 1)));
      count += static_cast<std::size_t>(__builtin_popcount(reach));
    } else {
      double kept[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const U x = keys[at + static_cast<std::size_t>(i)];
        kept[i] = x >= limit ? summand(x) : 0.0;
        count += x >= limit;
      }
      low = _mm512_add_pd(low, _mm512_loadu_pd(kept));
      high = _mm512_add_pd(high, _mm512_loadu_pd(kept + 8));
    }
  }
  _mm512_storeu_pd(lanes, low);
  _mm512_storeu_pd(lanes + 8, high);
#elif defined(__AVX2__)
  if constexpr (sizeof(U) == 4) at = add_tail_groups(keys, n, limit, lanes, &count);
#endif
  for (; at + kLanes <= n; at += kLanes)
    for (int i = 0; i < kLanes; ++i) {
      const U x = keys[at + static_cast<std::size_t>(i)];
      lanes[i] += x >= limit ? summand(x) : 0.0;
      count += x >= limit;
    }
  for (std::size_t i = 0; at < n; ++at, ++i) {
    lanes[i] += keys[at] >= limit ? summand(keys[at]) : 0.0;
    count += keys[at] >= limit;
  }
  return count;
}

std::size_t fit_tail(const void* keys, bool wide, std::size_t n, std::uint64_t limit, double* sum) {
  double lanes[kLanes] = {};
  const std::size_t count =
      wide ? add_tail(static_cast<const std::uint64_t*>(keys), n, limit, lanes)
           : add_tail(static_cast<const std::uint32_t*>(keys), n, static_cast<std::uint32_t>(limit), lanes);
  *sum = sum_of_lanes(lanes);
  return count;
}

template <typename U>
double tail_squares(const U* keys, std::size_t n, U limit) {
  double lanes[kLanes] = {};
  for (std::size_t at = 0; at < n; at += kLanes) {
    const std::size_t part = smaller(static_cast<std::size_t>(kLanes), n - at);
    for (std::size_t i = 0; i < part; ++i) {
      const double x = keys[at + i] >= limit ? summand(keys[at + i]) : 0.0;
      lanes[i] += x * x;
    }
  }
  return sum_of_lanes(lanes);
}

double fit_tail_squares(const void* keys, bool wide, std::size_t n, std::uint64_t limit) {
  return wide ? tail_squares(static_cast<const std::uint64_t*>(keys), n, limit)
              : tail_squares(static_cast<const std::uint32_t*>(keys), n, static_cast<std::uint32_t>(limit));
}

// Write the keys of n values, zero where they are not finite; returns how many are not.
template <typename T>
inline std::size_t finite_keys(const T* x, std::size_t n, typename Real<T>::Bits* keys) {
  typename Real<T>::Bits others = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto key = magnitude(x[i]);
    const bool finite = key < Real<T>::kInfinity;
    keys[i] = finite ? key : 0;
    others += !finite;
  }
  return others;
}

// The same for m <= kTile elements.
template <DTypeCode D>
std::size_t finite_keys_of(const std::uint8_t* src, std::size_t m, typename Real<ComputeOf<D>>::Bits* keys) {
  ComputeOf<D> buffer[kTile];
  return finite_keys(view<D>(src, m, buffer), m, keys);
}

#if defined(__AVX512F__)

// Add the squares of all whole groups of kLanes elements to the lanes, count elements that are not finite;
// return the number of elements in the groups. Values stay in registers from load to sum: this is as fast as
// memory is read.
template <DTypeCode D>
std::size_t add_squares(const std::uint8_t* src, std::size_t n, double* lanes, std::size_t* others) {
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  const __m512i infinity = _mm512_set1_epi32(Real<float>::kInfinity);
  const __m512i smallest = _mm512_set1_epi32(Real<float>::kSmallest);
  const __m512i usual = _mm512_sub_epi32(infinity, smallest);  // keys from the smallest on that are finite
  __m512d low = _mm512_loadu_pd(lanes), high = _mm512_loadu_pd(lanes + 8);
  std::size_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    prefetch_ahead(src + at * sizeof(StorageOf<D>));
    const __m512i bits = _mm512_castps_si512(floats_at<D>(src + at * sizeof(StorageOf<D>)));
    const __m512i key = _mm512_and_si512(bits, magnitude);
    const __mmask16 kept = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(key, smallest), usual);
    if (kept != 0xFFFF) [[unlikely]]
      *others += static_cast<std::size_t>(
          __builtin_popcount(static_cast<unsigned>(_mm512_cmpge_epu32_mask(key, infinity))));
    const __m512 x = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(kept, key));
    const __m512d a = _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, x, 0));
    const __m512d b = _mm512_maskz_cvtps_pd(0xFF, _mm512_maskz_extractf32x8_ps(0xFF, x, 1));
    low = _mm512_add_pd(low, _mm512_mul_pd(a, a));
    high = _mm512_add_pd(high, _mm512_mul_pd(b, b));
  }
  _mm512_storeu_pd(lanes, low);
  _mm512_storeu_pd(lanes + 8, high);
  return at;
}

#elif defined(__AVX2__)

// The same by eight elements; keys are compared as signed integers, since they are positive.
template <DTypeCode D>
std::size_t add_squares(const std::uint8_t* src, std::size_t n, double* lanes, std::size_t* others) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i infinity = _mm256_set1_epi32(Real<float>::kInfinity);
  const __m256i tiny = _mm256_set1_epi32(Real<float>::kSmallest - 1);
  LaneSums sums(lanes);
  std::size_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    prefetch_ahead(src + at * sizeof(StorageOf<D>));
#pragma GCC unroll 2  // the sums stay in registers
    for (int half = 0; half < 2; ++half) {
      const std::uint8_t* const from = src + (at + 8 * static_cast<std::size_t>(half)) * sizeof(StorageOf<D>);
      const __m256i key = _mm256_and_si256(_mm256_castps_si256(eight_floats_at<D>(from)), magnitude);
      const __m256i finite = _mm256_cmpgt_epi32(infinity, key);
      const std::size_t count = set_lanes(finite);
      if (count != 8) [[unlikely]]
        *others += 8 - count;
      sums.add(half, _mm256_and_si256(_mm256_and_si256(key, finite), _mm256_cmpgt_epi32(key, tiny)),
               [](__m256d y) { return _mm256_mul_pd(y, y); });
    }
  }
  sums.store(lanes);
  return at;
}

#endif

double fit_squares(const void* src, DTypeCode dtype, std::size_t n, std::size_t* not_finite) {
  double lanes[kLanes] = {};
  std::size_t others = 0;
  with_dtype(dtype, [&]<DTypeCode D>() {
    using Bits = typename Real<ComputeOf<D>>::Bits;
    const auto* from = static_cast<const std::uint8_t*>(src);
    Bits keys[kTile];
    std::size_t at = 0;
#if defined(__AVX2__)
    if constexpr (D != kFloat64) at = add_squares<D>(from, n, lanes, &others);
#endif
    for (; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      others += finite_keys_of<D>(from + at * size_of(D), m, keys);
      for (std::size_t i = m; i % kLanes; ++i) keys[i] = 0;
      for (std::size_t i = 0; i < m; i += kLanes)
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
          const double value = summand(keys[i + lane]);
          lanes[lane] += value * value;
        }
    }
  });
  *not_finite = others;
  return sum_of_lanes(lanes);
}

std::size_t fit_sample(const void* src, DTypeCode dtype, std::size_t n, std::size_t groups, void* keys) {
  std::size_t others = 0;
  with_dtype(dtype, [&]<DTypeCode D>() {
    const auto* from = static_cast<const std::uint8_t*>(src);
    auto* to = static_cast<typename Real<ComputeOf<D>>::Bits*>(keys);
    if (!groups)
      for (std::size_t at = 0; at < n; at += kTile)
        others += finite_keys_of<D>(from + at * size_of(D), smaller(kTile, n - at), to + at);
    constexpr std::size_t kGroups = kTile / kGroupOfSample;
    constexpr std::size_t kAhead = 32;  // groups; hardware prefetchers cannot foresee their places
    StorageOf<D> picked[kTile];
    for (std::size_t g = 0; g < groups; g += kGroups) {
      const std::size_t part = smaller(kGroups, groups - g);
      for (std::size_t i = 0; i < part; ++i) {
        if (g + i + kAhead < groups)
          __builtin_prefetch(from + group_start(g + i + kAhead, groups, n) * size_of(D));
        std::memcpy(picked + i * kGroupOfSample, from + group_start(g + i, groups, n) * size_of(D),
                    kGroupOfSample * size_of(D));
      }
      others += finite_keys_of<D>(reinterpret_cast<const std::uint8_t*>(picked), part * kGroupOfSample,
                                  to + g * kGroupOfSample);
    }
  });
  return others;
}

template <typename U>
std::size_t reaching(const U* x, std::size_t n, U limit) {
  constexpr U kMask = static_cast<U>(~U(0)) >> 1;
  std::size_t total = 0;
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t end = at + smaller(kTile, n - at);
    U count = 0;  // a count of the elements' own width vectorizes
    for (std::size_t i = at; i < end; ++i) count += (x[i] & kMask) >= limit;
    total += count;
  }
  return total;
}

std::size_t fit_reaching(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t limit) {
  if (dtype == kFloat64) return reaching(static_cast<const std::uint64_t*>(src), n, limit);
  if (dtype == kFloat32)
    return reaching(static_cast<const std::uint32_t*>(src), n, static_cast<std::uint32_t>(limit));
  return reaching(static_cast<const std::uint16_t*>(src), n, static_cast<std::uint16_t>(limit));
}

}  // namespace

extern const FitKernels fit_kernels;
const FitKernels fit_kernels = {fit_squares, fit_sample, fit_tail, fit_tail_squares, fit_reaching};

}  // namespace hybridcomp::HC_ISA
