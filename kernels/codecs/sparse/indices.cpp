#include "codecs/sparse/indices.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {
namespace {

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

// Check the section's lengths: the counts must add up to its bytes and to k.
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

// Whether a list of indices is strictly ascending and ends before m.
int check_list(const std::uint8_t* section, std::size_t count, std::size_t m) {
  if (!count) return kOk;
  bool ascending = true;
  for (std::size_t i = 1; i < count; ++i) ascending &= load16(section + 2 * i - 2) < load16(section + 2 * i);
  if (!ascending) return kBadIndexOrder;
  return load16(section + 2 * count - 2) < m ? kOk : kBadIndexRange;
}

// Whether a bitmap has `count` bits set, none of them past its m elements.
int check_bitmap(const std::uint8_t* section, std::size_t count, std::size_t m) {
  if (m % 8 && section[m / 8] >> (m % 8)) return kBadIndexRange;
  std::size_t found = 0, at = 0;
  for (; at + 8 <= bitmap_bytes(m); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, section + at, 8);
    found += static_cast<std::size_t>(std::popcount(word));
  }
  for (; at < bitmap_bytes(m); ++at) found += static_cast<std::size_t>(std::popcount(section[at]));
  return found == count ? kOk : kBadBitmap;
}

// Write the values of a list to their places; T is an unsigned integer, or the type to add in.
template <typename T, bool kAdd>
void put_list(const std::uint8_t* section, std::size_t count, const std::uint8_t* values, std::uint8_t* out) {
  constexpr std::size_t kAhead = 32;  // out is not in the cache, and its next places are known
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAhead < count) __builtin_prefetch(out + load16(section + 2 * (i + kAhead)) * sizeof(T), 1);
    std::uint8_t* const place = out + load16(section + 2 * i) * sizeof(T);
    T value;
    std::memcpy(&value, values + i * sizeof(T), sizeof(T));
    if constexpr (kAdd) {
      T sum;
      std::memcpy(&sum, place, sizeof(T));
      value = quieted(sum + value);
    }
    std::memcpy(place, &value, sizeof(T));
  }
}

// Check one block's section and write its values; `out` is the block's first element.
int scatter_block(const Kernels& kernels, const std::uint8_t* section, std::size_t count, std::size_t m,
                  const std::uint8_t* values, DTypeCode dtype, std::uint8_t* out, bool add) {
  if (is_bitmap(count, m)) {
    const int status = check_bitmap(section, count, m);
    if (status == kOk) kernels.sparse->expand(section, m, values, count, dtype, out, add);
    return status;
  }
  const int status = check_list(section, count, m);
  if (status != kOk) return status;
  if (!add) std::memset(out, 0, m * size_of(dtype));
  if (add && dtype == kFloat64)
    put_list<double, true>(section, count, values, out);
  else if (add)
    put_list<float, true>(section, count, values, out);
  else if (dtype == kFloat64)
    put_list<std::uint64_t, false>(section, count, values, out);
  else if (dtype == kFloat32)
    put_list<std::uint32_t, false>(section, count, values, out);
  else
    put_list<std::uint16_t, false>(section, count, values, out);
  return kOk;
}

// Cursor over the blocks of a part whose counts are checked.
class Cursor {
 public:
  Cursor(const SparsePart& part, std::size_t n, DTypeCode dtype)
      : counts_(part.indices),
        section_(part.indices + 4 * blocks_of(n, kIndexBlock)),
        value_(part.values),
        left_(n),
        dtype_(dtype) {}

  // Pass over the blocks before element `end`, a multiple of kIndexBlock.
  void skip(std::size_t end) {
    for (std::size_t at = 0; at < end; at += kIndexBlock) pass();
  }

  // Check the next block and write its values; `out` is its first element. Returns a Status.
  int put(const Kernels& kernels, std::uint8_t* out, bool add) {
    const int status = scatter_block(kernels, section_, count(), elements(), value_, dtype_, out, add);
    pass();
    return status;
  }

 private:
  std::size_t count() const { return load32(counts_); }
  std::size_t elements() const { return std::min(kIndexBlock, left_); }

  void pass() {
    value_ += count() * size_of(dtype_);
    section_ += section_bytes(count(), elements());
    left_ -= elements();
    counts_ += 4;
  }

  const std::uint8_t *counts_, *section_, *value_;
  std::size_t left_;
  DTypeCode dtype_;
};

}  // namespace

std::size_t index_bound(std::size_t n, std::size_t k) {
  const std::size_t full = n / kIndexBlock;
  const std::size_t bitmaps = full * bitmap_bytes(kIndexBlock) + bitmap_bytes(n % kIndexBlock);
  return 4 * blocks_of(n, kIndexBlock) + (k < bitmaps ? std::min(2 * k, bitmaps) : bitmaps);
}

void write_section(const std::uint16_t* indices, std::size_t count, std::size_t m, std::uint8_t* section) {
  if (!is_bitmap(count, m)) {
    std::memcpy(section, indices, 2 * count);
    return;
  }
  std::uint8_t flags[kIndexBlock + 8];  // a byte each, then eight of them packed by one multiplication
  std::memset(flags, 0, bitmap_bytes(m) * 8);
  for (std::size_t i = 0; i < count; ++i) flags[indices[i]] = 1;
  for (std::size_t byte = 0; byte < bitmap_bytes(m); ++byte) {
    std::uint64_t eight;
    std::memcpy(&eight, flags + 8 * byte, 8);
    section[byte] = static_cast<std::uint8_t>((eight * 0x0102040810204080ull) >> 56);
  }
}

int scatter(const Kernels& kernels, const SparsePart& part, std::size_t n, DTypeCode dtype, std::uint8_t* out,
            bool add, int threads) {
  const int status = check_counts(part.indices, part.bytes, n, part.k);
  if (status != kOk) return status;
  std::atomic<int> found{kOk};
  split(n, kIndexBlock, ranges_of(n, kIndexBlock, threads), [&](int, std::size_t begin, std::size_t end) {
    Cursor cursor(part, n, dtype);
    cursor.skip(begin);
    for (std::size_t at = begin; at < end; at += kIndexBlock) {
      const int block = cursor.put(kernels, out + at * size_of(dtype), add);
      if (block != kOk) {
        found = block;
        return;
      }
    }
  });
  return found;
}

void clear(const SparsePart& part, std::size_t n, std::size_t size, std::uint8_t* out) {
  const std::uint8_t* section = part.indices + 4 * blocks_of(n, kIndexBlock);
  for (std::size_t at = 0; at < n; at += kIndexBlock, out += kIndexBlock * size) {
    const std::size_t m = std::min(kIndexBlock, n - at), count = load32(part.indices + at / kIndexBlock * 4);
    if (is_bitmap(count, m)) {
      for (std::size_t i = 0; i < bitmap_bytes(m); ++i)
        for (std::uint32_t bits = section[i]; bits; bits &= bits - 1)
          std::memset(out + (8 * i + static_cast<std::size_t>(std::countr_zero(bits))) * size, 0, size);
    } else {
      for (std::size_t i = 0; i < count; ++i) std::memset(out + load16(section + 2 * i) * size, 0, size);
    }
    section += section_bytes(count, m);
  }
}

int scatter_sum(const Kernels& kernels, const std::vector<SparsePart>& parts, std::size_t n, DTypeCode dtype,
                std::uint8_t* out, int threads) {
  std::vector<Cursor> first;
  for (const SparsePart& part : parts) {
    const int status = check_counts(part.indices, part.bytes, n, part.k);
    if (status != kOk) return status;
    first.emplace_back(part, n, dtype);
  }
  const int ranges = ranges_of(n, kIndexBlock, threads);
  std::vector<std::vector<Cursor>> cursors(static_cast<std::size_t>(ranges), first);
  std::atomic<int> found{kOk};
  split(n, kIndexBlock, ranges, [&](int range, std::size_t begin, std::size_t end) {
    std::vector<Cursor>& mine = cursors[static_cast<std::size_t>(range)];
    for (Cursor& cursor : mine) cursor.skip(begin);
    for (std::size_t at = begin; at < end; at += kIndexBlock) {
      std::uint8_t* const block = out + at * size_of(dtype);
      std::memset(block, 0, std::min(kIndexBlock, end - at) * size_of(dtype));
      for (Cursor& cursor : mine)
        if (const int status = cursor.put(kernels, block, true); status != kOk) {
          found = status;
          return;
        }
    }
  });
  return found;
}

}  // namespace hybridcomp
