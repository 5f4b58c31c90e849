// Payloads of which any stretch of elements can be decoded alone: the block quantizers' and the casts'. Code
// that runs over several messages at once, tile by tile, uses these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/block/block.hpp"
#include "codecs/common/kernels.hpp"

namespace hybridcomp {

// Elements handled at a time, at most: in float32 they fill half of an L1 cache.
constexpr std::size_t kPartTile = 4096;

// A checked payload; views the message's memory.
struct Parts {
  DTypeCode dtype;             // element type of the message
  std::size_t unit;            // stretches begin at multiples of it; at most kPartTile
  const std::uint8_t* values;  // a cast's elements, or the packed integers
  DTypeCode stored;            // a cast's type of element
  const std::uint8_t* scales;  // null for a cast
  BlockFormat format;          // unused by a cast

  // Decode elements at .. at + m to `out`, or with `add` add them; as in `decode_payload`.
  void decode(const Kernels& k, std::size_t at, std::size_t m, void* out, DTypeCode out_dtype,
              bool add) const;

  // Whether the payload has a scale per block and nothing more: then several messages are added at once.
  bool plain() const { return scales && format.symmetric && !format.hadamard; }

  // Return the start of the blocks from element `at` on.
  BlockPart blocks_at(std::size_t at) const;
};

// Elements of a tile: whole units, at most kPartTile.
constexpr std::size_t tile_of(std::size_t unit) { return kPartTile / unit * unit; }

// Compute sums = own + stretches at .. at + m of messages, message after message; m values (float, or double
// if `wide`; aligned). `own` may be `sums`.
void add_parts(const Kernels& k, std::span<const Parts> messages, std::size_t at, std::size_t m, bool wide,
               const void* own, void* sums);

// Decode n elements past the caches, for an array that is not read soon.
void decode_streaming(const Kernels& k, const Parts& parts, std::size_t n, int threads, std::uint8_t* out,
                      DTypeCode out_dtype);

// Make streamed stores visible to other threads in order; call after the last one.
void streamed();

}  // namespace hybridcomp
