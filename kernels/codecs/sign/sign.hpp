// Kernels of the sign quantizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct SignKernels {
  // Encode `n` elements (whole blocks; the last may be short): each block's mean magnitude to `means` (float;
  // double for kFloat64) and the signs, a bit each, to `bits`.
  void (*encode)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, std::uint8_t* means,
                 std::uint8_t* bits);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*decode)(const std::uint8_t* means, const std::uint8_t* bits, bool wide, std::size_t n,
                 std::uint32_t block, void* out, DTypeCode out_dtype, bool add);
};

}  // namespace hybridcomp
