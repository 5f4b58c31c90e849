// Values of one block to codes and back: a plain loop, and what the vector instruction sets do better.
#pragma once

#include "hybridcomp/minifloat.hpp"
#include "tile.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <MinifloatFormat F, bool Saturate>
inline std::uint32_t code_of(float y) {
  if constexpr (Saturate)
    return minifloat_saturated<F>(y);
  else
    return minifloat_of<F>(y);
}

// The codes of m values (N, if that is not 0) that share a scale. Saturate: they may be beyond the largest.
template <MinifloatFormat F, bool Saturate, std::size_t N>
void encode_values(const float* __restrict x, std::size_t m, float inverse, std::uint8_t* __restrict codes) {
  const std::size_t n = N ? N : m;
  std::size_t i = 0;
  if constexpr (Minifloat<F>::kBits == 8) {
    for (; i < n; ++i) codes[i] = static_cast<std::uint8_t>(code_of<F, Saturate>(x[i] * inverse));
  } else {
    for (; i + 2 <= n; i += 2)
      codes[i / 2] = static_cast<std::uint8_t>(code_of<F, Saturate>(x[i] * inverse) |
                                               code_of<F, Saturate>(x[i + 1] * inverse) << 4);
    if (i < n) codes[i / 2] = static_cast<std::uint8_t>(code_of<F, Saturate>(x[i] * inverse));
  }
}

template <bool Add>
inline void put(float* out, float value) {
  if constexpr (Add)
    *out += value;
  else
    *out = value;
}

// The inverse: m values (N, if that is not 0) into `out`, or added to it.
template <MinifloatFormat F, std::size_t N, bool Add>
void decode_values(const std::uint8_t* __restrict codes, std::size_t m, float scale, float* __restrict out) {
  const std::size_t n = N ? N : m;
  std::size_t i = 0;
  if constexpr (Minifloat<F>::kBits == 8) {
    for (; i < n; ++i) put<Add>(out + i, minifloat_value<F>(codes[i]) * scale);
  } else {
    for (; i < n; ++i) put<Add>(out + i, minifloat_value<F>(codes[i / 2] >> (i % 2 * 4)) * scale);
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
