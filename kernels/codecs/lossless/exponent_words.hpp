// Blocks of words of codec `exponent` taken apart into exponents and the bits beside them, and put together.
#pragma once

#include <type_traits>

#include "codecs/lossless/exponent_fields.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kB = kExponentBlock;

template <DTypeCode D>
using ExponentOf = std::conditional_t<D == kFloat64, std::uint16_t, std::uint8_t>;

// Memory of any alignment as words. `auto` would lose the alignment.
typedef std::uint16_t Loose16 __attribute__((aligned(1), may_alias));
typedef std::uint32_t Loose32 __attribute__((aligned(1), may_alias));
typedef std::uint64_t Loose64 __attribute__((aligned(1), may_alias));

// Write the top halves of a block, rotated, to `turned`; the bits below them go to `low`.
template <DTypeCode D>
inline void split_halves(const std::uint8_t* src, std::uint16_t* __restrict turned,
                         std::uint8_t* __restrict low) {
  if constexpr (D == kFloat32) {
    const Loose32* words = reinterpret_cast<const Loose32*>(src);
    Loose16* below = reinterpret_cast<Loose16*>(low);
    for (std::size_t i = 0; i < kB; ++i) {
      below[i] = static_cast<std::uint16_t>(words[i]);
      turned[i] = static_cast<std::uint16_t>(words[i] >> 16);
    }
    for (std::size_t i = 0; i < kB; ++i) turned[i] = exponent_rotated(turned[i]);
  } else if constexpr (D == kFloat64) {
    const Loose64* words = reinterpret_cast<const Loose64*>(src);
    Loose32* below = reinterpret_cast<Loose32*>(low);
    Loose16* middle = reinterpret_cast<Loose16*>(low + 4 * kB);
    for (std::size_t i = 0; i < kB; ++i) {
      below[i] = static_cast<std::uint32_t>(words[i]);
      middle[i] = static_cast<std::uint16_t>(words[i] >> 32);
      turned[i] = exponent_rotated(static_cast<std::uint16_t>(words[i] >> 48));
    }
  } else {
    const Loose16* words = reinterpret_cast<const Loose16*>(src);
    for (std::size_t i = 0; i < kB; ++i) turned[i] = exponent_rotated(words[i]);
  }
}

// The inverse.
template <DTypeCode D>
inline void join_halves(const std::uint16_t* __restrict turned, const std::uint8_t* low,
                        std::uint8_t* __restrict out) {
  if constexpr (D == kFloat32) {
    const Loose16* below = reinterpret_cast<const Loose16*>(low);
    Loose32* words = reinterpret_cast<Loose32*>(out);
    for (std::size_t i = 0; i < kB; ++i)
      words[i] = static_cast<std::uint32_t>(exponent_rotated_back(turned[i])) << 16 | below[i];
  } else if constexpr (D == kFloat64) {
    const Loose32* below = reinterpret_cast<const Loose32*>(low);
    const Loose16* middle = reinterpret_cast<const Loose16*>(low + 4 * kB);
    Loose64* words = reinterpret_cast<Loose64*>(out);
    for (std::size_t i = 0; i < kB; ++i)
      words[i] = static_cast<std::uint64_t>(exponent_rotated_back(turned[i])) << 48 |
                 static_cast<std::uint64_t>(middle[i]) << 32 | below[i];
  } else {
    Loose16* words = reinterpret_cast<Loose16*>(out);
    for (std::size_t i = 0; i < kB; ++i) words[i] = exponent_rotated_back(turned[i]);
  }
}

#if defined(__AVX2__)

// The two types whose exponent is a byte, 32 elements at a time. Packing and unpacking go by lanes of 16
// bytes: the permutations make up for that.

inline __m256i load256(const std::uint8_t* at) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}
inline void store256(std::uint8_t* at, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }
inline __m256i rotate256(__m256i x) {
  return _mm256_or_si256(_mm256_slli_epi16(x, 1), _mm256_srli_epi16(x, 15));
}
inline __m256i rotate_back256(__m256i x) {
  return _mm256_or_si256(_mm256_srli_epi16(x, 1), _mm256_slli_epi16(x, 15));
}

template <DTypeCode D>
inline __m256i in_order(__m256i bytes) {
  if constexpr (D == kFloat32)
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  else
    return _mm256_permute4x64_epi64(bytes, 0xD8);
}
template <DTypeCode D>
inline __m256i by_lanes(__m256i bytes) {
  if constexpr (D == kFloat32)
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  else
    return _mm256_permute4x64_epi64(bytes, 0xD8);
}

// Return the top halves of 16 floats; the lower ones go to `low`.
inline __m256i top_halves(const std::uint8_t* src, std::uint8_t* low) {
  const __m256i a = load256(src), b = load256(src + 32), zero = _mm256_setzero_si256();
  const __m256i below =
      _mm256_packus_epi32(_mm256_blend_epi16(a, zero, 0xAA), _mm256_blend_epi16(b, zero, 0xAA));
  store256(low, _mm256_permute4x64_epi64(below, 0xD8));
  return _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}
inline void put_halves(__m256i top, const std::uint8_t* low, std::uint8_t* out) {
  const __m256i below = _mm256_permute4x64_epi64(load256(low), 0xD8);
  store256(out, _mm256_unpacklo_epi16(below, top));
  store256(out + 32, _mm256_unpackhi_epi16(below, top));
}

template <DTypeCode D>
inline void split_bytes_of(const std::uint8_t* src, std::uint8_t* exponents, std::uint8_t* data) {
  const __m256i mask = _mm256_set1_epi16(255);
  for (std::size_t i = 0; i < kB; i += 32) {
    __m256i a, b;
    if constexpr (D == kFloat32) {
      a = top_halves(src + 4 * i, data + kB + 2 * i);
      b = top_halves(src + 4 * i + 64, data + kB + 2 * i + 32);
    } else {
      a = load256(src + 2 * i);
      b = load256(src + 2 * i + 32);
    }
    a = rotate256(a);
    b = rotate256(b);
    store256(exponents + i,
             in_order<D>(_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8))));
    store256(data + i,
             in_order<D>(_mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask))));
  }
}

template <DTypeCode D>
inline void join_bytes_of(const std::uint8_t* exponents, const std::uint8_t* data, std::uint8_t* out) {
  for (std::size_t i = 0; i < kB; i += 32) {
    const __m256i high = by_lanes<D>(load256(exponents + i)), rest = by_lanes<D>(load256(data + i));
    const __m256i a = rotate_back256(_mm256_unpacklo_epi8(rest, high));
    const __m256i b = rotate_back256(_mm256_unpackhi_epi8(rest, high));
    if constexpr (D == kFloat32) {
      put_halves(a, data + kB + 2 * i, out + 4 * i);
      put_halves(b, data + kB + 2 * i + 32, out + 4 * i + 64);
    } else {
      store256(out + 2 * i, a);
      store256(out + 2 * i + 32, b);
    }
  }
}

#endif

// Take a block apart: write its exponents, and all other bits to where they begin the block's data.
template <DTypeCode D>
inline void split_block(const std::uint8_t* src, ExponentOf<D>* __restrict exponents,
                        std::uint8_t* __restrict data) {
  constexpr int kRest = exponent_rest_bits(D);
#if defined(__AVX2__)
  if constexpr (kRest == 8) return split_bytes_of<D>(src, exponents, data);
#endif
  alignas(64) std::uint16_t turned[kB];
  alignas(64) std::uint8_t part[kB];
  split_halves<D>(src, turned, data + kB / 8 * kRest);
  for (std::size_t i = 0; i < kB; ++i) exponents[i] = static_cast<ExponentOf<D>>(turned[i] >> kRest);
  if constexpr (kRest >= 8) {
    for (std::size_t i = 0; i < kB; ++i) data[i] = static_cast<std::uint8_t>(turned[i]);
    if constexpr (kRest > 8) {
      for (std::size_t i = 0; i < kB; ++i) part[i] = static_cast<std::uint8_t>(turned[i] >> 8 & 7);
      pack_fields<kRest - 8>(part, data + kB);
    }
  } else {
    for (std::size_t i = 0; i < kB; ++i) part[i] = static_cast<std::uint8_t>(turned[i] & 15);
    pack_fields<4>(part, data);
    for (std::size_t i = 0; i < kB; ++i) part[i] = static_cast<std::uint8_t>(turned[i] >> 4 & 1);
    pack_fields<1>(part, data + kB / 2);
  }
}

// The inverse; bits of exponents that the type does not have are dropped.
template <DTypeCode D>
inline void join_block(const ExponentOf<D>* exponents, const std::uint8_t* data, std::uint8_t* out) {
  constexpr int kRest = exponent_rest_bits(D);
#if defined(__AVX2__)
  if constexpr (kRest == 8) return join_bytes_of<D>(exponents, data, out);
#endif
  alignas(64) std::uint16_t turned[kB];
  alignas(64) std::uint8_t part[kB];
  if constexpr (kRest == 8) {
    for (std::size_t i = 0; i < kB; ++i) turned[i] = static_cast<std::uint16_t>(exponents[i] << 8 | data[i]);
  } else if constexpr (kRest > 8) {
    unpack_fields<kRest - 8>(data + kB, part);
    for (std::size_t i = 0; i < kB; ++i)
      turned[i] = static_cast<std::uint16_t>(exponents[i] << kRest | part[i] << 8 | data[i]);
  } else {
    alignas(64) std::uint8_t fifth[kB];
    unpack_fields<4>(data, part);
    unpack_fields<1>(data + kB / 2, fifth);
    for (std::size_t i = 0; i < kB; ++i)
      turned[i] = static_cast<std::uint16_t>(exponents[i] << kRest | fifth[i] << 4 | part[i]);
  }
  join_halves<D>(turned, data + kB / 8 * kRest, out);
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
