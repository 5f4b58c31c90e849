// Kernels of byte planes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "hybridcomp/planes.hpp"

namespace hybridcomp {

struct PlanesKernels {
  // Write byte k of m words of `width` (1, 2, 4, 8) bytes, rotated left by one bit if `rotate`, to planes[k].
  void (*split)(const std::uint8_t* src, std::size_t m, int width, bool rotate, std::uint8_t* const* planes);

  // The inverse.
  void (*join)(const std::uint8_t* const* planes, std::size_t m, int width, bool rotate, std::uint8_t* out);
};

// Return which planes of m words are worth compressing: bit k for plane k.
unsigned compressible_planes(const std::uint8_t* src, std::size_t m, int width, bool rotate);

// Join planes of m floats of type `dtype` and convert them to, or add them to, `out`.
void join_planes_as(const Kernels& k, const std::uint8_t* const* planes, std::size_t m, DTypeCode dtype,
                    std::uint8_t* out, DTypeCode out_dtype, bool add);

}  // namespace hybridcomp
