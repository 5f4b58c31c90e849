// Kernels by which `threshold` and `sidco` measure before they select: the rounding rules and orders are in
// hybridcomp/sparse.hpp, keys in sparse.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct FitKernels {
  // Return the sum of the squares of n <= kIndexBlock elements; those that are not finite count as zero, and
  // `not_finite` is their number.
  double (*squares)(const void* src, DTypeCode dtype, std::size_t n, std::size_t* not_finite);

  // Write the sample of SIDCo (hybridcomp/sparse.hpp) as keys of floats, or of doubles for kFloat64, zero
  // where an element is not finite; return how many are not. groups == 0: all n elements.
  std::size_t (*sample)(const void* src, DTypeCode dtype, std::size_t n, std::size_t groups, void* keys);

  // Return how many of n keys of floats (doubles if wide) are at least `limit`, and write the sum of those.
  std::size_t (*tail)(const void* keys, bool wide, std::size_t n, std::uint64_t limit, double* sum);

  // Return the sum of the squares of the same keys.
  double (*tail_squares)(const void* keys, bool wide, std::size_t n, std::uint64_t limit);

  // Return how many of n aligned elements have key >= limit.
  std::size_t (*reaching)(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t limit);
};

}  // namespace hybridcomp
