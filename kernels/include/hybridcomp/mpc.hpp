// MPC's arithmetic for host and device: the difference to the word `lag` places back, bit planes, the
// difference of neighbouring planes, and the lanes left out. mpc.py specifies the layout; all arithmetic is
// on integers modulo 2^bits.
//
// A chunk is 1024 words. Its words form tiles of as many words as a lane has bits: a lane is the plane of one
// bit of one tile, with bit i from word i of the tile. Rows of lanes, one lane for each tile, go from the
// words' highest bit to their lowest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

constexpr std::size_t kMpcChunk = 1024;    // words predicted, transposed and stored apart from all others
constexpr std::size_t kMpcRowBytes = 128;  // one bit of each word of a chunk
constexpr std::uint32_t kMpcMaxLag = 32;

// Words of 2 and 4 bytes have lanes of 32 bits, words of 8 bytes lanes of 64.
template <int Width>
struct MpcWord;
template <>
struct MpcWord<2> {
  using Word = std::uint16_t;
  using Lane = std::uint32_t;
};
template <>
struct MpcWord<4> {
  using Word = std::uint32_t;
  using Lane = std::uint32_t;
};
template <>
struct MpcWord<8> {
  using Word = std::uint64_t;
  using Lane = std::uint64_t;
};

// Bytes of a chunk's bitmap of lanes that are not zero: a bit for each lane of each row.
HC_HD std::size_t mpc_bitmap_bytes(int width) { return width == 2 ? 64 : 128; }

// Do LNVs, the difference to the word `lag` places back (zero before the chunk), and its inverse.
template <typename Word>
HC_HD Word mpc_residual(Word value, Word before) {
  return static_cast<Word>(value - before);
}
template <typename Word>
HC_HD Word mpc_value(Word residual, Word before) {
  return static_cast<Word>(residual + before);
}

// Do one step of BIT: swap the upper bits of `low` with the lower ones of `high` in each group of 2 * shift
// bits. With `low` row k and `high` row k + shift, for all k without that bit and shift = half a word's bits,
// ..., 2, 1, rows of words become rows of planes, and planes words: it is its own inverse.
template <typename Lane>
HC_HD Lane mpc_swap_mask(int shift) {  // shift lower bits of each group of 2 * shift
  return static_cast<Lane>(~Lane(0) / ((Lane(1) << shift) + 1));
}
template <typename Lane>
HC_HD void mpc_swap(Lane& low, Lane& high, int shift, Lane mask) {
  const Lane t = ((low >> shift) ^ high) & mask;
  high ^= t;
  low ^= t << shift;
}

}  // namespace hybridcomp
