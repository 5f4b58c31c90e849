// Sparse tensors by a bitmap of their non-zeros, and the count sketch that sums them (see
// hybridcomp/codecs/linear/sketch.py). A bitmap has bit i % 64 of word i / 64 for element i, and no bit past
// the last element; an element is zero if all its bits are (so -0 is not).
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"

namespace hybridcomp {

// Layout of a Bloom filter: each `part` elements (a multiple of 64) have `bits` bits of their own (a multiple
// of 64), of which an element has `hashes` (1 .. kMostBloomHashes). The filter knows elements by their place
// in their part.
struct BloomShape {
  std::size_t part;
  std::uint32_t bits;
  std::uint32_t hashes;
  std::uint64_t seed;
  std::size_t parts(std::size_t n) const { return n / part + (n % part != 0); }
  std::size_t words(std::size_t n) const { return parts(n) * (bits / 64); }
};

struct SketchKernels {
  // Write the bitmap of `n` elements of `size` bytes (2, 4 or 8); n is whole words of 64 but at the end.
  // Returns how many bits are set.
  std::size_t (*mask)(const void* src, std::size_t size, std::size_t n, std::uint8_t* words);
  // Write the bitmap of the elements of one part that a Bloom filter may hold. Returns how many bits are set.
  std::size_t (*query)(const std::uint64_t* filter, const BloomShape& shape, std::size_t n,
                       std::uint8_t* words);
};

constexpr std::size_t words_of(std::size_t n) { return n / 64 + (n % 64 != 0); }

std::size_t sketch_mask(const Kernels& k, const std::uint8_t* src, std::size_t size, std::size_t n,
                        int threads, std::uint8_t* words);

// Whether a bitmap of n elements has k bits, none past the end; returns a Status.
int bitmap_check(const std::uint8_t* words, std::size_t n, std::size_t k);

// Pack the elements of a checked bitmap; and write packed values of `dtype` to their places, zero elsewhere,
// or with `add` (kFloat32 or kFloat64) add them to the values there.
void bitmap_gather(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, std::size_t size,
                   std::uint8_t* values);
void bitmap_scatter(const std::uint8_t* words, std::size_t n, const std::uint8_t* values, DTypeCode dtype,
                    std::uint8_t* out, bool add);

// Set the bits of the elements of a checked bitmap in a filter; and write the bitmap of the n elements that
// the filter may hold: all that were put in, and some others. Returns how many bits of it are set.
void bloom_insert(const std::uint8_t* words, std::size_t n, const BloomShape& shape, int threads,
                  std::uint64_t* filter);
std::size_t bloom_query(const Kernels& k, const std::uint64_t* filter, std::size_t n, const BloomShape& shape,
                        int threads, std::uint8_t* words);

// Layout of a sketch: element i is in lane i % lanes of block i / lanes; each of three hashes has `third`
// rows; a row has a counter per lane.
struct SketchShape {
  std::size_t lanes;
  std::uint32_t third;
  std::uint64_t seed;
  std::size_t counters() const { return 3 * static_cast<std::size_t>(third) * lanes; }
};

// Return the largest number of elements in any lane.
std::size_t sketch_fullest(const std::uint8_t* words, std::size_t n, std::size_t lanes);

// Add a tensor's non-zeros to `counters`: float, double for kFloat64; aligned.
void sketch_fold(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, DTypeCode dtype,
                 const SketchShape& shape, void* counters);

// Peel: an element that is alone in one of its counters is read there and taken out of its other two, until
// there is none. `counters` (float; double if `wide`) are used up; elements that remain get the median of
// their three estimates. Writes the elements of the bitmap to `out`. With `counters` null it only counts.
// With `zeros` the bitmap may have elements that no rank added: a value that may be the rounding residue of
// values taken out of its counter is a zero. Returns how many elements remained.
std::size_t sketch_peel(const std::uint8_t* words, std::size_t n, const SketchShape& shape, void* counters,
                        void* out, bool wide, bool zeros);

}  // namespace hybridcomp
