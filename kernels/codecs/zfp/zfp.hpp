// Kernels of zfp's fixed-rate streams of one dimension.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct ZfpKernels {
  // Encode `n` elements as blocks of four, `bits` bits each, to zfp_bytes(n, bits) bytes at `out`: whole
  // 64-bit words, the last filled with zeros. The type allows `bits`.
  void (*encode)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t bits, std::uint8_t* out);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the stream is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`. Any bits decode to some values.
  void (*decode)(const std::uint8_t* stream, bool wide, std::size_t n, std::uint32_t bits, void* out,
                 DTypeCode out_dtype, bool add);
};

// Prefix of the payload.
struct ZfpPrefix {
  std::uint32_t bits;      // bits of a block
  std::uint32_t reserved;  // zero
};
static_assert(sizeof(ZfpPrefix) == 8);

// Elements whose blocks fill whole words, whatever `bits` is: 64 blocks.
constexpr std::size_t kZfpUnit = 256;

// Bytes of the stream of n elements.
constexpr std::size_t zfp_bytes(std::size_t n, std::uint32_t bits) {
  const std::size_t blocks = n / 4 + (n % 4 != 0);
  return (blocks * bits + 63) / 64 * 8;
}

}  // namespace hybridcomp
