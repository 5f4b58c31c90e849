// Kernels of the shared-scale quantizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Rounding of a tensor to integers.
struct LatticeRounding {
  std::int32_t limit;  // largest integer of one contribution
  double inverse;      // integers per unit; 0 where every integer is 0
  bool stochastic;
  std::uint64_t seed;  // seed of stochastic rounding
};

struct LatticeKernels {
  // Return the largest magnitude as bits of the computing type (double for kFloat64, else float): infinity
  // lies above every number and NaN above infinity.
  std::uint64_t (*peak)(const void* src, DTypeCode dtype, std::size_t n);

  // Write `n` integers of `bits` (8, 16 or 32) for elements first .. first + n of a tensor.
  void (*quantize)(const void* src, DTypeCode dtype, std::size_t n, int bits, const LatticeRounding& rounding,
                   std::uint64_t first, std::uint8_t* q);

  // The inverse for a tensor of `dtype`, writing to or adding to `out` of `out_dtype`. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 for a tensor of doubles.
  void (*dequantize)(const std::uint8_t* q, DTypeCode dtype, std::size_t n, int bits, double scale, void* out,
                     DTypeCode out_dtype, bool add);
};

}  // namespace hybridcomp
