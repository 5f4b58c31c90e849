// Kernels of codec `exponent`, and whole messages around them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/exponent.hpp"

namespace hybridcomp {

struct ExponentKernels {
  // Encode n elements: a code for each block to `codes`, the blocks' data to `data`; returns the bytes of
  // these. Writes no more than n elements' own.
  std::size_t (*encode)(const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::uint8_t* codes,
                        std::uint8_t* data);

  // Decode n elements; returns a Status. The codes are valid, and the data as long as they say.
  int (*decode)(const std::uint8_t* codes, const std::uint8_t* data, DTypeCode dtype, std::size_t n,
                std::uint8_t* out);
};

// The largest payload of n elements.
constexpr std::size_t exponent_payload(std::size_t n, DTypeCode dtype) {
  return blocks_of(n, kExponentBlock) + n * size_of(dtype);
}

// Write the message of n elements to `out`, which has room for the header and exponent_payload; returns its
// bytes. `params` is the header's hash.
std::size_t exponent_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             std::uint8_t codec, std::uint32_t params, int threads, std::uint8_t* out);

// Whether a payload's codes and lengths are right; returns a Status.
int check_exponent(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n);

// Decode a payload of n elements to, or add it to, `out`; returns a Status. Where it is not kOk, some of
// `out` may have been written.
int decode_exponent(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                    std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

}  // namespace hybridcomp
