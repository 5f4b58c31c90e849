// Whole messages of any codec with a native encoder, without Python: checked, decoded, encoded, summed. The
// engine and the bindings call these functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "codecs/messages/encoder.hpp"
#include "codecs/messages/sums.hpp"

namespace hybridcomp {

// Codec, element type and number of elements that a message must have.
struct Expected {
  std::uint8_t codec;
  std::uint32_t params;
  DTypeCode dtype;
  std::size_t n;
};

// Whether a message of at most `bytes` is whole and as expected; `crc`: its checksum too.
bool check_message(const std::uint8_t* message, std::size_t bytes, const Expected& expected, bool crc);

// Decode a message of n elements to `out`; false if it is malformed, or decoded elsewhere. Its checksum is
// not checked. `stream`: past the caches where that is possible.
bool decode_message(const Kernels& k, const std::uint8_t* message, std::size_t bytes, std::size_t n,
                    std::uint8_t* out, DTypeCode type, bool stream);

// Decode a payload as `decode_message` does a message.
bool decode_stretches(const Kernels& k, const Payload& payload, std::size_t n, std::uint8_t* out,
                      DTypeCode type, bool stream);

// Find the payload of a message of n elements that can be added to sums of elements of `dtype`; returns false
// if it cannot be.
bool payload_of(const std::uint8_t* message, std::size_t bytes, DTypeCode dtype, std::size_t n,
                Payload* payload);

// Encode a sum of payloads, and decode it to the sum's result if there is one; returns the message's bytes,
// or 0 if a payload cannot be added or decoded here. The sum's `messages` are set here.
std::size_t encode_sum(const Kernels& k, const Encoder& encoder, Sum sum, std::span<const Payload> payloads,
                       std::uint8_t* out);

// Write a sum of payloads to the sum's result; false if it must be done in separate steps. Nothing has been
// written then.
bool store_sum(const Kernels& k, Sum sum, std::span<const Payload> payloads);

// Do the same to two places: `also` is not read soon and goes past the caches if the sum's `stream` is set.
bool store_sum_twice(const Kernels& k, Sum sum, std::span<const Payload> payloads, std::uint8_t* also);

}  // namespace hybridcomp
