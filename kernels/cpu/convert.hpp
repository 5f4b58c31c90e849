// Kernels of the conversions between floating-point types.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct ConvertKernels {
  // Convert, or with `add` (dst_dtype kFloat32 or kFloat64) add, `n` floats of one type to another.
  void (*convert)(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n,
                  bool add);
};

}  // namespace hybridcomp
