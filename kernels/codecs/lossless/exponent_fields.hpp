// Fields of 1, 3 and 4 bits of a block of codec `exponent`, packed in rows and taken apart, and where among
// them a value is. Rows are handled as words of 8 bytes: no field leaves its byte.
#pragma once

#include <cstdint>
#include <cstring>

#include "hybridcomp/exponent.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::uint64_t each_byte(std::uint64_t value) { return value * 0x0101010101010101ull; }

// Word j of row k.
typedef std::uint64_t RowWord __attribute__((aligned(1), may_alias));
inline const RowWord& word(const std::uint8_t* rows, std::size_t k, std::size_t j) {
  return reinterpret_cast<const RowWord*>(rows + k * kExponentRow)[j];
}
inline RowWord& word(std::uint8_t* rows, std::size_t k, std::size_t j) {
  return reinterpret_cast<RowWord*>(rows + k * kExponentRow)[j];
}

// `fields` are 256 bytes, each below 2^Bits.
template <int Bits>
inline void pack_fields(const std::uint8_t* __restrict fields, std::uint8_t* __restrict rows) {
  for (std::size_t j = 0; j < kExponentRow / 8; ++j) {
    const std::uint64_t f0 = word(fields, 0, j), f1 = word(fields, 1, j), f2 = word(fields, 2, j);
    const std::uint64_t f3 = word(fields, 3, j), f4 = word(fields, 4, j), f5 = word(fields, 5, j);
    const std::uint64_t f6 = word(fields, 6, j), f7 = word(fields, 7, j);
    if constexpr (Bits == 1) {
      word(rows, 0, j) = f0 | f1 << 1 | f2 << 2 | f3 << 3 | f4 << 4 | f5 << 5 | f6 << 6 | f7 << 7;
    } else if constexpr (Bits == 3) {
      word(rows, 0, j) = f0 | f1 << 3 | (f6 & each_byte(3)) << 6;
      word(rows, 1, j) = f2 | f3 << 3 | (f7 & each_byte(3)) << 6;
      word(rows, 2, j) = f4 | f5 << 3 | (f6 & each_byte(4)) << 4 | (f7 & each_byte(4)) << 5;
    } else {
      word(rows, 0, j) = f0 | f1 << 4;
      word(rows, 1, j) = f2 | f3 << 4;
      word(rows, 2, j) = f4 | f5 << 4;
      word(rows, 3, j) = f6 | f7 << 4;
    }
  }
}

template <int Bits>
inline void unpack_fields(const std::uint8_t* __restrict rows, std::uint8_t* __restrict fields) {
  for (std::size_t j = 0; j < kExponentRow / 8; ++j) {
    if constexpr (Bits == 1) {
      const std::uint64_t r = word(rows, 0, j);
      for (std::size_t k = 0; k < 8; ++k) word(fields, k, j) = r >> k & each_byte(1);
    } else if constexpr (Bits == 3) {
      const std::uint64_t r0 = word(rows, 0, j), r1 = word(rows, 1, j), r2 = word(rows, 2, j);
      word(fields, 0, j) = r0 & each_byte(7);
      word(fields, 1, j) = r0 >> 3 & each_byte(7);
      word(fields, 2, j) = r1 & each_byte(7);
      word(fields, 3, j) = r1 >> 3 & each_byte(7);
      word(fields, 4, j) = r2 & each_byte(7);
      word(fields, 5, j) = r2 >> 3 & each_byte(7);
      word(fields, 6, j) = (r0 >> 6 & each_byte(3)) | (r2 >> 4 & each_byte(4));
      word(fields, 7, j) = (r1 >> 6 & each_byte(3)) | (r2 >> 5 & each_byte(4));
    } else {
      for (std::size_t k = 0; k < 4; ++k) {
        const std::uint64_t r = word(rows, k, j);
        word(fields, 2 * k, j) = r & each_byte(15);
        word(fields, 2 * k + 1, j) = r >> 4 & each_byte(15);
      }
    }
  }
}

// Return a mask of 64 bits: bit i is set if byte i is `value`. All bytes are below 128.
inline std::uint64_t equal_mask(const std::uint8_t* bytes, std::uint8_t value) {
#if defined(__AVX2__)  // with AVX-512 too: a longer load would wait for two stores
  const __m256i v = _mm256_set1_epi8(static_cast<char>(value));
  const auto* at = reinterpret_cast<const __m256i*>(bytes);
  const auto low =
      static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at), v)));
  const auto high =
      static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at + 1), v)));
  return low | static_cast<std::uint64_t>(high) << 32;
#else
  std::uint64_t mask = 0;
  for (int i = 0; i < 8; ++i) {
    std::uint64_t x;
    std::memcpy(&x, bytes + 8 * i, 8);
    x ^= each_byte(value);
    x = (each_byte(128) - x) & each_byte(128);  // 128 where the byte was `value`: the others are 1 .. 127
    mask |= ((x >> 7) * 0x0102040810204080ull >> 56) << (8 * i);
  }
  return mask;
#endif
}

// Mask of a block's fields that have a given value.
struct Places {
  std::uint64_t mask[kExponentBlock / 64];

  Places(const std::uint8_t* fields, std::uint8_t value) {
    for (std::size_t k = 0; k < kExponentBlock / 64; ++k) mask[k] = equal_mask(fields + 64 * k, value);
  }

  std::size_t count() const {
    std::size_t sum = 0;
    for (const std::uint64_t m : mask) sum += static_cast<std::size_t>(__builtin_popcountll(m));
    return sum;
  }
};

// The places of a value, in order. Loops take them in groups of kGroup, since a mispredicted end of a loop
// costs more than a few calls too many: before the first place stand as many copies of it.
class PlaceList {
 public:
  static constexpr std::size_t kGroup = 8;

  explicit PlaceList(const Places& places) {
    std::uint8_t* to = list_ + kGroup;
    for (std::size_t k = 0; k < kExponentBlock / 64; ++k) {
      std::uint64_t m = places.mask[k];
      const int n = __builtin_popcountll(m);
      int i = 0;
      do {
        for (int end = i + 4; i < end; ++i) {
          to[i] =
              static_cast<std::uint8_t>(64 * k + static_cast<std::size_t>(__builtin_ctzll(m | 1ull << 63)));
          m &= m - 1;
        }
      } while (i < n);
      to += n;
    }
    size_ = static_cast<std::size_t>(to - (list_ + kGroup));
    std::memset(list_, list_[kGroup], kGroup);
  }

  // Call f(index, place) for each place in order. Before that, f may be called with the first place and
  // negative indices from 1 - kGroup up: those calls must do no harm once f has been called with index 0 and
  // the first place.
  template <typename F>
  void each(F f) const {
    const auto size = static_cast<std::ptrdiff_t>(size_);
    constexpr auto group = static_cast<std::ptrdiff_t>(kGroup);
    for (std::ptrdiff_t i = size - (size + group - 1) / group * group; i < size; i += group)
      for (std::ptrdiff_t j = i; j < i + group; ++j) f(j, list_[group + j]);
  }

 private:
  std::uint8_t list_[kGroup + kExponentBlock + 4];
  std::size_t size_;
};

}  // namespace
}  // namespace hybridcomp::HC_ISA
