// Sketches, in code that gains nothing from an instruction set: each non-zero is a memory access of its own.
#include "codecs/sketch/sketch.hpp"

#include <cmath>
#include <cstring>
#include <vector>

#include "codecs/common/parallel.hpp"
#include "hybridcomp/bloom.hpp"
#include "hybridcomp/sketch.hpp"

namespace hybridcomp {
namespace {

std::uint64_t word_at(const std::uint8_t* words, std::size_t w) {
  std::uint64_t word;
  std::memcpy(&word, words + w * 8, 8);
  return word;
}

// Call f(i) for every element of the bitmap, ascending.
template <typename F>
void each(const std::uint8_t* words, std::size_t n, F f) {
  for (std::size_t w = 0; w < words_of(n); ++w)
    for (std::uint64_t word = word_at(words, w); word; word &= word - 1)
      f(w * 64 + static_cast<std::size_t>(__builtin_ctzll(word)));
}

template <typename U>
void gather_all(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, std::uint8_t* values) {
  each(words, n, [&](std::size_t i) {
    std::memcpy(values, src + i * sizeof(U), sizeof(U));
    values += sizeof(U);
  });
}

template <typename U>
void scatter_all(const std::uint8_t* words, std::size_t n, const std::uint8_t* values, std::uint8_t* out) {
  for (std::size_t w = 0; w < words_of(n); ++w) {
    std::uint8_t* const to = out + w * 64 * sizeof(U);
    std::memset(to, 0, std::min<std::size_t>(64, n - w * 64) * sizeof(U));
    for (std::uint64_t word = word_at(words, w); word; word &= word - 1, values += sizeof(U))
      std::memcpy(to + static_cast<std::size_t>(__builtin_ctzll(word)) * sizeof(U), values, sizeof(U));
  }
}

template <typename T>
void add_all(const std::uint8_t* words, std::size_t n, const std::uint8_t* values, std::uint8_t* out) {
  each(words, n, [&](std::size_t i) {
    T sum, value;
    std::memcpy(&sum, out + i * sizeof(T), sizeof(T));
    std::memcpy(&value, values, sizeof(T));
    sum = quieted(sum + value);
    std::memcpy(out + i * sizeof(T), &sum, sizeof(T));
    values += sizeof(T);
  });
}

// Return one element of a tensor in its computing type.
template <typename T>
T load(const std::uint8_t* src, DTypeCode dtype, std::size_t i) {
  if constexpr (sizeof(T) == 8) {
    T x;
    std::memcpy(&x, src + i * 8, 8);
    return x;
  } else if (dtype == kFloat32) {
    T x;
    std::memcpy(&x, src + i * 4, 4);
    return x;
  } else {
    std::uint16_t h;
    std::memcpy(&h, src + i * 2, 2);
    return float_of(dtype == kFloat16 ? half_to_float_bits(h) : bfloat_to_float_bits(h));
  }
}

// The three places of one element after another; hashes once per block.
class Places {
 public:
  explicit Places(const SketchShape& shape)
      : shape_(shape), shift_(static_cast<unsigned>(__builtin_ctzll(shape.lanes))) {
    for (int h = 0; h < kSketchHashes; ++h) key_[h] = sketch_key(shape.seed, h);
  }

  void find(std::size_t i) {
    const std::uint64_t block = i >> shift_;
    if (block != block_) {
      block_ = block;
      for (int h = 0; h < kSketchHashes; ++h) {
        const SketchPlace place = sketch_place(key_[h], static_cast<std::uint32_t>(block), shape_.third, h);
        row_[h] = static_cast<std::size_t>(place.row) << shift_;
        negative_[h] = place.negative;
      }
    }
    lane_ = i & (shape_.lanes - 1);
  }
  std::size_t counter(int h) const { return row_[h] + lane_; }
  bool negative(int h) const { return negative_[h]; }

 private:
  const SketchShape shape_;
  const unsigned shift_;
  RandomKey key_[kSketchHashes];
  std::uint64_t block_ = ~std::uint64_t(0);
  std::size_t row_[kSketchHashes] = {}, lane_ = 0;
  bool negative_[kSketchHashes] = {};
};

template <typename T>
void fold_all(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, DTypeCode dtype,
              const SketchShape& shape, T* counters) {
  Places places(shape);
  each(words, n, [&](std::size_t i) {
    places.find(i);
    const T x = load<T>(src, dtype, i);
    for (int h = 0; h < kSketchHashes; ++h)
      counters[places.counter(h)] += sketch_signed(x, places.negative(h));
  });
}

// Members of a counter: how many elements, and the blocks they belong to, XOR-ed. With one element that is
// its block, so that it need not be searched for.
struct Cell {
  std::uint32_t members, blocks;
};

// Whether a value read from a counter may be nothing but the rounding of larger ones that were taken out of
// it: 2^-18 (double: 2^-47) of the largest, 64 units of its last place. (NaN is not.)
template <typename T>
bool is_residue(T x, T largest) {
  constexpr T kShare = sizeof(T) == 8 ? T(0x1p-47) : T(0x1p-18);
  return magnitude(x) < Real<T>::kInfinity && std::abs(x) <= largest * kShare;
}

// Peel as sketch_peel does; with `counters` and `out` null only the structure.
template <typename T>
std::size_t peel_all(const std::uint8_t* words, std::size_t n, const SketchShape& shape, T* counters, T* out,
                     bool zeros) {
  const auto shift = static_cast<unsigned>(__builtin_ctzll(shape.lanes));
  std::vector<Cell> cells(shape.counters());
  std::size_t remaining = 0;
  Places places(shape);
  each(words, n, [&](std::size_t i) {
    places.find(i);
    for (int h = 0; h < kSketchHashes; ++h) {
      Cell& cell = cells[places.counter(h)];
      ++cell.members;
      cell.blocks ^= static_cast<std::uint32_t>(i >> shift);
    }
    ++remaining;
  });

  // The queue is first in, first out: an element is taken from the counter that needs the fewest subtractions
  // before it. A counter comes to one member once at most.
  std::vector<std::uint32_t> queue;
  queue.reserve(cells.size());
  for (std::size_t c = 0; c < cells.size(); ++c)
    if (cells[c].members == 1) queue.push_back(static_cast<std::uint32_t>(c));
  std::vector<std::uint64_t> left(counters ? words_of(n) : 0);
  if (!left.empty()) std::memcpy(left.data(), words, left.size() * 8);
  std::vector<T> largest(zeros ? cells.size()
                               : 0);  // largest magnitude taken out of a counter, or read with it
  for (std::size_t at = 0; at < queue.size(); ++at) {
    const std::size_t from = queue[at];
    if (cells[from].members != 1) continue;  // its element was alone elsewhere, too
    const std::size_t block = cells[from].blocks;
    const std::size_t i = (block << shift) | (from & (shape.lanes - 1));
    places.find(i);
    T x = 0;
    if (counters) {
      bool negative = false;
      for (int h = 0; h < kSketchHashes; ++h)
        if (places.counter(h) == from) negative = places.negative(h);
      x = sketch_signed(counters[from], negative);
      if (zeros && is_residue(x, largest[from])) x = 0;
      out[i] = x;
      left[i / 64] &= ~(std::uint64_t(1) << (i % 64));
    }
    const T behind = zeros && x != 0 ? std::max(std::abs(x), largest[from]) : T(0);
    for (int h = 0; h < kSketchHashes; ++h) {
      const std::size_t c = places.counter(h);
      if (counters) counters[c] -= sketch_signed(x, places.negative(h));
      if (zeros) largest[c] = std::max(largest[c], behind);
      cells[c].blocks ^= static_cast<std::uint32_t>(block);
      if (--cells[c].members == 1) queue.push_back(static_cast<std::uint32_t>(c));
    }
    --remaining;
  }
  if (counters && remaining) {
    each(reinterpret_cast<const std::uint8_t*>(left.data()), n, [&](std::size_t i) {
      places.find(i);
      T x[kSketchHashes];
      for (int h = 0; h < kSketchHashes; ++h)
        x[h] = sketch_signed(counters[places.counter(h)], places.negative(h));
      out[i] = sketch_median(x[0], x[1], x[2]);
    });
  }
  return remaining;
}

}  // namespace

std::size_t sketch_mask(const Kernels& k, const std::uint8_t* src, std::size_t size, std::size_t n,
                        int threads, std::uint8_t* words) {
  std::size_t counts[kMaxThreads] = {};
  const int ranges = ranges_of(n, 64, threads);
  split(n, 64, ranges, [&](int r, std::size_t begin, std::size_t end) {
    counts[r] = k.sketch->mask(src + begin * size, size, end - begin, words + begin / 64 * 8);
  });
  std::size_t count = 0;
  for (int r = 0; r < ranges; ++r) count += counts[r];
  return count;
}

int bitmap_check(const std::uint8_t* words, std::size_t n, std::size_t k) {
  if (n % 64 && word_at(words, words_of(n) - 1) >> (n % 64)) return kBadIndexRange;
  std::size_t count = 0;
  for (std::size_t w = 0; w < words_of(n); ++w)
    count += static_cast<std::size_t>(__builtin_popcountll(word_at(words, w)));
  return count == k ? kOk : kBadBitmap;
}

void bitmap_gather(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, std::size_t size,
                   std::uint8_t* values) {
  if (size == 2)
    gather_all<std::uint16_t>(words, n, src, values);
  else if (size == 4)
    gather_all<std::uint32_t>(words, n, src, values);
  else
    gather_all<std::uint64_t>(words, n, src, values);
}

void bitmap_scatter(const std::uint8_t* words, std::size_t n, const std::uint8_t* values, DTypeCode dtype,
                    std::uint8_t* out, bool add) {
  if (add && dtype == kFloat64)
    add_all<double>(words, n, values, out);
  else if (add)
    add_all<float>(words, n, values, out);
  else if (size_of(dtype) == 2)
    scatter_all<std::uint16_t>(words, n, values, out);
  else if (size_of(dtype) == 4)
    scatter_all<std::uint32_t>(words, n, values, out);
  else
    scatter_all<std::uint64_t>(words, n, values, out);
}

std::size_t sketch_fullest(const std::uint8_t* words, std::size_t n, std::size_t lanes) {
  std::vector<std::size_t> counts(lanes);
  each(words, n, [&](std::size_t i) { ++counts[i & (lanes - 1)]; });
  return *std::max_element(counts.begin(), counts.end());
}

void sketch_fold(const std::uint8_t* words, std::size_t n, const std::uint8_t* src, DTypeCode dtype,
                 const SketchShape& shape, void* counters) {
  if (dtype == kFloat64)
    fold_all<double>(words, n, src, dtype, shape, static_cast<double*>(counters));
  else
    fold_all<float>(words, n, src, dtype, shape, static_cast<float*>(counters));
}

std::size_t sketch_peel(const std::uint8_t* words, std::size_t n, const SketchShape& shape, void* counters,
                        void* out, bool wide, bool zeros) {
  if (wide)
    return peel_all(words, n, shape, static_cast<double*>(counters), static_cast<double*>(out), zeros);
  return peel_all(words, n, shape, static_cast<float*>(counters), static_cast<float*>(out), zeros);
}

void bloom_insert(const std::uint8_t* words, std::size_t n, const BloomShape& shape, int threads,
                  std::uint64_t* filter) {
  const BloomKeys keys = bloom_keys(shape.seed);
  split(n, shape.part, ranges_of(n, shape.part, threads), [&](int, std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += shape.part) {
      std::uint64_t* const to = filter + shape.words(at);
      each(words + at / 8, std::min(shape.part, end - at), [&](std::size_t i) {
        BloomProbes probes = bloom_probes(keys, static_cast<std::uint32_t>(i));
        for (std::uint32_t h = 0; h < shape.hashes; ++h, probes.at += probes.step) {
          const std::uint32_t bit = bloom_bit(probes.at, shape.bits);
          to[bit / 64] |= std::uint64_t(1) << (bit % 64);
        }
      });
    }
  });
}

std::size_t bloom_query(const Kernels& k, const std::uint64_t* filter, std::size_t n, const BloomShape& shape,
                        int threads, std::uint8_t* words) {
  std::size_t counts[kMaxThreads] = {};
  const int ranges = ranges_of(n, shape.part, threads);
  split(n, shape.part, ranges, [&](int r, std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += shape.part)
      counts[r] +=
          k.sketch->query(filter + shape.words(at), shape, std::min(shape.part, end - at), words + at / 8);
  });
  std::size_t count = 0;
  for (int r = 0; r < ranges; ++r) count += counts[r];
  return count;
}

}  // namespace hybridcomp
