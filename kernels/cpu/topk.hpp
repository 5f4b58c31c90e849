// Kernels of exact top-k.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Exactly k elements of largest magnitude: those with magnitude >= `all`, and of those with magnitude ==
// `tie` the first `ties`.
struct Selection {
  std::uint64_t all;
  std::uint64_t tie;
  std::uint64_t ties;
};

struct TopkKernels {
  // The k (1 .. n) elements of largest magnitude, ties to the lower index. NaN is the largest.
  Selection (*threshold)(const void* src, DTypeCode dtype, std::size_t n, std::size_t k);

  // Write the magnitudes of at least `low` to `keys`, as integers of dtype's size, and return how many; if
  // they may be more than `capacity`, capacity + 1.
  std::size_t (*candidates)(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t low, void* keys,
                            std::size_t capacity);

  // Of one block of at most 65,536 elements write the selected indices, ascending, to `indices` and return
  // how many. `selection->ties` is counted down.
  std::size_t (*collect)(const void* src, DTypeCode dtype, std::size_t n, Selection* selection,
                         std::uint16_t* indices);
};

}  // namespace hybridcomp
