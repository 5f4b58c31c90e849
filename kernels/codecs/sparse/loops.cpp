// Selecting elements by their magnitudes' bits; compiled once per instruction set.
#include "codecs/sparse/sparse.hpp"

#include <type_traits>

#include "codecs/common/tile.hpp"
#include "codecs/sparse/collect256.hpp"
#include "codecs/sparse/largest.hpp"

namespace hybridcomp::HC_ISA {
namespace {

// Call f(i) for the elements of a chunk of m whose magnitude is at least `low`, in order.
template <typename U, typename F>
void each_reaching(const U* x, std::size_t m, U low, F f) {
  if (m < kChunk) {
    for (std::size_t i = 0; i < m; ++i)
      if ((x[i] & Keys<U>::kMask) >= low) f(i);
    return;
  }
  if (none_reaches<U>(x, low)) return;
  std::uint8_t flags[kChunk];  // vectorized; then eight flags at a time, a step for each that is set
  for (std::size_t i = 0; i < kChunk; ++i) flags[i] = (x[i] & Keys<U>::kMask) >= low;
  for (std::size_t at = 0; at < kChunk; at += 8) {
    std::uint64_t set;
    std::memcpy(&set, flags + at, 8);
    for (; set; set &= set - 1) f(at + static_cast<std::size_t>(__builtin_ctzll(set)) / 8);
  }
}

// -- one element after another, or by chunks where most hold none ------------------------------------------

template <typename U>
std::size_t collect_rest(const std::uint8_t* src, std::size_t at, std::size_t m, const std::uint16_t* from,
                         Selection* selection, std::uint16_t* indices, U* values, std::size_t count) {
  const U all = static_cast<U>(selection->all);
  std::uint64_t ties = selection->ties;
  U buffer[kChunk];
  for (std::size_t start = at; start < m; start += kChunk) {
    const U low = ties ? static_cast<U>(selection->tie) : all;
    const std::size_t part = smaller(kChunk, m - start);
    const U* x = chunk_at<U>(src, start, part, buffer);
    each_reaching<U>(x, part, low, [&](std::size_t i) {
      if ((x[i] & Keys<U>::kMask) < all) {  // a tie
        if (!ties || (x[i] & Keys<U>::kMask) != low) return;
        --ties;
      }
      values[count] = x[i];
      indices[count++] = from ? from[start + i] : static_cast<std::uint16_t>(start + i);
    });
  }
  selection->ties = ties;
  return count;
}

template <typename U>
std::size_t below_rest(const std::uint8_t* src, std::size_t at, std::size_t n, U limit, U* values,
                       std::size_t count) {
  for (; at < n; ++at) {
    U x;
    std::memcpy(&x, src + at * sizeof(U), sizeof(U));
    values[count] = x;  // overwritten by the next if it is not one of them
    count += (x & Keys<U>::kMask) < limit;
  }
  return count;
}

#if defined(__AVX512F__)

// -- by vectors of 16 elements (8 of 64 bits), compressed in a register: as fast at any density -------------

template <typename U>
constexpr std::size_t kLanesOf = sizeof(U) == 8 ? 8 : 16;

// Elements of 16 bits are widened to 32.
template <typename U>
__m512i load(const std::uint8_t* src, std::size_t at) {
  const std::uint8_t* p = src + at * sizeof(U);
  if constexpr (sizeof(U) == 2)
    return _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  else
    return _mm512_loadu_si512(p);
}

template <typename U>
__m512i all_of(std::uint64_t value) {
  if constexpr (sizeof(U) == 8) return _mm512_set1_epi64(static_cast<long long>(value));
  return _mm512_set1_epi32(static_cast<int>(value));
}

template <typename U>
std::uint32_t at_least(__m512i keys, __m512i limit) {
  if constexpr (sizeof(U) == 8) return _mm512_cmpge_epu64_mask(keys, limit);
  return _mm512_cmpge_epu32_mask(keys, limit);
}

template <typename U>
std::uint32_t equal(__m512i keys, __m512i value) {
  if constexpr (sizeof(U) == 8) return _mm512_cmpeq_epi64_mask(keys, value);
  return _mm512_cmpeq_epi32_mask(keys, value);
}

// Write as many elements as a vector of the values has: memory after them may be input that is not read yet.
template <std::size_t kWide>
void put16(std::uint32_t mask, __m512i x, std::uint16_t* out) {
  const __m512i packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x);
  const __m256i halves = _mm512_maskz_cvtepi32_epi16(0xFFFF, packed);
  if constexpr (kWide == 16)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), halves);
  else
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_maskz_extracti64x2_epi64(3, halves, 0));
}

template <typename U>
void put_values(std::uint32_t mask, __m512i x, U* out) {
  if constexpr (sizeof(U) == 8)
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi64(static_cast<__mmask8>(mask), x));
  else if constexpr (sizeof(U) == 4)
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x));
  else
    put16<16>(mask, x, out);
}

template <typename U, bool kListed>
std::size_t collect(const std::uint8_t* src, std::size_t m, const std::uint16_t* from, Selection* selection,
                    std::uint16_t* indices, U* values) {
  constexpr std::size_t kWide = kLanesOf<U>;
  const __m512i magnitude = all_of<U>(Keys<U>::kMask);
  const __m512i all = all_of<U>(static_cast<U>(selection->all)), tie = all_of<U>(selection->tie);
  __m512i own = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i step = _mm512_set1_epi32(static_cast<int>(kWide));
  std::size_t at = 0, count = 0;
  const auto add = [&](std::uint32_t mask, __m512i x) {
    __m512i index = own;
    if constexpr (kListed && kWide == 16) {
      index = load<std::uint16_t>(reinterpret_cast<const std::uint8_t*>(from), at);
    } else if constexpr (kListed) {
      const __m128i list = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at));
      index = _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_zextsi128_si256(list));
    }
    put16<kWide>(mask, index, indices + count);
    put_values<U>(mask, x, values + count);
    count += static_cast<std::size_t>(__builtin_popcount(mask));
  };
  for (; selection->ties && at + kWide <= m; at += kWide) {
    const __m512i x = load<U>(src, at), keys = _mm512_and_si512(x, magnitude);
    std::uint32_t ties = equal<U>(keys, tie);
    if (static_cast<std::uint64_t>(__builtin_popcount(ties)) > selection->ties)
      ties = first_bits(ties, selection->ties);
    selection->ties -= static_cast<std::uint64_t>(__builtin_popcount(ties));
    add(at_least<U>(keys, all) | ties, x);
    own = _mm512_add_epi32(own, step);
  }
  for (; at + kWide <= m; at += kWide) {
    prefetch_ahead(src + at * sizeof(U));
    const __m512i x = load<U>(src, at);
    add(at_least<U>(_mm512_and_si512(x, magnitude), all), x);
    own = _mm512_add_epi32(own, step);
  }
  return collect_rest<U>(src, at, m, from, selection, indices, values, count);
}

template <typename U>
std::size_t below(const std::uint8_t* src, std::size_t n, U limit, U* values) {
  constexpr std::size_t kWide = kLanesOf<U>;
  const __m512i magnitude = all_of<U>(Keys<U>::kMask), high = all_of<U>(limit);
  std::size_t at = 0, count = 0;
  for (; at + kWide <= n; at += kWide) {
    const __m512i x = load<U>(src, at);
    const std::uint32_t mask = at_least<U>(_mm512_and_si512(x, magnitude), high) ^ ((1u << kWide) - 1);
    put_values<U>(mask, x, values + count);
    count += static_cast<std::size_t>(__builtin_popcount(mask));
  }
  return below_rest<U>(src, at, n, limit, values, count);
}

#else

template <typename U, bool kListed>
std::size_t collect(const std::uint8_t* src, std::size_t m, const std::uint16_t* from, Selection* selection,
                    std::uint16_t* indices, U* values) {
  std::size_t at = 0, count = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(U) < 8) {
    if (selection->ties)
      collect_chunks<U, kListed, true>(src, m, from, selection, indices, values, &at, &count);
    if (!selection->ties)
      collect_chunks<U, kListed, false>(src, m, from, selection, indices, values, &at, &count);
  }
#endif
  return collect_rest<U>(src, at, m, kListed ? from : nullptr, selection, indices, values, count);
}

template <typename U>
std::size_t below(const std::uint8_t* src, std::size_t n, U limit, U* values) {
  std::size_t at = 0, count = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(U) < 8) count = keep_eights<U>(src, n, limit, false, values, &at);
#endif
  return below_rest<U>(src, at, n, limit, values, count);
}

#endif

// -- bitmaps ------------------------------------------------------------------------------------------------

// Expand a bitmap byte by byte, eight elements each, from element `at` (a multiple of 8) on. T is an unsigned
// integer, or the type to add in.
template <typename T, bool kAdd>
void expand_rest(const std::uint8_t* bitmap, std::size_t at, std::size_t m, const std::uint8_t* values,
                 std::uint8_t* out) {
  for (; at < m; at += 8) {
    std::uint8_t* const place = out + at * sizeof(T);
    if constexpr (!kAdd) std::memset(place, 0, smaller(8, m - at) * sizeof(T));
    for (std::uint32_t bits = bitmap[at / 8]; bits; bits &= bits - 1, values += sizeof(T)) {
      std::uint8_t* const element = place + static_cast<std::size_t>(__builtin_ctz(bits)) * sizeof(T);
      T value;
      std::memcpy(&value, values, sizeof(T));
      if constexpr (kAdd) {
        T sum;
        std::memcpy(&sum, element, sizeof(T));
        value = quieted(sum + value);
      }
      std::memcpy(element, &value, sizeof(T));
    }
  }
}

template <typename T, bool kAdd>
void expand(const std::uint8_t* bitmap, std::size_t m, const std::uint8_t* values, std::size_t count,
            std::uint8_t* out) {
  std::size_t at = 0;
#if defined(__AVX512F__)
  using U = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                               std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
  constexpr std::size_t kWide = kLanesOf<U>;
  std::size_t used = 0;
  // This runs as long as a whole vector of values is left to read.
  for (; at + kWide <= m && used + kWide <= count; at += kWide) {
    std::uint16_t mask = 0;
    std::memcpy(&mask, bitmap + at / 8, kWide / 8);
    const __m512i packed = load<U>(values, used);
    const __m512i spread = kWide == 8 ? _mm512_maskz_expand_epi64(static_cast<__mmask8>(mask), packed)
                                      : _mm512_maskz_expand_epi32(mask, packed);
    std::uint8_t* const place = out + at * sizeof(T);
    if constexpr (kAdd && kWide == 8) {
      const __m512d sum = _mm512_loadu_pd(place);
      const __m512d added = quieted(_mm512_add_pd(sum, _mm512_castsi512_pd(spread)));
      _mm512_storeu_pd(place, _mm512_mask_mov_pd(sum, static_cast<__mmask8>(mask), added));
    } else if constexpr (kAdd) {
      const __m512 sum = _mm512_loadu_ps(place);
      const __m512 added = quieted(_mm512_add_ps(sum, _mm512_castsi512_ps(spread)));
      _mm512_storeu_ps(place, _mm512_mask_mov_ps(sum, mask, added));
    } else if constexpr (sizeof(T) == 2) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), _mm512_maskz_cvtepi32_epi16(0xFFFF, spread));
    } else {
      _mm512_storeu_si512(place, spread);
    }
    used += static_cast<std::size_t>(__builtin_popcount(mask));
  }
  values += used * sizeof(T);
#else
  static_cast<void>(count);
#endif
  expand_rest<T, kAdd>(bitmap, at, m, values, out);
}

void sparse_expand(const std::uint8_t* bitmap, std::size_t m, const void* values, std::size_t count,
                   DTypeCode dtype, void* out, bool add) {
  const auto* from = static_cast<const std::uint8_t*>(values);
  auto* to = static_cast<std::uint8_t*>(out);
  if (add && dtype == kFloat64)
    expand<double, true>(bitmap, m, from, count, to);
  else if (add)
    expand<float, true>(bitmap, m, from, count, to);
  else if (dtype == kFloat64)
    expand<std::uint64_t, false>(bitmap, m, from, count, to);
  else if (dtype == kFloat32)
    expand<std::uint32_t, false>(bitmap, m, from, count, to);
  else
    expand<std::uint16_t, false>(bitmap, m, from, count, to);
}

// Call f with a zero of the integer type that stores `dtype`.
template <typename F>
auto with_integer(DTypeCode dtype, F f) {
  if (dtype == kFloat32) return f(std::uint32_t(0));
  if (dtype == kFloat64) return f(std::uint64_t(0));
  return f(std::uint16_t(0));
}

Selection sparse_largest(const void* src, DTypeCode dtype, std::size_t n, std::size_t k) {
  return with_integer(
      dtype, [&]<typename U>(U) { return largest_of<U>(static_cast<const std::uint8_t*>(src), n, k); });
}

std::size_t sparse_collect(const void* src, DTypeCode dtype, std::size_t m, const std::uint16_t* from,
                           Selection* selection, std::uint16_t* indices, void* values) {
  return with_integer(dtype, [&]<typename U>(U) {
    const auto* bytes = static_cast<const std::uint8_t*>(src);
    U* out = static_cast<U*>(values);
    return from ? collect<U, true>(bytes, m, from, selection, indices, out)
                : collect<U, false>(bytes, m, from, selection, indices, out);
  });
}

std::size_t sparse_below(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t limit, void* values) {
  return with_integer(dtype, [&]<typename U>(U) {
    return below<U>(static_cast<const std::uint8_t*>(src), n, static_cast<U>(limit), static_cast<U*>(values));
  });
}

}  // namespace

extern const SparseKernels sparse_kernels;
const SparseKernels sparse_kernels = {sparse_largest, sparse_collect, sparse_below, sparse_expand};

}  // namespace hybridcomp::HC_ISA
