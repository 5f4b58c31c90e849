// The index section of sparse messages.
//
// A uint32 count per block of 65,536 elements, then per block the indices within it, ascending: uint16 each,
// or a bitmap (bit i % 8 of byte i / 8) where that is smaller, as the count tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/common/kernels.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/common/status.hpp"
#include "codecs/sparse/sparse.hpp"

namespace hybridcomp {

constexpr std::size_t bitmap_bytes(std::size_t elements) { return (elements + 7) / 8; }

// Whether `count` indices of a block of m elements are stored as a bitmap.
constexpr bool is_bitmap(std::size_t count, std::size_t m) { return 2 * count > bitmap_bytes(m); }

// Bytes of a block's section.
constexpr std::size_t section_bytes(std::size_t count, std::size_t m) {
  return is_bitmap(count, m) ? bitmap_bytes(m) : 2 * count;
}

// Return the most bytes that the section of k indices out of n elements takes.
std::size_t index_bound(std::size_t n, std::size_t k);

// Write the section of a block of m elements with these `count` indices.
void write_section(const std::uint16_t* indices, std::size_t count, std::size_t m, std::uint8_t* section);

// Part of a message of n elements that holds k of them, by an index section of so many bytes.
struct SparsePart {
  const std::uint8_t* indices;
  std::size_t bytes;
  std::size_t k;
  const std::uint8_t* values;
};

// Check a part and write its values (k elements of `dtype`) to their places in `out`, zero elsewhere; with
// `add` (kFloat32 or kFloat64) add them. Returns a Status; `out` may be partly written when it is not kOk.
int scatter(const Kernels& kernels, const SparsePart& part, std::size_t n, DTypeCode dtype, std::uint8_t* out,
            bool add, int threads);

// Set the elements that a part holds to zero; they have `size` bytes. The part is our own and not checked.
void clear(const SparsePart& part, std::size_t n, std::size_t size, std::uint8_t* out);

// Check parts and write their sum, added to zero in this order, to `out` (n elements of kFloat32 or
// kFloat64). A block of `out` stays in the cache until all are added. Returns a Status; `out` may be partly
// written when it is not kOk.
int scatter_sum(const Kernels& kernels, const std::vector<SparsePart>& parts, std::size_t n, DTypeCode dtype,
                std::uint8_t* out, int threads);

}  // namespace hybridcomp
