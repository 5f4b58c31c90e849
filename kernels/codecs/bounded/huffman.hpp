// Coder `huffman` of the codec `bounded`: integers by a Huffman code for each 32,768 elements.
//
// Payload: a uint32 for each chunk of 32,768 elements, its bytes; then the chunks, each a byte (its kind) and
//
//   kind 0  its elements as they are
//   kind 1  HuffmanHead, which begins with that byte; for each of its symbols, and then for "kept", the
//           bits of its code (0: it never comes) in half a byte, lower half first; four streams of codes,
//           each of a quarter of the elements (rounded up) and of whole bytes, lowest bit first; the kept
//           elements in their order, as they are. Symbol i stands for integer `first` + i. The code is
//           canonical (huffman_code.hpp) and complete.
//   kind 2  one element, which is all of them
//
// Elements whose integers are more than 1024 off the middle one of a sample are kept: there are 2048 symbols
// at most.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "codecs/bounded/coders.hpp"
#include "codecs/bounded/huffman_code.hpp"
#include "codecs/common/parallel.hpp"

namespace hybridcomp::huffman {

constexpr std::size_t kChunk = kHuffmanChunk;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kIntegers = kMostSymbols - 1;  // most symbols that stand for integers
enum Kind : std::uint8_t { kPlain = 0, kCoded = 1, kOne = 2 };

struct HuffmanHead {
  std::uint8_t kind;       // kCoded
  std::uint8_t reserved;   // zero
  std::uint16_t symbols;   // 1 .. 2048
  std::int32_t first;      // the integer of symbol 0
  std::uint32_t bytes[3];  // bytes of all streams but the last
  std::uint32_t kept;      // elements
};
static_assert(sizeof(HuffmanHead) == 24, "the head of a chunk is 24 bytes on the wire");

inline std::size_t table_bytes(std::size_t symbols) { return symbols / 2 + 1; }

// First element of stream s of m elements.
inline std::size_t stream_begin(std::size_t m, std::size_t s) {
  return std::min(m, s * blocks_of(m, kStreams));
}

// Bytes before the chunks of n elements.
inline std::size_t lengths_bytes(std::size_t n) { return blocks_of(n, kChunk) * 4; }

std::size_t encode(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, double bound,
                   std::uint32_t unit, int threads, std::uint8_t* out);

}  // namespace hybridcomp::huffman
