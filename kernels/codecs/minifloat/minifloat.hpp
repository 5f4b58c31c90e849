// Kernels of the 8-bit and 4-bit floating-point formats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "hybridcomp/minifloat.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Kind of a message: its elements' format, and whether their scales are E8M0 (MX) or float.
struct MinifloatKind {
  MinifloatFormat format;  // kE2M1 only with mx
  bool mx;                 // then blocks are of kMxBlock

  constexpr std::size_t scale_bytes() const { return mx ? 1 : 4; }
  // Bytes of the codes of n elements.
  constexpr std::size_t code_bytes(std::size_t n) const { return format == kE2M1 ? n / 2 + n % 2 : n; }
};

struct MinifloatKernels {
  // Encode `n` elements (whole blocks; the last may be short): a scale per block to `scales`, the elements'
  // codes to `codes`.
  void (*encode)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, MinifloatKind kind,
                 std::uint8_t* scales, std::uint8_t* codes);

  // The inverse, writing to or adding to `out` of `out_dtype`; with `add` that is kFloat32 or kFloat64.
  void (*decode)(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::uint32_t block,
                 MinifloatKind kind, void* out, DTypeCode out_dtype, bool add);
};

}  // namespace hybridcomp
