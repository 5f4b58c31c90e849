// Kernels of the conversions between floating-point types.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"

namespace hybridcomp {

struct ConvertKernels {
  // Convert, or with `add` (dst_dtype kFloat32 or kFloat64) add, `n` floats of one type to another.
  void (*convert)(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n,
                  bool add);

  // Copy bytes, past the caches where the instruction set can: for destinations that are not read soon. Ends
  // without a fence (`streamed`, parts.hpp).
  void (*stream)(const std::uint8_t* src, std::uint8_t* dst, std::size_t bytes);

  // Divide n floats, or doubles if `wide`, in place; `by` is rounded to their type. Aligned.
  void (*divide)(void* values, bool wide, std::size_t n, int by);
};

// Convert n elements, or add them, by several threads.
void convert_all(const Kernels& k, const std::uint8_t* src, DTypeCode src_dtype, std::size_t n, int threads,
                 std::uint8_t* dst, DTypeCode dst_dtype, bool add);

}  // namespace hybridcomp
