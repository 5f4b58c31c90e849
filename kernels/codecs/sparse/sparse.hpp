// Kernels of the sparse codecs. A key is an element's magnitude as an integer of its size: ordered as the
// numbers are, infinity above them, NaN above infinity.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// Elements with key >= `all`, and of those with key == `tie` (below `all`) the first `ties`.
struct Selection {
  std::uint64_t all;
  std::uint64_t tie;
  std::uint64_t ties;
};

constexpr std::size_t kIndexBlock = 65536;  // elements that share a count in an index section
constexpr std::size_t kSlack = 16;          // elements that may be written after the last one selected

struct SparseKernels {
  // Select the k (1 .. n) elements of largest key, ties to the lower index: radix selection.
  Selection (*largest)(const void* src, DTypeCode dtype, std::size_t n, std::size_t k);

  // Write the selected ones of m <= kIndexBlock elements to `values` and their indices (0, 1, ..; or those of
  // `from`, one for each element, if it is not null) to `indices`; return how many. Both have room for m +
  // kSlack; they may be src and from themselves. `selection->ties` is counted down.
  std::size_t (*collect)(const void* src, DTypeCode dtype, std::size_t m, const std::uint16_t* from,
                         Selection* selection, std::uint16_t* indices, void* values);

  // Write the elements with key < limit to `values` (room for n + kSlack); return how many.
  std::size_t (*below)(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t limit, void* values);

  // Write the `count` values of a bitmap (bit i % 8 of byte i / 8; `count` of its bits are set, none past m)
  // to their places among m elements, zero elsewhere; with `add` (kFloat32 or kFloat64) add them.
  void (*expand)(const std::uint8_t* bitmap, std::size_t m, const void* values, std::size_t count,
                 DTypeCode dtype, void* out, bool add);
};

}  // namespace hybridcomp
