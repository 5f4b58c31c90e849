// Exact top-k by radix selection on the magnitudes' bits; compiled once per instruction set.
#include "tile.hpp"
#include "topk.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kChunk = 32;      // elements looked at together: most hold none of the largest
constexpr int kDigit = 11;              // bits per pass
constexpr std::size_t kHistograms = 4;  // used in turn: equal neighbours then do not wait for each other

// Magnitudes as unsigned integers, ordered as the numbers are, NaN last; `U` is the storage as an integer.
template <typename U>
struct Keys {
  static constexpr U kMask = static_cast<U>(~U(0)) >> 1;
  static constexpr int kBits = sizeof(U) * 8 - 1;
};

// A chunk of the source as integers, in place where it is aligned.
template <typename U>
const U* chunk_at(const std::uint8_t* src, std::size_t at, std::size_t m, U* buffer) {
  const std::uint8_t* p = src + at * sizeof(U);
  if (aligned<U>(p)) return reinterpret_cast<const U*>(p);
  std::memcpy(buffer, p, m * sizeof(U));
  return buffer;
}

// Whether a whole chunk has no magnitude of at least `low`: one vectorized comparison for nearly all chunks.
template <typename U>
bool none_reaches(const U* x, U low) {
  U largest = 0;
  for (std::size_t i = 0; i < kChunk; ++i) {
    const U a = x[i] & Keys<U>::kMask;
    largest = a > largest ? a : largest;
  }
  return largest < low;
}

// Calls f(i) for the elements of a chunk of m whose magnitude is at least `low`, in order.
template <typename U, typename F>
void each_reaching(const U* x, std::size_t m, U low, F f) {
  if (m < kChunk) {
    for (std::size_t i = 0; i < m; ++i)
      if ((x[i] & Keys<U>::kMask) >= low) f(i);
    return;
  }
  if (none_reaches<U>(x, low)) return;
  std::uint8_t flags[kChunk];  // vectorized; then eight flags at a time, a step for each that is set
  for (std::size_t i = 0; i < kChunk; ++i) flags[i] = (x[i] & Keys<U>::kMask) >= low;
  for (std::size_t at = 0; at < kChunk; at += 8) {
    std::uint64_t set;
    std::memcpy(&set, flags + at, 8);
    for (; set; set &= set - 1) f(at + static_cast<std::size_t>(__builtin_ctzll(set)) / 8);
  }
}

// Count the digit at `shift` of the magnitudes whose higher bits are `prefix`.
template <typename U>
void count_digits(const std::uint8_t* src, std::size_t n, int shift, int width, U prefix, bool first,
                  std::uint64_t* histogram) {
  const std::size_t bins = std::size_t(1) << width;
  std::uint32_t counts[kHistograms][std::size_t(1) << kDigit];
  constexpr std::size_t kFlush = std::size_t(1) << 30;  // before a 32-bit count can overflow
  for (std::size_t b = 0; b < bins; ++b) histogram[b] = 0;
  for (std::size_t start = 0; start < n; start += kFlush) {
    const std::size_t end = start + smaller(kFlush, n - start);
    std::memset(counts, 0, sizeof(counts));
    U buffer[kChunk];
    for (std::size_t at = start; at < end; at += kChunk) {
      const std::size_t m = smaller(kChunk, end - at);
      const U* x = chunk_at<U>(src, at, m, buffer);
      if (first) {
        for (std::size_t i = 0; i < m; ++i) ++counts[i % kHistograms][(x[i] & Keys<U>::kMask) >> shift];
        continue;
      }
      if (m == kChunk && none_reaches<U>(x, static_cast<U>(prefix << (shift + width)))) continue;
      for (std::size_t i = 0; i < m; ++i) {
        const U a = x[i] & Keys<U>::kMask;
        if (static_cast<U>(a >> (shift + width)) == prefix)
          ++counts[i % kHistograms][(a >> shift) & (bins - 1)];
      }
    }
    for (std::size_t h = 0; h < kHistograms; ++h)
      for (std::size_t b = 0; b < bins; ++b) histogram[b] += counts[h][b];
  }
}

template <typename U>
Selection threshold_of(const std::uint8_t* src, std::size_t n, std::size_t k) {
  std::uint64_t histogram[std::size_t(1) << kDigit];
  std::uint64_t need = k;  // of the elements that share the prefix
  U prefix = 0;
  int shift = Keys<U>::kBits;
  while (shift > 0) {
    const int width = shift < kDigit ? shift : kDigit;
    const bool first = shift == Keys<U>::kBits;
    shift -= width;
    count_digits<U>(src, n, shift, width, prefix, first, histogram);
    std::size_t bin = (std::size_t(1) << width) - 1;
    while (bin && histogram[bin] < need) need -= histogram[bin--];
    prefix = static_cast<U>((first ? U(0) : static_cast<U>(prefix << width)) | bin);
    if (histogram[bin] == need) return {static_cast<std::uint64_t>(prefix) << shift, 0, 0};
  }
  return {static_cast<std::uint64_t>(prefix) + 1, prefix, need};
}

Selection topk_threshold(const void* src, DTypeCode dtype, std::size_t n, std::size_t k) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (dtype == kFloat32) return threshold_of<std::uint32_t>(from, n, k);
  if (dtype == kFloat64) return threshold_of<std::uint64_t>(from, n, k);
  return threshold_of<std::uint16_t>(from, n, k);
}

template <typename U>
std::size_t candidates(const std::uint8_t* src, std::size_t n, U low, U* keys, std::size_t capacity) {
  std::size_t count = 0;
  U buffer[kChunk];
  for (std::size_t at = 0; at < n; at += kChunk) {
    if (capacity - count < kChunk) return capacity + 1;
    const std::size_t m = smaller(kChunk, n - at);
    const U* x = chunk_at<U>(src, at, m, buffer);
    each_reaching<U>(x, m, low, [&](std::size_t i) { keys[count++] = x[i] & Keys<U>::kMask; });
  }
  return count;
}

std::size_t topk_candidates(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t low, void* keys,
                            std::size_t capacity) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (dtype == kFloat32)
    return candidates<std::uint32_t>(from, n, static_cast<std::uint32_t>(low),
                                     static_cast<std::uint32_t*>(keys), capacity);
  if (dtype == kFloat64)
    return candidates<std::uint64_t>(from, n, low, static_cast<std::uint64_t*>(keys), capacity);
  return candidates<std::uint16_t>(from, n, static_cast<std::uint16_t>(low),
                                   static_cast<std::uint16_t*>(keys), capacity);
}

template <typename U>
std::size_t collect(const std::uint8_t* src, std::size_t n, Selection* selection, std::uint16_t* indices) {
  const std::uint64_t all = selection->all;
  std::size_t count = 0;
  U buffer[kChunk];
  for (std::size_t at = 0; at < n; at += kChunk) {
    const std::uint64_t low = selection->ties ? selection->tie : all;
    if (low > Keys<U>::kMask) break;  // nothing is larger than the largest key
    const std::size_t m = smaller(kChunk, n - at);
    const U* x = chunk_at<U>(src, at, m, buffer);
    each_reaching<U>(x, m, static_cast<U>(low), [&](std::size_t i) {
      if ((x[i] & Keys<U>::kMask) < all) {  // a tie
        if (!selection->ties) return;
        --selection->ties;
      }
      indices[count++] = static_cast<std::uint16_t>(at + i);
    });
  }
  return count;
}

std::size_t topk_collect(const void* src, DTypeCode dtype, std::size_t n, Selection* selection,
                         std::uint16_t* indices) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (dtype == kFloat32) return collect<std::uint32_t>(from, n, selection, indices);
  if (dtype == kFloat64) return collect<std::uint64_t>(from, n, selection, indices);
  return collect<std::uint16_t>(from, n, selection, indices);
}

}  // namespace

extern const TopkKernels topk_kernels;
const TopkKernels topk_kernels = {topk_threshold, topk_candidates, topk_collect};

}  // namespace hybridcomp::HC_ISA
