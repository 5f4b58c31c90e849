// Kernels of the block quantizers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct BlockKernels {
  // Quantize `n` elements (whole blocks; the last may be short) to `bits` (8 or 4). Writes a scale per block
  // to `scales` and the packed integers to `packed`.
  void (*quantize)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, int bits,
                   std::uint8_t* scales, std::uint8_t* packed);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*dequantize)(const std::uint8_t* scales, const std::uint8_t* packed, bool wide, std::size_t n,
                     std::uint32_t block, int bits, void* out, DTypeCode out_dtype, bool add);
};

// Bytes of the packed integers of n elements: a 4-bit block of odd length ends with half a byte unused.
constexpr std::size_t packed_bytes(std::size_t n, std::uint32_t block, int bits) {
  if (bits == 8) return n;
  return n / block * (block / 2) + (n % block + 1) / 2;
}

}  // namespace hybridcomp
