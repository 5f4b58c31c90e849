// The index section of sparse messages.
//
// A uint32 count per block of 65,536 elements, then per block the indices within it, ascending: uint16 each,
// or a bitmap (bit i % 8 of byte i / 8) where that is smaller, which the count decides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.hpp"
#include "status.hpp"
#include "topk.hpp"

namespace hybridcomp {

constexpr std::size_t kIndexBlock = 65536;

// Most bytes that the section of k indices out of n elements takes.
std::size_t index_bound(std::size_t n, std::size_t k);

// Write the index section of the k elements of largest magnitude to `indices` (index_bound bytes) and those
// elements, ascending by index, to `values` (k elements of `dtype`). Returns the section's bytes.
std::size_t select_largest(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                           std::size_t k, std::uint8_t* indices, std::uint8_t* values);

// Check an index section of k indices and write `values` (k elements of `dtype`) to their places in `out`,
// zero elsewhere; with `add` (kFloat32 or kFloat64) add them. Returns a Status; `out` may be partly written
// when it is not kOk.
int scatter(const std::uint8_t* indices, std::size_t bytes, std::size_t n, std::size_t k,
            const std::uint8_t* values, DTypeCode dtype, std::uint8_t* out, bool add);

}  // namespace hybridcomp
