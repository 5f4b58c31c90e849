#include "codecs/sparse/select.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>

#include "codecs/sparse/fit.hpp"
#include "codecs/sparse/indices.hpp"
#include "hybridcomp/sparse.hpp"

namespace hybridcomp {
namespace {

constexpr std::uint64_t kEvery = 0;                 // a limit that all elements reach
constexpr std::uint64_t kNone = ~std::uint64_t(0);  // and one that no element reaches
constexpr Selection reaching_only(std::uint64_t limit) { return {limit, 0, 0}; }

// Keys, guessed from a sample, between which the k-th largest of n nearly always lies.
struct Guess {
  std::uint64_t low = kEvery;  // at least k elements reach it, and at most `most` or so
  std::uint64_t high = kNone;  // fewer than k reach it
  std::size_t most = 0;
};

Guess guess_largest(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                    std::size_t k) {
  constexpr std::size_t kMost = 16384, kAhead = 8;
  const std::size_t size = size_of(dtype);
  const std::size_t groups = std::clamp<std::size_t>(n / 128, 2048, kMost) / kGroupOfSample;
  const std::size_t sample = groups * kGroupOfSample;
  std::uint8_t elements[(kMost + kSlack) * 8];
  for (std::size_t g = 0; g < groups; ++g) {
    if (g + kAhead < groups) __builtin_prefetch(src + group_start(g + kAhead, groups, n) * size);
    std::memcpy(elements + g * kGroupOfSample * size, src + group_start(g, groups, n) * size,
                kGroupOfSample * size);
  }
  // The number of the k in the sample is about binomial: the margin is four deviations and a few more.
  const double share = static_cast<double>(k) / static_cast<double>(n);
  const double expected = share * static_cast<double>(sample);
  const double margin = 4 * __builtin_sqrt(expected * (1 - share)) + 8;
  Guess guess;
  std::size_t left = sample;
  const auto key_of_rank = [&](double rank) {
    const Selection s = kernels.sparse->largest(elements, dtype, left, static_cast<std::size_t>(rank));
    return s.ties ? s.tie : s.all;
  };
  if (expected + margin < static_cast<double>(sample)) {
    guess.low = key_of_rank(expected + margin + 1);
    Selection reaching = reaching_only(guess.low);  // the other limit is among them
    std::uint16_t indices[kMost + kSlack];
    left = kernels.sparse->collect(elements, dtype, sample, nullptr, &reaching, indices, elements);
  }
  if (expected > margin + 1) guess.high = key_of_rank(expected - margin);
  const double most = (expected + 3 * margin) / static_cast<double>(sample) * static_cast<double>(n);
  guess.most = most < static_cast<double>(n) ? static_cast<std::size_t>(most) : n;
  return guess;
}

}  // namespace

std::uint16_t* Selected::indices_of(const Block& block) const {
  const Range& range = ranges_[static_cast<std::size_t>(block.range)];
  return reinterpret_cast<std::uint16_t*>(range.indices.data()) + block.at;
}

std::uint8_t* Selected::values_of(const Block& block) const {
  const Range& range = ranges_[static_cast<std::size_t>(block.range)];
  return range.values.data() + block.at * size_of(dtype_);
}

std::size_t Selected::count() const {
  std::size_t total = 0;
  for (const Block& block : blocks_) total += block.count;
  return total;
}

std::size_t Selected::index_bytes() const {
  std::size_t total = 4 * blocks_of(n_, kIndexBlock);
  for (std::size_t b = 0; b < blocks_.size(); ++b)
    total += section_bytes(blocks_[b].count, std::min(kIndexBlock, n_ - b * kIndexBlock));
  return total;
}

bool Selected::collect(const Kernels& kernels, const std::uint8_t* src, Selection selection, std::size_t most,
                       int threads) {
  const std::size_t size = size_of(dtype_);
  // The first ties are counted from the front, so one thread takes all blocks in turn.
  const int ranges = selection.ties ? 1 : ranges_of(n_, kIndexBlock, threads);
  ranges_.resize(static_cast<std::size_t>(ranges));
  blocks_.resize(blocks_of(n_, kIndexBlock));
  std::atomic<std::size_t> total{0};
  std::atomic<bool> no_memory{false};
  split(n_, kIndexBlock, ranges, [&](int r, std::size_t begin, std::size_t end) {
    Range& range = ranges_[static_cast<std::size_t>(r)];
    Selection left = selection;
    std::size_t used = 0;
    for (std::size_t at = begin; at < end && total.load(std::memory_order_relaxed) <= most;
         at += kIndexBlock) {
      const std::size_t m = std::min(kIndexBlock, end - at);
      std::uint8_t *indices, *values;
      try {
        indices = range.indices.reserve((used + m + kSlack) * 2);
        values = range.values.reserve((used + m + kSlack) * size);
      } catch (const std::bad_alloc&) {  // an exception must not leave a thread
        no_memory = true;
        return;
      }
      const std::size_t count =
          kernels.sparse->collect(src + at * size, dtype_, m, nullptr, &left,
                                  reinterpret_cast<std::uint16_t*>(indices) + used, values + used * size);
      blocks_[at / kIndexBlock] = {static_cast<std::uint32_t>(count), r, used};
      used += count;
      total.fetch_add(count, std::memory_order_relaxed);
    }
  });
  if (no_memory) throw std::bad_alloc();
  return total <= most;
}

std::size_t Selected::reaching(const Kernels& kernels, std::uint64_t limit) const {
  std::size_t total = 0;
  for (const Block& block : blocks_)
    if (block.count) total += kernels.fit->reaching(values_of(block), dtype_, block.count, limit);
  return total;
}

void Selected::narrow(const Kernels& kernels, Selection selection) {
  for (Block& block : blocks_)
    block.count = static_cast<std::uint32_t>(kernels.sparse->collect(values_of(block), dtype_, block.count,
                                                                     indices_of(block), &selection,
                                                                     indices_of(block), values_of(block)));
}

Selection Selected::largest(const Kernels& kernels, std::size_t k, std::uint64_t high) const {
  const std::size_t size = size_of(dtype_), taken = count();
  Scratch scratch;
  for (const std::uint64_t limit : {high, kNone}) {
    std::size_t used = 0;  // elements that are not surely among the k
    for (const Block& block : blocks_) {
      std::uint8_t* const to = scratch.reserve((used + block.count + kSlack) * size) + used * size;
      if (limit == kNone) {
        std::memcpy(to, values_of(block), block.count * size);
        used += block.count;
      } else {
        used += kernels.sparse->below(values_of(block), dtype_, block.count, limit, to);
      }
    }
    const std::size_t sure = taken - used;
    if (sure < k) return kernels.sparse->largest(scratch.data(), dtype_, used, k - sure);
  }
  return reaching_only(kNone);  // not reached: no element is sure the second time
}

void Selected::write_indices(std::uint8_t* indices) const {
  std::uint8_t* section = indices + 4 * blocks_.size();
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    const std::size_t m = std::min(kIndexBlock, n_ - b * kIndexBlock);
    std::memcpy(indices + 4 * b, &block.count, 4);
    if (!block.count) continue;
    write_section(indices_of(block), block.count, m, section);
    section += section_bytes(block.count, m);
  }
}

void Selected::copy_values(std::uint8_t* out) const {
  const std::size_t size = size_of(dtype_);
  for (const Block& block : blocks_) {
    if (block.count) std::memcpy(out, values_of(block), block.count * size);
    out += block.count * size;
  }
}

std::uint8_t* Selected::values() {
  if (ranges_.empty()) return nullptr;
  Scratch& first = ranges_[0].values;
  if (joined_) return first.data();
  const std::size_t size = size_of(dtype_);
  std::uint8_t* to = first.reserve(count() * size);
  for (const Block& block : blocks_) {
    if (values_of(block) != to) std::memmove(to, values_of(block), block.count * size);
    to += block.count * size;
  }
  joined_ = true;
  return first.data();
}

Selected select_largest(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        std::size_t k, bool zeros, int threads) {
  constexpr std::size_t kSmall = 16384;
  const auto without_zeros = [&](Selection s) {
    if (zeros) return s;
    if (s.tie == 0) s.ties = 0;
    if (s.all == 0) s.all = 1;  // all elements were asked for
    return s;
  };
  Selected selected(dtype, n);
  if (n >= kSmall && k) {
    const Guess guess = guess_largest(kernels, src, dtype, n, k);
    if (selected.collect(kernels, src, reaching_only(guess.low), guess.most, threads) &&
        selected.count() >= k) {
      selected.narrow(kernels, without_zeros(selected.largest(kernels, k, guess.high)));
      return selected;
    }
    selected = Selected(dtype, n);  // the guess was wrong: look at all elements
  }
  const Selection selection =
      k ? without_zeros(kernels.sparse->largest(src, dtype, n, k)) : reaching_only(kNone);
  selected.collect(kernels, src, selection, n, threads);
  return selected;
}

namespace {

// Return the root mean square of the finite elements; 0 if there are none.
double root_mean_square(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        int threads) {
  struct Part {
    double squares;
    std::size_t not_finite;
  };
  std::vector<Part> parts(blocks_of(n, kIndexBlock));
  split(n, kIndexBlock, ranges_of(n, kIndexBlock, threads), [&](int, std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kIndexBlock) {
      Part& part = parts[at / kIndexBlock];
      part.squares = kernels.fit->squares(src + at * size_of(dtype), dtype, std::min(kIndexBlock, end - at),
                                          &part.not_finite);
    }
  });
  double sum = 0;  // adds the blocks' sums in their order
  std::size_t finite = n;
  for (const Part& part : parts) {
    sum += part.squares;
    finite -= part.not_finite;
  }
  return finite ? square_root(sum / static_cast<double>(finite)) : 0.0;
}

}  // namespace

Selected select_threshold(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                          double limit, bool relative, int threads) {
  const double unit = relative ? root_mean_square(kernels, src, dtype, n, threads) : 1.0;
  Selected selected(dtype, n);
  selected.collect(kernels, src, reaching_only(least_key(limit * unit, dtype)), n, threads);
  return selected;
}

}  // namespace hybridcomp
