// Kernels of the sign quantizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/feedback/feedback.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Values to encode with error feedback: (x + e) / ranks.
struct CorrectedSource {
  Source x;
  const void* e;
  double ranks;
};

struct SignKernels {
  // Encode `n` elements (whole blocks; the last may be short): each block's mean magnitude to `means` (float;
  // double for kFloat64) and the signs, a bit each, to `bits`.
  void (*encode)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, std::uint8_t* means,
                 std::uint8_t* bits);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*decode)(const std::uint8_t* means, const std::uint8_t* bits, bool wide, std::size_t n,
                 std::uint32_t block, void* out, DTypeCode out_dtype, bool add);

  // Encode n corrected values, as `encode` does, and write them to `corrected`; returns whether all x + e are
  // modest, as FeedbackKernels tells.
  bool (*correct)(const CorrectedSource& x, std::size_t n, std::uint32_t block, void* corrected,
                  std::uint8_t* means, std::uint8_t* bits);

  // lost = (corrected - decoded) * ranks, where the message holds `means`; returns whether all is finite.
  // `lost` may be `corrected`.
  bool (*lose)(const void* corrected, const std::uint8_t* means, bool wide, std::size_t n,
               std::uint32_t block, double ranks, void* lost);

  // Do both at once, block after block, each element read once and `lost` written past the caches. `room` is
  // for two blocks of corrected values.
  bool (*residual)(const CorrectedSource& x, std::size_t n, std::uint32_t block, void* room, void* lost,
                   std::uint8_t* means, std::uint8_t* bits);
};

}  // namespace hybridcomp
