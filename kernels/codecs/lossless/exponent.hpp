// Kernels of codec `exponent`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/exponent.hpp"

namespace hybridcomp {

struct ExponentKernels {
  // Encode n elements: a code for each block to `codes`, the blocks' data to `data`; returns the bytes of the
  // data. Writes no more than n elements' own.
  std::size_t (*encode)(const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::uint8_t* codes,
                        std::uint8_t* data);

  // Decode n elements; returns a Status. The codes are valid, and the data as long as they say.
  int (*decode)(const std::uint8_t* codes, const std::uint8_t* data, DTypeCode dtype, std::size_t n,
                std::uint8_t* out);
};

}  // namespace hybridcomp
