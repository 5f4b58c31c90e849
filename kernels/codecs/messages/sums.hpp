// Sums of an array and of messages, made tile by tile while the tile is in L1: the array's elements are
// widened, each message's values added in order, the sum divided, and handed to the code that encodes or
// writes it. The bits are those that the same steps over whole arrays give.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codecs/convert/convert.hpp"
#include "codecs/messages/parts.hpp"
#include "codecs/sparse/select.hpp"

namespace hybridcomp {

struct Sum {
  const std::uint8_t* own;  // n elements; null for zeros
  DTypeCode own_dtype;
  std::span<const Parts> messages;  // n elements each; doubles with doubles only
  std::size_t n;
  int ranks;        // the sum is divided by it
  DTypeCode dtype;  // type of the elements that `tile` returns

  // Destination for the values that a receiver of the encoded sum decodes, or null. May be `own`.
  std::uint8_t* result;
  DTypeCode result_dtype;
  bool stream;  // write past the caches

  // Memory for `tile`.
  struct Buffer {
    alignas(64) std::uint8_t wide[kPartTile * sizeof(double)];
    alignas(64) std::uint8_t narrow[kPartTile * sizeof(float)];
  };

  DTypeCode accumulator() const { return own_dtype == kFloat64 ? kFloat64 : kFloat32; }

  // Return the finished sums of elements at .. at + m, of type `dtype`; m at most kPartTile, `at` a multiple
  // of the messages' units.
  const std::uint8_t* tile(const Kernels& k, std::size_t at, std::size_t m, Buffer* buffer) const;

  // Whether the messages can be read in tiles that begin at multiples of `unit`.
  bool fits(std::size_t unit) const;

  // Return the largest of the messages' units if it is a multiple of all of them; else 0.
  std::size_t unit() const;

  // Write the result's elements at .. at + m, which decode(to) writes as `result_dtype`; nothing if there is
  // no result. Uses the buffer's memory.
  template <typename Decode>
  void put(const Kernels& k, std::size_t at, std::size_t m, Buffer* buffer, Decode decode) const {
    if (!result) return;
    std::uint8_t* const to = result + at * size_of(result_dtype);
    if (!stream) return decode(to);
    decode(buffer->wide);
    k.convert->stream(buffer->wide, to, m * size_of(result_dtype));
  }
};

// Write the sum itself, as `dtype`, to `result`, which has that type, and to `also` if that is not null. Only
// the last of them goes past the caches.
void write_sum(const Kernels& k, const Sum& sum, int threads, std::uint8_t* also = nullptr);

// Payload of a message by any codec.
struct Payload {
  std::uint8_t codec;
  const std::uint8_t* data;
  std::size_t bytes;
  DTypeCode dtype;
};

// Do the same steps over whole arrays, for messages whose payloads cannot be read in stretches;
// `sum.messages` is not used. Returns the finished sum, in `memory`; null if a message cannot be added, or
// there are no elements.
const std::uint8_t* sum_whole(const Kernels& k, const Sum& sum, std::span<const Payload> messages,
                              int threads, Scratch* memory);

}  // namespace hybridcomp
