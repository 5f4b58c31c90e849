// Kernels of the block quantizers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Format that encoder and decoder must agree on. Indices of elements count over the whole message, since
// random numbers are drawn by them.
struct BlockFormat {
  std::uint32_t block;
  int bits;        // 8, 4 or 2
  bool symmetric;  // a scale per block; else a scale and an offset
  bool hadamard;   // whole blocks are transformed; `block` is then a power of two of at most kMaxHadamard
  std::uint64_t seed;
};

constexpr std::uint32_t kMaxHadamard = 2048;

// Pointers to a message's scales and packed integers of some blocks.
struct BlockPart {
  const std::uint8_t* scales;
  const std::uint8_t* packed;
};

struct BlockKernels {
  // Quantize `n` elements from index `first` (whole blocks; the last may be short). Writes each block's scale
  // (and offset) to `scales` and the packed integers to `packed`.
  void (*quantize)(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t first,
                   const BlockFormat& format, bool stochastic, std::uint8_t* scales, std::uint8_t* packed);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*dequantize)(const std::uint8_t* scales, const std::uint8_t* packed, bool wide, std::size_t n,
                     std::uint64_t first, const BlockFormat& format, void* out, DTypeCode out_dtype,
                     bool add);

  // sums = own + blocks of `count` messages of one symmetric, untransformed format, message after message.
  // n values (float, or double if `wide`; aligned); `own` may be `sums`. At least one message.
  void (*add)(const BlockPart* messages, std::size_t count, bool wide, std::size_t n,
              const BlockFormat& format, const void* own, void* sums);
};

// Bytes of the packed integers of n elements: 8 / bits in a byte, each block beginning a new one.
constexpr std::size_t packed_bytes(std::size_t n, std::uint32_t block, int bits) {
  const std::size_t per_byte = static_cast<std::size_t>(8 / bits);
  return n / block * (block / per_byte) + (n % block + per_byte - 1) / per_byte;
}

}  // namespace hybridcomp
