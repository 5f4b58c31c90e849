// Headers of messages: making, reading and checking them.
#pragma once

#include <cstring>

#include "codecs/common/kernels.hpp"
#include "codecs/messages/codec_identity.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

constexpr std::uint64_t kMostElements = std::uint64_t(1) << 48;  // hybridcomp.wire.MAX_COUNT

// Return the header of a message of n elements, its CRC yet to be computed.
inline Header header_of(CodecId id, DTypeCode dtype, std::size_t n, std::size_t payload) {
  return {kMagic, id.codec, static_cast<std::uint8_t>(dtype), 0, n, payload, id.params, 0};
}

// Return the CRC-32C of a message without the CRC's own bytes.
inline std::uint32_t crc_of(const std::uint8_t* message, std::size_t payload) {
  const Kernels& k = kernels();
  return k.crc32c(message + sizeof(Header), payload, k.crc32c(message, kCrcAt, 0));
}

// Read the header of a message that begins `data`; false if it is not one: too short, another magic, an
// unknown dtype, reserved bits, or lengths that do not fit.
inline bool read_header(const std::uint8_t* data, std::size_t bytes, Header* h) {
  if (bytes < sizeof(*h)) return false;
  std::memcpy(h, data, sizeof(*h));
  return h->magic == kMagic && !h->flags && h->dtype && h->dtype <= kLastDType && h->count <= kMostElements &&
         h->payload <= bytes - sizeof(*h);
}

}  // namespace hybridcomp
