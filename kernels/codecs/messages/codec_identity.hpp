// What a codec with its parameters is to others, beside how it encodes.
#pragma once

#include <cstdint>

namespace hybridcomp {

// A codec as a header names it.
struct CodecId {
  std::uint8_t codec;    // wire id
  std::uint32_t params;  // hash of its spec
};

struct CodecIdentity {
  CodecId id = {};

  // Where messages hold integers of blocks, nearest to the values, with scales alone, and nothing more: bits
  // of an integer and elements of a block. Else 0.
  int bits = 0;
  std::uint32_t block = 0;

  bool sparse = false;  // messages hold some of the elements, as they are (codecs/sparse/message.hpp)
};

}  // namespace hybridcomp
