#include "codecs/sketch/sketch.hpp"
#include "hybridcomp/bloom.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// Check a bitmap of n elements: no bit past the end. Returns how many bits are set.
std::size_t check_words(const Buffer& words, std::size_t n) {
  if (words.bytes() != words_of(n) * 8) Buffer::fail("words must hold a bit per element");
  std::size_t count = 0;
  for (std::size_t w = 0; w < words_of(n); ++w) {
    std::uint64_t word;
    std::memcpy(&word, words.data() + w * 8, 8);
    count += static_cast<std::size_t>(__builtin_popcountll(word));
  }
  if (bitmap_check(words.data(), n, count) != kOk) Buffer::fail("words has bits past the last element");
  return count;
}

// Return a checked shape. Sketches have fewer than 2^32 counters, of tensors of at most 2^32 blocks.
SketchShape shape_of(std::size_t lanes, std::uint32_t third, std::uint64_t seed) {
  if (lanes == 0 || lanes > 65536 || (lanes & (lanes - 1))) Buffer::fail("lanes must be a power of two");
  if (third == 0 || third > 0xFFFFFFFFu / 3 / lanes) Buffer::fail("third is out of range");
  return {lanes, third, seed};
}

// Return the checked shape of a part's filter: its elements and bits are whole words.
BloomShape filter_of(std::size_t part, std::uint32_t bits, std::uint32_t hashes, std::uint64_t seed) {
  if (part == 0 || part % 64 || part > 0xFFFFFFFFu) Buffer::fail("part must be a multiple of 64");
  if (bits == 0 || bits % 64) Buffer::fail("bits must be a multiple of 64");
  if (hashes == 0 || hashes > kMostBloomHashes) Buffer::fail("hashes is out of range");
  return {part, bits, hashes, seed};
}

std::uint64_t* filter_words(const Buffer& buffer, const BloomShape& shape, std::size_t n) {
  if (buffer.bytes() != shape.words(n) * 8 || reinterpret_cast<std::uintptr_t>(buffer.data()) % 8)
    Buffer::fail("filter must hold the bits of all parts, aligned");
  return reinterpret_cast<std::uint64_t*>(buffer.data());
}

void check_blocks(std::size_t n, std::size_t lanes) {
  if (n / lanes > 0xFFFFFFFFu) Buffer::fail("lanes is too small for so many elements");
}

// Return the aligned counters of a sketch.
void* counters_of(const Buffer& buffer, const SketchShape& shape, std::size_t size) {
  if (buffer.bytes() != shape.counters() * size || reinterpret_cast<std::uintptr_t>(buffer.data()) % size)
    Buffer::fail("counters must be one per row and lane, aligned");
  return buffer.data();
}

std::size_t mask(nb::handle src, int dtype, nb::handle words) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(src, false), to(words, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() != words_of(n) * 8) Buffer::fail("words must hold a bit per element");
  nb::gil_scoped_release release;
  return sketch_mask(kernels(), from.data(), size_of(type), n, thread_count(), to.data());
}

std::size_t count(nb::handle words, std::size_t n) { return check_words(Buffer(words, false), n); }

void gather(nb::handle words, nb::handle src, int dtype, nb::handle values) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer bitmap(words, false), from(src, false), to(values, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() != check_words(bitmap, n) * size_of(type)) Buffer::fail("values must be one per bit");
  nb::gil_scoped_release release;
  bitmap_gather(bitmap.data(), n, from.data(), size_of(type), to.data());
}

int scatter(nb::handle words, nb::handle values, nb::handle out, int dtype, bool add) {
  const DTypeCode type = add ? sum_dtype(dtype) : float_dtype(dtype);
  const Buffer bitmap(words, false), value(values, false), to(out, true);
  const std::size_t n = to.elements(size_of(type), "out");
  if (bitmap.bytes() != words_of(n) * 8) Buffer::fail("words must hold a bit per element");
  nb::gil_scoped_release release;
  const int status = bitmap_check(bitmap.data(), n, value.bytes() / size_of(type));
  if (status == kOk) bitmap_scatter(bitmap.data(), n, value.data(), type, to.data(), add);
  return status;
}

std::size_t fullest(nb::handle words, std::size_t n, std::size_t lanes) {
  const Buffer bitmap(words, false);
  check_words(bitmap, n);
  shape_of(lanes, 1, 0);
  nb::gil_scoped_release release;
  return sketch_fullest(bitmap.data(), n, lanes);
}

void fold(nb::handle words, nb::handle src, int dtype, std::size_t lanes, std::uint32_t third,
          std::uint64_t seed, nb::handle counters) {
  const DTypeCode type = float_dtype(dtype);
  const SketchShape shape = shape_of(lanes, third, seed);
  const Buffer bitmap(words, false), from(src, false), to(counters, true);
  const std::size_t n = from.elements(size_of(type), "src");
  check_words(bitmap, n);
  void* sums = counters_of(to, shape, type == kFloat64 ? 8 : 4);
  nb::gil_scoped_release release;
  sketch_fold(bitmap.data(), n, from.data(), type, shape, sums);
}

std::size_t peel(nb::handle words, std::size_t lanes, std::uint32_t third, std::uint64_t seed,
                 nb::handle counters, nb::handle out, int dtype, bool zeros) {
  const DTypeCode type = sum_dtype(dtype);
  const SketchShape shape = shape_of(lanes, third, seed);
  const Buffer bitmap(words, false), sums(counters, true), to(out, true);
  const std::size_t n = to.elements(size_of(type), "out");
  check_words(bitmap, n);
  check_blocks(n, lanes);
  void* at = counters_of(sums, shape, size_of(type));
  if (reinterpret_cast<std::uintptr_t>(to.data()) % size_of(type)) Buffer::fail("out must be aligned");
  nb::gil_scoped_release release;
  return sketch_peel(bitmap.data(), n, shape, at, to.data(), type == kFloat64, zeros);
}

std::size_t stuck(nb::handle words, std::size_t n, std::size_t lanes, std::uint32_t third,
                  std::uint64_t seed) {
  const SketchShape shape = shape_of(lanes, third, seed);
  const Buffer bitmap(words, false);
  check_words(bitmap, n);
  check_blocks(n, lanes);
  nb::gil_scoped_release release;
  return sketch_peel(bitmap.data(), n, shape, nullptr, nullptr, false, false);
}

void insert(nb::handle words, std::size_t n, std::size_t part, std::uint32_t bits, std::uint32_t hashes,
            std::uint64_t seed, nb::handle filter) {
  const BloomShape shape = filter_of(part, bits, hashes, seed);
  const Buffer bitmap(words, false), to(filter, true);
  check_words(bitmap, n);
  std::uint64_t* const set = filter_words(to, shape, n);
  nb::gil_scoped_release release;
  bloom_insert(bitmap.data(), n, shape, thread_count(), set);
}

std::size_t query(nb::handle filter, std::size_t n, std::size_t part, std::uint32_t bits,
                  std::uint32_t hashes, std::uint64_t seed, nb::handle words) {
  const BloomShape shape = filter_of(part, bits, hashes, seed);
  const Buffer from(filter, false), to(words, true);
  if (to.bytes() != words_of(n) * 8) Buffer::fail("words must hold a bit per element");
  const std::uint64_t* const set = filter_words(from, shape, n);
  nb::gil_scoped_release release;
  return bloom_query(kernels(), set, n, shape, thread_count(), to.data());
}

}  // namespace

void bind_sketch(nb::module_& m) {
  m.def("sketch_mask", &mask, "src"_a, "dtype"_a, "words"_a);
  m.def("sketch_count", &count, "words"_a, "n"_a);
  m.def("sketch_gather", &gather, "words"_a, "src"_a, "dtype"_a, "values"_a);
  m.def("sketch_scatter", &scatter, "words"_a, "values"_a, "out"_a, "dtype"_a, "add"_a);
  m.def("sketch_fullest", &fullest, "words"_a, "n"_a, "lanes"_a);
  m.def("sketch_fold", &fold, "words"_a, "src"_a, "dtype"_a, "lanes"_a, "third"_a, "seed"_a, "counters"_a);
  m.def("sketch_peel", &peel, "words"_a, "lanes"_a, "third"_a, "seed"_a, "counters"_a, "out"_a, "dtype"_a,
        "zeros"_a);
  m.def("bloom_insert", &insert, "words"_a, "n"_a, "part"_a, "bits"_a, "hashes"_a, "seed"_a, "filter"_a);
  m.def("bloom_query", &query, "filter"_a, "n"_a, "part"_a, "bits"_a, "hashes"_a, "seed"_a, "words"_a);
  m.def("sketch_stuck", &stuck, "words"_a, "n"_a, "lanes"_a, "third"_a, "seed"_a);
}

}  // namespace hybridcomp
