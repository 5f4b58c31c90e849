// Kernels of error-bounded compression.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/bounded.hpp"

namespace hybridcomp {

struct BoundedKernels {
  // Find the least and the largest finite value, denormal numbers taken for zero; infinity and -infinity if
  // there is none.
  void (*range)(const void* src, DTypeCode dtype, std::size_t n, double* low, double* high);

  // Encode `n` elements: a byte for each block to `codes`, the blocks to `data`; returns the bytes of the
  // blocks, at most n elements' own. `room` is how many bytes may be written at `data`, at least as many.
  std::size_t (*encode)(const void* src, DTypeCode dtype, std::size_t n, double bound, std::uint8_t* codes,
                        std::uint8_t* data, std::size_t room);

  // Decode to, or add to, `out`. The codes are valid and the blocks take no more than `bytes` at `data`.
  void (*decode)(const std::uint8_t* codes, const std::uint8_t* data, std::size_t bytes, DTypeCode dtype,
                 std::size_t n, double bound, void* out, DTypeCode out_dtype, bool add);

  // Quantize m elements, at most kBoundedTile, to integers: kBoundedKept for elements that are to be kept.
  void (*integers)(const void* src, DTypeCode dtype, std::size_t m, double bound, std::int32_t* q);

  // Decode m integers of elements of `dtype`, at most kBoundedTile, to `out`, or add them to it.
  void (*values)(const std::int32_t* q, DTypeCode dtype, std::size_t m, double bound, void* out,
                 DTypeCode out_dtype, bool add);
};

constexpr std::size_t kBoundedTile = 2048;

}  // namespace hybridcomp
