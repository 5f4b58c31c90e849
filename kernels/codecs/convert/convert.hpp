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

  // Copy bytes, past the caches where the instruction set can: for memory that is not read soon. Ends without
  // a fence (`streamed`, parts.hpp).
  void (*stream)(const std::uint8_t* src, std::uint8_t* dst, std::size_t bytes);

  // Divide n floats, or doubles if `wide`, in place; `by` is rounded to their type. Aligned.
  void (*divide)(void* values, bool wide, std::size_t n, int by);
};

// The same of n elements, by several threads.
void convert_all(const Kernels& k, const std::uint8_t* src, DTypeCode src_dtype, std::size_t n, int threads,
                 std::uint8_t* dst, DTypeCode dst_dtype, bool add);

// Write the message of `n` elements at `src`, as elements of type `to`, to `out`; returns its bytes. `params`
// is the header's hash.
std::size_t cast_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                         DTypeCode to, std::uint8_t codec, std::uint32_t params, int threads,
                         std::uint8_t* out);

struct Sum;

// The same of a sum, as it is made; 0 if its messages cannot be read so.
std::size_t cast_sum(const Kernels& k, const Sum& sum, DTypeCode to, std::uint8_t codec, std::uint32_t params,
                     int threads, std::uint8_t* out);

}  // namespace hybridcomp
