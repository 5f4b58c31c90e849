// Functions of the block quantizers' messages that other files use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/block/block.hpp"
#include "codecs/common/kernels.hpp"
#include "codecs/messages/encoder.hpp"

namespace hybridcomp {

constexpr bool valid_block(std::uint32_t block) {
  return block >= kMinBlock && block <= kMaxBlock && block % kMinBlock == 0;
}

constexpr bool valid_format(const BlockFormat& f) {
  const bool power_of_two = (f.block & (f.block - 1)) == 0;
  return valid_block(f.block) && (!f.hadamard || (power_of_two && f.block <= kMaxHadamard));
}

// Return the encoder of a valid format.
Encoder quantize_encoder(const BlockFormat& format, bool stochastic, CodecId id);

// Bytes of the scales (and offsets) of so many blocks.
constexpr std::size_t scale_bytes(std::size_t blocks, DTypeCode dtype, const BlockFormat& format) {
  return blocks * (dtype == kFloat64 ? 8 : 4) * (format.symmetric ? 1 : 2);
}

}  // namespace hybridcomp
