// Identity of a codec with its parameters: the properties that other files need, besides its functions.
#pragma once

#include <cstdint>

namespace hybridcomp {

// Name of a codec in a header.
struct CodecId {
  std::uint8_t codec;    // wire id
  std::uint32_t params;  // hash of its spec
};

struct CodecIdentity {
  CodecId id = {};

  // Bits of an integer and elements of a block, if messages hold blocks' integers and scales, and nothing
  // more; 1 bit: their signs and means (codecs/sign). Else 0.
  int bits = 0;
  std::uint32_t block = 0;

  bool stochastic = false;  // integers are rounded at random, by `seed`; else to nearest
  std::uint64_t seed = 0;

  bool sparse = false;  // messages hold some of the elements, as they are (codecs/sparse/message.hpp)
};

}  // namespace hybridcomp
