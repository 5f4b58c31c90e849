// The forms of the codec `bounded` that code integers one by one, not in blocks' bit planes: payloads from
// the prefix on. rows.cpp and huffman.hpp specify them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/bounded/bounded.hpp"
#include "codecs/common/kernels.hpp"

namespace hybridcomp {

constexpr std::uint32_t kMostRow = 1024;        // elements of a row
constexpr std::uint32_t kHuffmanChunk = 32768;  // elements that share a Huffman code

// Payload of a message of n elements, from the end of its prefix on.
struct BoundedPayload {
  const std::uint8_t* data;
  std::size_t bytes;
  DTypeCode dtype;
  std::size_t n;
  double bound;
};

// Destination of decoded elements.
struct BoundedOut {
  std::uint8_t* data;
  DTypeCode dtype;
  bool add;

  BoundedOut at(std::size_t element) const { return {data + element * size_of(dtype), dtype, add}; }
};

// Functions of a coder. `unit` is the prefix's `block`: elements of a row, or of a chunk.
struct BoundedCoder {
  bool (*takes)(std::uint32_t unit);

  // The fewest bytes that any n elements take, and the most.
  std::size_t (*least)(std::size_t n, std::uint32_t unit);
  std::size_t (*most)(std::size_t n, DTypeCode dtype, std::uint32_t unit);

  // Encode to `out`, which has room for the most; returns the bytes.
  std::size_t (*encode)(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        double bound, std::uint32_t unit, int threads, std::uint8_t* out);

  // Check a payload that has at least the least bytes: a Status. The bits of a Huffman code are checked by
  // the decoder.
  int (*check)(const std::uint8_t* data, std::size_t bytes, DTypeCode dtype, std::size_t n,
               std::uint32_t unit);

  // Check and decode: a Status.
  int (*decode)(const Kernels& k, const BoundedPayload& payload, std::uint32_t unit, int threads,
                const BoundedOut& out);
};

extern const BoundedCoder kRowCoder, kHuffmanCoder;

// Decode m elements that are kept as they are.
void put_kept(const Kernels& k, const std::uint8_t* elements, DTypeCode dtype, std::size_t m,
              const BoundedOut& out);

}  // namespace hybridcomp
