#include "indices.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <new>

namespace hybridcomp {
namespace {

constexpr std::size_t bitmap_bytes(std::size_t elements) { return (elements + 7) / 8; }

// Whether `count` indices of a block of m elements are stored as a bitmap.
constexpr bool is_bitmap(std::size_t count, std::size_t m) { return 2 * count > bitmap_bytes(m); }

constexpr std::size_t section_bytes(std::size_t count, std::size_t m) {
  return is_bitmap(count, m) ? bitmap_bytes(m) : 2 * count;
}

void copy_element(std::uint8_t* dst, const std::uint8_t* src, std::size_t size) {
  switch (size) {  // constant sizes: a move each
    case 2:
      std::memcpy(dst, src, 2);
      break;
    case 4:
      std::memcpy(dst, src, 4);
      break;
    default:
      std::memcpy(dst, src, 8);
  }
}

template <typename T>
void add_element(std::uint8_t* dst, const std::uint8_t* src) {
  T a, b;
  std::memcpy(&a, dst, sizeof(T));
  std::memcpy(&b, src, sizeof(T));
  a += b;
  std::memcpy(dst, &a, sizeof(T));
}

void put(std::uint8_t* dst, const std::uint8_t* src, DTypeCode dtype, bool add) {
  if (!add)
    copy_element(dst, src, size_of(dtype));
  else if (dtype == kFloat64)
    add_element<double>(dst, src);
  else
    add_element<float>(dst, src);
}

std::uint16_t load16(const std::uint8_t* p) {
  std::uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

std::uint32_t load32(const std::uint8_t* p) {
  std::uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Check the section's lengths: what the counts say must be what is there.
int check_counts(const std::uint8_t* indices, std::size_t bytes, std::size_t n, std::size_t k) {
  const std::size_t blocks = blocks_of(n, kIndexBlock);
  if (bytes / 4 < blocks) return kBadLength;
  std::size_t total = 0, need = blocks * 4;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t m = std::min(kIndexBlock, n - b * kIndexBlock);
    const std::size_t count = load32(indices + 4 * b);
    if (count > m) return kBadIndexCount;
    total += count;
    need += section_bytes(count, m);
  }
  if (total != k) return kBadIndexCount;
  return need == bytes ? kOk : kBadLength;
}

// Check one block's section and put its values; `out` is the block's first element.
int scatter_block(const std::uint8_t* section, std::size_t count, std::size_t m, const std::uint8_t* values,
                  DTypeCode dtype, std::uint8_t* out, bool add) {
  const std::size_t size = size_of(dtype);
  if (!is_bitmap(count, m)) {
    std::size_t next = 0;  // the least index that may follow
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t index = load16(section + 2 * i);
      if (index < next) return kBadIndexOrder;
      if (index >= m) return kBadIndexRange;
      next = index + 1;
      put(out + index * size, values + i * size, dtype, add);
    }
    return kOk;
  }
  std::size_t found = 0;
  for (std::size_t byte = 0; byte < bitmap_bytes(m); ++byte) {
    for (unsigned bits = section[byte]; bits; bits &= bits - 1) {
      const std::size_t index = byte * 8 + static_cast<std::size_t>(std::countr_zero(bits));
      if (index >= m) return kBadIndexRange;
      if (found == count) return kBadBitmap;
      put(out + index * size, values + found * size, dtype, add);
      ++found;
    }
  }
  return found == count ? kOk : kBadBitmap;
}

// The threshold of the k largest of n. Where k is a small share, a sample first gives a lower limit that more
// than k elements reach, nearly always, and only those few are sorted out; the result is the same either way.
Selection threshold(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                    std::size_t k) {
  constexpr std::size_t kSample = 4096;
  if (n < 4 * kSample || k > n / 8) return kernels.topk->threshold(src, dtype, n, k);
  const std::size_t size = size_of(dtype);
  std::uint8_t sample[kSample * 8];
  for (std::size_t i = 0; i < kSample; ++i)
    copy_element(sample + i * size, src + n / kSample * i * size, size);
  // The sample's share of the k is about a Poisson number: four deviations and a few more are nearly never
  // short.
  const std::size_t share = kSample * k / n + 1;
  const std::size_t margin = 4 * static_cast<std::size_t>(__builtin_sqrt(static_cast<double>(share))) + 8;
  const Selection guess = kernels.topk->threshold(sample, dtype, kSample, share + margin);
  const std::uint64_t low = guess.ties ? guess.tie : guess.all;

  const std::size_t capacity = (share + 2 * margin) * (n / kSample + 1) + 4096;
  const std::unique_ptr<std::uint64_t[]> keys(new (std::nothrow) std::uint64_t[capacity * size / 8 + 1]);
  if (!keys) return kernels.topk->threshold(src, dtype, n, k);
  const std::size_t found = kernels.topk->candidates(src, dtype, n, low, keys.get(), capacity);
  if (found < k || found > capacity) return kernels.topk->threshold(src, dtype, n, k);
  return kernels.topk->threshold(keys.get(), dtype, found, k);
}

}  // namespace

std::size_t index_bound(std::size_t n, std::size_t k) {
  const std::size_t full = n / kIndexBlock;
  const std::size_t bitmaps = full * bitmap_bytes(kIndexBlock) + bitmap_bytes(n % kIndexBlock);
  return 4 * blocks_of(n, kIndexBlock) + (k < bitmaps ? std::min(2 * k, bitmaps) : bitmaps);
}

std::size_t select_largest(const Kernels& kernels, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                           std::size_t k, std::uint8_t* indices, std::uint8_t* values) {
  const std::size_t size = size_of(dtype);
  const std::size_t blocks = blocks_of(n, kIndexBlock);
  std::uint8_t* section = indices + 4 * blocks;
  Selection selection{~std::uint64_t(0), 0, 0};
  if (k) selection = threshold(kernels, src, dtype, n, k);
  std::uint16_t found[kIndexBlock];
  std::size_t total = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t m = std::min(kIndexBlock, n - b * kIndexBlock);
    const std::uint8_t* from = src + b * kIndexBlock * size;
    std::size_t count = k ? kernels.topk->collect(from, dtype, m, &selection, found) : 0;
    count = std::min(count, k - total);  // less only if another thread writes to src meanwhile
    total += count;
    const std::uint32_t stored = static_cast<std::uint32_t>(count);
    std::memcpy(indices + 4 * b, &stored, 4);
    for (std::size_t i = 0; i < count; ++i, values += size)
      copy_element(values, from + found[i] * size, size);
    if (is_bitmap(count, m)) {
      std::memset(section, 0, bitmap_bytes(m));
      for (std::size_t i = 0; i < count; ++i)
        section[found[i] / 8] = static_cast<std::uint8_t>(section[found[i] / 8] | (1u << (found[i] % 8)));
    } else if (count) {
      std::memcpy(section, found, 2 * count);
    }
    section += section_bytes(count, m);
  }
  return static_cast<std::size_t>(section - indices);
}

int scatter(const std::uint8_t* indices, std::size_t bytes, std::size_t n, std::size_t k,
            const std::uint8_t* values, DTypeCode dtype, std::uint8_t* out, bool add) {
  const int status = check_counts(indices, bytes, n, k);
  if (status != kOk) return status;
  const std::size_t size = size_of(dtype);
  const std::size_t blocks = blocks_of(n, kIndexBlock);
  const std::uint8_t* section = indices + 4 * blocks;
  if (!add && n) std::memset(out, 0, n * size);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t m = std::min(kIndexBlock, n - b * kIndexBlock);
    const std::size_t count = load32(indices + 4 * b);
    const int block_status =
        scatter_block(section, count, m, values, dtype, out + b * kIndexBlock * size, add);
    if (block_status != kOk) return block_status;
    values += count * size;
    section += section_bytes(count, m);
  }
  return kOk;
}

}  // namespace hybridcomp
