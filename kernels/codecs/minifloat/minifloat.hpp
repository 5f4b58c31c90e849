// Kernels of the 8-bit and 4-bit floating-point formats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "hybridcomp/minifloat.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// What a message is made of: which elements, and whether their scales are E8M0 (MX) or float.
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

// Bytes of the payload of n elements.
std::size_t minifloat_payload(std::size_t n, std::uint32_t block, MinifloatKind kind);

// Write the message of `n` elements at `src` to `out`; returns its bytes. `params` is the header's hash.
std::size_t minifloat_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                              std::uint32_t block, MinifloatKind kind, std::uint8_t codec,
                              std::uint32_t params, int threads, std::uint8_t* out);

// Whether a payload's prefix and length are right; returns a Status. `bits` (8 or 4) and `mx` are the
// codec's.
int check_minifloat(const std::uint8_t* payload, std::size_t bytes, std::size_t n, int bits, bool mx);

// Decode a payload of `n` elements to, or add it to, `out`; returns a Status. Writes nothing unless kOk.
int decode_minifloat(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, std::size_t n,
                     int bits, bool mx, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

}  // namespace hybridcomp
