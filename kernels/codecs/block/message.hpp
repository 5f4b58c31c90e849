// Whole messages of the block quantizers: header, prefix, scales, packed integers and CRC around the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/block/block.hpp"
#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/messages/sums.hpp"

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

// The same of a sum, as it is made; 0 if its messages are of other blocks, or of ones too long for that.
std::size_t quantize_sum(const Kernels& k, const Sum& sum, const BlockFormat& format, bool stochastic,
                         std::uint8_t codec, std::uint32_t params, int threads, std::uint8_t* out);

// These as an encoder of a valid format.
Encoder quantize_encoder(const BlockFormat& format, bool stochastic, std::uint8_t codec,
                         std::uint32_t params);

// Whether a payload of `bits`-bit integers is whole and its lengths are right; returns a Status.
int check_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int bits);

// Where the sections of a checked payload begin.
struct QuantizedView {
  BlockFormat format;
  const std::uint8_t* scales;
  const std::uint8_t* packed;
};

// Check a payload as `check_quantized` does, and find its sections; a Status.
int view_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int bits,
                   QuantizedView* view);

// Bytes of the scales (and offsets) of so many blocks.
constexpr std::size_t scale_bytes(std::size_t blocks, DTypeCode dtype, const BlockFormat& format) {
  return blocks * (dtype == kFloat64 ? 8 : 4) * (format.symmetric ? 1 : 2);
}

// Decode a payload of `n` elements to, or add it to, `out`; returns a Status. Writes nothing unless kOk.
int dequantize_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int bits, int threads, std::uint8_t* out, DTypeCode out_dtype,
                       bool add);

}  // namespace hybridcomp
