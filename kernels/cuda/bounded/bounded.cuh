// Error-bounded compression's blocks of 64 elements, four to a warp: lane j of a block's eight has elements 4
// j to 4 j + 3 and 32 + 4 j to 32 + 4 j + 3, so that the eight lanes' 16-byte accesses of float32 are
// neighbours.
#pragma once

#include "common/elements.cuh"
#include "hybridcomp/bounded.hpp"

namespace hybridcomp {
using std::int64_t;

namespace {

constexpr int kThreads = 256;
constexpr uint32_t kChunkBlocks = 32;  // coded by a thread block together: one for each lane of a scan
constexpr uint32_t kChunk = kChunkBlocks * kBoundedBlock;  // elements
constexpr int kOwn = 8;                                    // elements of a thread

HC_DEVICE uint64_t blocks_in(uint64_t n) { return n / kBoundedBlock + (n % kBoundedBlock != 0); }
HC_DEVICE uint64_t chunks_in(uint64_t n) { return n / kChunk + (n % kChunk != 0); }

// Return the number of elements of a chunk's block, if the array has `left` from the chunk's beginning on.
HC_DEVICE uint32_t elements_of(uint64_t left, uint32_t block) {
  const uint64_t begin = static_cast<uint64_t>(block) * kBoundedBlock;
  const uint64_t rest = left > begin ? left - begin : 0;
  return static_cast<uint32_t>(rest < kBoundedBlock ? rest : kBoundedBlock);
}

// Return the place in its block of the i-th element of lane j of eight.
HC_DEVICE uint32_t place_of(uint32_t j, int i) {
  return 4 * j + static_cast<uint32_t>(i & 3) + (i < 4 ? 0u : 32u);
}

// -- elements as bits --------------------------------------------------------------------------------------

template <DTypeCode D>
struct Bits {
  using Type = uint16_t;
  using Shuffled = uint32_t;
};
template <>
struct Bits<kFloat32> {
  using Type = uint32_t;
  using Shuffled = uint32_t;
};
template <>
struct Bits<kFloat64> {
  using Type = uint64_t;
  using Shuffled = uint64_t;
};
template <DTypeCode D>
using BitsOf = typename Bits<D>::Type;
template <DTypeCode D>
using ShuffledOf = typename Bits<D>::Shuffled;  // type that shuffles take

template <DTypeCode D>
HC_DEVICE ComputeOf<D> value_of(BitsOf<D> bits) {
  if constexpr (D == kFloat32 || D == kFloat64)
    return float_of(bits);
  else
    return loaded<D>(bits);
}

template <DTypeCode D>
constexpr uint32_t kElement = sizeof(BitsOf<D>);
template <DTypeCode D>
constexpr uint32_t kFourAligned = 4 * kElement<D> < 16 ? 4 * kElement<D> : 16;

// -- operations of eight lanes -----------------------------------------------------------------------------

HC_DEVICE uint32_t or_of_eight(uint32_t x) {
#pragma unroll
  for (int distance = 1; distance < 8; distance *= 2) x |= __shfl_xor_sync(kFullWarp, x, distance);
  return x;
}

// Whether a condition holds in all eight lanes.
HC_DEVICE bool all_of_eight(bool condition) {
  const uint32_t ballot = __ballot_sync(kFullWarp, condition);
  return ((ballot >> (threadIdx.x & 24u)) & 255u) == 255u;
}

// Return the sum of x over the lanes of a warp up to this one.
HC_DEVICE uint32_t sum_to_here(uint32_t x) {
  const uint32_t lane = threadIdx.x & 31u;
#pragma unroll
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, x, distance);
    x += lane >= distance ? before : 0;
  }
  return x;
}

// -- bit planes --------------------------------------------------------------------------------------------

// Transpose each 4 x 4 block of a matrix of bits, of which x has four rows of eight.
HC_DEVICE uint32_t transposed(uint32_t x) {
  uint32_t t = (x ^ (x >> 7)) & 0x00AA00AAu;
  x ^= t ^ (t << 7);
  t = (x ^ (x >> 14)) & 0x0000CCCCu;
  return x ^ t ^ (t << 14);
}

// Move byte i of lane 2 b + p to byte b of lane 2 i + p.
HC_DEVICE uint32_t exchanged(uint32_t x) {
  const uint32_t lane = threadIdx.x;
  x = __byte_perm(x, __shfl_xor_sync(kFullWarp, x, 2), lane & 2u ? 0x3715u : 0x6240u);
  return __byte_perm(x, __shfl_xor_sync(kFullWarp, x, 4), lane & 4u ? 0x3276u : 0x5410u);
}

// Half a plane has 32 bits, its elements' in order. Lane 2 b + p of eight gets the half p of planes b (first)
// and 4 + b.
struct TwoPlanes {
  uint32_t first, second;
};

// Return the planes of the lowest bytes of a block's integers.
HC_DEVICE TwoPlanes planes_of(const uint32_t v[kOwn]) {
  const bool odd = threadIdx.x & 1u;
  // Byte r of x: the bits r of the four elements below, and above them their bits 4 + r.
  const uint32_t x =
      transposed(__byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410));
  const uint32_t y =
      transposed(__byte_perm(__byte_perm(v[4], v[5], 0x0040), __byte_perm(v[6], v[7], 0x0040), 0x5410));
  const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? x : y, 1);  // the even lane takes both lower halves
  const uint32_t low = odd ? other : x, high = odd ? y : other;
  const uint32_t first = (low & 0x0F0F0F0Fu) | ((high << 4) & 0xF0F0F0F0u);
  const uint32_t second = ((low >> 4) & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
  return {exchanged(first), exchanged(second)};
}

// The inverse: multiply integers by 256 and add the byte that the planes make.
HC_DEVICE void add_planes(TwoPlanes planes, uint32_t v[kOwn]) {
  const bool odd = threadIdx.x & 1u;
  const uint32_t first = exchanged(planes.first), second = exchanged(planes.second);
  const uint32_t low = (first & 0x0F0F0F0Fu) | ((second << 4) & 0xF0F0F0F0u);
  const uint32_t high = ((first >> 4) & 0x0F0F0F0Fu) | (second & 0xF0F0F0F0u);
  const uint32_t other = __shfl_xor_sync(kFullWarp, odd ? low : high, 1);
  const uint32_t x = transposed(odd ? other : low), y = transposed(odd ? high : other);
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    v[i] = __byte_perm(v[i], x, 0x2104 + i);
    v[4 + i] = __byte_perm(v[4 + i], y, 0x2104 + i);
  }
}

// -- a chunk's bytes in shared memory: blocks begin at multiples of an element, at most four bytes
// -----------

template <typename U>
HC_DEVICE void put_word(uint8_t* to, uint32_t word) {
  if constexpr (sizeof(U) == 2) {
    reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(word);
    reinterpret_cast<uint16_t*>(to)[1] = static_cast<uint16_t>(word >> 16);
  } else {
    *reinterpret_cast<uint32_t*>(to) = word;
  }
}
template <typename U>
HC_DEVICE uint32_t get_word(const uint8_t* from) {
  if constexpr (sizeof(U) == 2) {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from);
    return halves[0] | static_cast<uint32_t>(halves[1]) << 16;
  } else {
    return *reinterpret_cast<const uint32_t*>(from);
  }
}

template <typename U>
HC_DEVICE void put_element(uint8_t* to, U bits) {
  if constexpr (sizeof(U) == 8) {
    put_word<U>(to, static_cast<uint32_t>(bits));
    put_word<U>(to + 4, static_cast<uint32_t>(bits >> 32));
  } else {
    *reinterpret_cast<U*>(to) = bits;
  }
}
template <typename U>
HC_DEVICE U get_element(const uint8_t* from) {
  if constexpr (sizeof(U) == 8)
    return get_word<U>(from) | static_cast<U>(get_word<U>(from + 4)) << 32;
  else
    return *reinterpret_cast<const U*>(from);
}

// Return how many planes a code has.
HC_DEVICE uint32_t planes_in(uint32_t code) {
  return code < kBoundedDelta ? code : code < kBoundedRaw ? code - kBoundedDelta : 0;
}
HC_DEVICE bool is_delta(uint32_t code) { return code >= kBoundedDelta && code < kBoundedRaw; }

}  // namespace
}  // namespace hybridcomp
