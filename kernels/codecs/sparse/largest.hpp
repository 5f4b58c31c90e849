// The k-th largest magnitude: radix selection on its bits.
#pragma once

#include "codecs/common/tile.hpp"
#include "codecs/sparse/sparse.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kChunk = 32;  // elements looked at together: most hold none of the selected
constexpr int kDigit = 11;          // bits per pass
constexpr int kSmallDigit = 8;      // bits for fewer than kFew elements, where empty bins would cost more
constexpr std::size_t kFew = 32768;
constexpr std::size_t kVeryFew = 4096;  // up to this many: bit after bit, in a vectorized pass each
constexpr std::size_t kHistograms = 4;  // used in turn, so that equal neighbours do not wait for each other

// Mask of a key's bits. `U` is the storage as an unsigned integer.
template <typename U>
struct Keys {
  static constexpr U kMask = static_cast<U>(~U(0)) >> 1;
  static constexpr int kBits = sizeof(U) * 8 - 1;
};

// Return a chunk of the source as integers, in place where it is aligned.
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
    for (auto& count : counts) std::memset(count, 0, bins * sizeof(count[0]));
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

// Return how many of n <= kVeryFew elements reach `limit`.
template <typename U>
std::size_t count_reaching(const std::uint8_t* src, std::size_t n, U limit) {
  U count = 0;  // a count of the elements' own width vectorizes
  for (std::size_t i = 0; i < n; ++i) {
    U x;
    std::memcpy(&x, src + i * sizeof(U), sizeof(U));
    count += (x & Keys<U>::kMask) >= limit;
  }
  return count;
}

// Copy those of n elements that reach `limit`, or those that do not, to `out` (which may be src).
template <typename U>
std::size_t keep(const std::uint8_t* src, std::size_t n, U limit, bool reaching, U* out) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < n; ++i) {
    U x;
    std::memcpy(&x, src + i * sizeof(U), sizeof(U));
    out[kept] = x;  // overwritten by the next if it is not kept
    kept += ((x & Keys<U>::kMask) >= limit) == reaching;
  }
  return kept;
}

// Do largest_of for n <= kVeryFew, by finding the key that k of them reach bit after bit. Elements that are
// known to lie above or below it are dropped once they are half of those left.
template <typename U>
Selection largest_of_few(const std::uint8_t* src, std::size_t n, std::size_t k) {
  U buffer[kVeryFew];
  U key = 0;
  for (int bit = Keys<U>::kBits - 1; bit >= 0; --bit) {
    const U next = static_cast<U>(key | U(1) << bit);
    const std::size_t count = count_reaching<U>(src, n, next);
    if (count == k) return {next, 0, 0};
    const bool reached = count > k;
    const std::size_t left = reached ? count : n - count;
    if (2 * left <= n) {
      n = keep<U>(src, n, next, reached, buffer);
      src = reinterpret_cast<const std::uint8_t*>(buffer);
      if (!reached) k -= count;
    }
    if (reached) key = next;
  }
  const std::uint64_t above = static_cast<std::uint64_t>(key) + 1;
  return {above, key, k - count_reaching<U>(src, n, static_cast<U>(above))};
}

// Select the k (1 .. n) elements of largest key, ties to the lower index.
template <typename U>
Selection largest_of(const std::uint8_t* src, std::size_t n, std::size_t k) {
  if (n <= kVeryFew) return largest_of_few<U>(src, n, k);
  std::uint64_t histogram[std::size_t(1) << kDigit];
  std::uint64_t need = k;  // elements still needed of those that share the prefix
  U prefix = 0;
  int shift = Keys<U>::kBits;
  while (shift > 0) {
    const int digit = n < kFew ? kSmallDigit : kDigit;
    const int width = shift < digit ? shift : digit;
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

}  // namespace
}  // namespace hybridcomp::HC_ISA
