// Kernels of the conversions between floating-point types.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"

namespace hybridcomp {

constexpr std::size_t kLooked = 32;

struct ConvertKernels {
  // Convert, or with `add` (dst_dtype kFloat32 or kFloat64) add, `n` floats of one type to another.
  void (*convert)(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n,
                  bool add);

  // Copy bytes, past the caches where the instruction set can: for destinations that are not read soon. Ends
  // without a fence (`streamed`, parts.hpp).
  void (*stream)(const std::uint8_t* src, std::uint8_t* dst, std::size_t bytes);

  // Return whether any is infinite of n halfs: of the first kLooked of each `each` of them.
  bool (*infinite)(const std::uint8_t* halfs, std::size_t n, std::size_t each);

  // Divide n floats, or doubles if `wide`, in place; `by` is rounded to their type. Aligned.
  void (*divide)(void* values, bool wide, std::size_t n, int by);
};

// Function to call once, from whichever thread, when the codec `fp16` makes a finite value infinite; null for
// none. While there is one, encoders look at their halfs: at all of short arrays, at a part of long ones.
void tell_of_overflow(void (*tell)());

// Convert n elements, or add them, by several threads.
void convert_all(const Kernels& k, const std::uint8_t* src, DTypeCode src_dtype, std::size_t n, int threads,
                 std::uint8_t* dst, DTypeCode dst_dtype, bool add);

}  // namespace hybridcomp
