// Whole messages of the block quantizers: header, prefix, scales, packed integers and CRC around the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "block.hpp"
#include "kernels.hpp"
#include "status.hpp"

namespace hybridcomp {

constexpr bool valid_block(std::uint32_t block) {
  return block >= kMinBlock && block <= kMaxBlock && block % kMinBlock == 0;
}

constexpr bool valid_format(const BlockFormat& f) {
  const bool power_of_two = (f.block & (f.block - 1)) == 0;
  return valid_block(f.block) && (!f.hadamard || (power_of_two && f.block <= kMaxHadamard));
}

// Bytes of the payload of n elements.
std::size_t quantized_payload(std::size_t n, DTypeCode dtype, const BlockFormat& format);

// Write the message of `n` elements at `src` to `out`; returns its bytes. `params` is the header's hash.
std::size_t quantize_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             const BlockFormat& format, bool stochastic, std::uint8_t codec,
                             std::uint32_t params, int threads, std::uint8_t* out);

// Whether a payload of `bits`-bit integers is whole and its lengths are right; returns a Status.
int check_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int bits);

// Decode a payload of `n` elements to, or add it to, `out`; returns a Status. Writes nothing unless kOk.
int dequantize_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int bits, int threads, std::uint8_t* out, DTypeCode out_dtype,
                       bool add);

}  // namespace hybridcomp
