// The 64 integers of a block of the codec `bounded`: made of elements, packed into bit planes, and back.
// Plain loops over an array, with the packing by AVX2's byte masks where there are any.
#pragma once

#include "codecs/common/tile.hpp"
#include "hybridcomp/bounded.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kB = kBoundedBlock;
constexpr std::size_t kGroupBytes = 64;  // eight planes, which are packed together

struct Ints {
  alignas(64) std::int32_t v[kB];
};

// Quantize a full block of elements to integers; returns whether every value holds (no integer is too large).
template <DTypeCode D>
inline bool integers_of(const std::uint8_t* src, const BoundedStep<ComputeOf<D>>& step, Ints* q) {
  using T = ComputeOf<D>;
  alignas(64) T buffer[kTile];
  const T* x = view<D>(src, kB, buffer);
  int holds = 1;
  for (std::size_t i = 0; i < kB; ++i) {
    q->v[i] = bounded_integer(x[i], step.inverse);
    const T y = bounded_stored<D>(bounded_value<T>(q->v[i], step.step));
    holds &= bounded_holds(x[i], y, step.limit);
  }
  return holds;
}

// Write the differences of neighbours. The first integer is left out of them: d[0] = 0.
inline void differences_of(const Ints& q, Ints* d) {
  d->v[0] = 0;
  for (std::size_t i = 1; i < kB; ++i)
    d->v[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(q.v[i]) -
                                        static_cast<std::uint32_t>(q.v[i - 1]));
}

inline std::uint32_t delta_spread(const Ints& d) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i < kB; ++i) sum |= bounded_spread(d.v[i]);
  return sum;
}

// Find the spreads of all integers, and of the first kBoundedSample differences.
inline void spreads_of(const Ints& q, std::uint32_t* plain, std::uint32_t* sample) {
  std::uint32_t a = 0, b = 0;
  for (std::size_t i = 0; i < kB; ++i) a |= bounded_spread(q.v[i]);
  for (std::size_t i = 1; i < kBoundedSample; ++i) {
    const std::uint32_t d = static_cast<std::uint32_t>(q.v[i]) - static_cast<std::uint32_t>(q.v[i - 1]);
    b |= bounded_spread(static_cast<std::int32_t>(d));
  }
  *plain = a;
  *sample = b;
}

inline std::int32_t first_of(const Ints& q) { return q.v[0]; }

// Add up differences, from `first` on.
inline void sum_up(Ints* q, std::int32_t first) {
  std::uint32_t sum = static_cast<std::uint32_t>(first);
  for (std::size_t i = 0; i < kB; ++i) {
    sum += static_cast<std::uint32_t>(q->v[i]);
    q->v[i] = static_cast<std::int32_t>(sum);
  }
}

#if defined(__AVX2__)

// Turn 64 bytes into eight planes of 8 bytes: bit i of plane p is bit p of byte i.
inline void bytes_to_planes(const std::uint8_t* bytes, std::uint8_t* planes) {
  __m256i low = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  __m256i high = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes + 32));
  for (int p = 7; p >= 0; --p) {
    const int masks[2] = {_mm256_movemask_epi8(low), _mm256_movemask_epi8(high)};
    std::memcpy(planes + p * 8, masks, 8);
    low = _mm256_add_epi8(low, low);
    high = _mm256_add_epi8(high, high);
  }
}

inline void planes_to_bytes(const std::uint8_t* planes, std::uint8_t* bytes) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  for (int half = 0; half < 2; ++half) {
    __m256i sum = _mm256_setzero_si256();
    for (int p = 0; p < 8; ++p) {
      std::int32_t plane;
      std::memcpy(&plane, planes + p * 8 + half * 4, 4);
      const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(plane), spread), bit);
      const __m256i set = _mm256_cmpeq_epi8(own, bit);
      sum = _mm256_or_si256(sum, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << p))));
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + half * 32), sum);
  }
}

#else

// Transpose an 8 x 8 matrix of bits, a row a byte: rows and columns are swapped in blocks of 1, 2 and 4 bits.
inline std::uint64_t transposed(std::uint64_t x) {
  std::uint64_t t = (x ^ (x >> 7)) & 0x00AA00AA00AA00AAull;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000CCCC0000CCCCull;
  x ^= t ^ (t << 14);
  t = (x ^ (x >> 28)) & 0x00000000F0F0F0F0ull;
  return x ^ t ^ (t << 28);
}

inline void bytes_to_planes(const std::uint8_t* bytes, std::uint8_t* planes) {
  for (std::size_t j = 0; j < 8; ++j) {
    std::uint64_t x;
    std::memcpy(&x, bytes + j * 8, 8);
    x = transposed(x);
    for (std::size_t p = 0; p < 8; ++p) planes[p * 8 + j] = static_cast<std::uint8_t>(x >> (p * 8));
  }
}

inline void planes_to_bytes(const std::uint8_t* planes, std::uint8_t* bytes) {
  for (std::size_t j = 0; j < 8; ++j) {
    std::uint64_t x = 0;
    for (std::size_t p = 0; p < 8; ++p) x |= static_cast<std::uint64_t>(planes[p * 8 + j]) << (p * 8);
    x = transposed(x);
    std::memcpy(bytes + j * 8, &x, 8);
  }
}

#endif

// Write `planes` bit planes, and bytes that complete their last group of eight.
inline void put_planes(const Ints& q, std::uint32_t planes, std::uint8_t* out) {
  alignas(64) std::uint8_t bytes[kB];
  for (std::uint32_t low = 0; low < planes; low += 8, out += kGroupBytes) {
    for (std::size_t i = 0; i < kB; ++i)
      bytes[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(q.v[i]) >> low);
    bytes_to_planes(bytes, out);
  }
}

// Join groups of eight planes, as bytes, to signed integers of `planes` bits: in one pass, from registers.
template <std::size_t Groups>
inline void join_groups(const std::uint8_t bytes[][kB], std::uint32_t planes, Ints* q) {
  for (std::size_t i = 0; i < kB; ++i) {
    std::uint32_t v = bytes[0][i];
    for (std::size_t g = 1; g < Groups; ++g) v |= static_cast<std::uint32_t>(bytes[g][i]) << (8 * g);
    q->v[i] = bounded_signed(v, planes);
  }
}

// Read `planes` bit planes (0 .. 31) as signed integers; also reads the bytes that complete their last group
// of eight.
inline void get_planes(const std::uint8_t* in, std::uint32_t planes, Ints* q) {
  if (!planes) {
    std::memset(q->v, 0, sizeof(q->v));
    return;
  }
  alignas(64) std::uint8_t bytes[4][kB];
  const std::size_t groups = (planes + 7) / 8;
  for (std::size_t g = 0; g < groups; ++g) planes_to_bytes(in + g * kGroupBytes, bytes[g]);
  switch (groups) {
    case 1:
      return join_groups<1>(bytes, planes, q);
    case 2:
      return join_groups<2>(bytes, planes, q);
    case 3:
      return join_groups<3>(bytes, planes, q);
    default:
      return join_groups<4>(bytes, planes, q);
  }
}

// Whether put_values writes elements of type O.
template <DTypeCode O, typename T>
constexpr bool puts() {
  return O == (sizeof(T) == 8 ? kFloat64 : kFloat32);
}

// Write the values of a full block to `out` (of any alignment), or add them.
template <DTypeCode O, bool Add, typename T>
inline void put_values(const Ints& q, T step, std::uint8_t* out) {
  typedef T Loose __attribute__((aligned(1), may_alias));
  auto* const to = reinterpret_cast<Loose*>(out);
#pragma GCC ivdep  // `out` is no part of q
  for (std::size_t i = 0; i < kB; ++i) {
    const T y = bounded_value<T>(q.v[i], step);
    to[i] = Add ? quieted(to[i] + y) : y;
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
