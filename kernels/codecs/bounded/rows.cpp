// Coder `lz` of the codec `bounded`: rows of integers. A row that is among the last 255 distinct ones is sent
// as its place there (vector-based LZ encoding of arXiv:2407.04272).
//
// Payload: a byte for each row: how many distinct rows back its equal is (0: the newest), or 255 for a new
// one; then the new rows one after another, each a byte (its code) and
//
//   code 0-31  its integers in so many bits each, two's complement, lowest bit first, and zeros up to a byte
//   code 64    its elements as they are
//
// Integers are coded in the fewest bits that hold all of the row. The last row may be shorter.
#include <cstring>

#include "codecs/bounded/coders.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/status.hpp"

namespace hybridcomp {
namespace {

constexpr std::size_t kWindow = 255;
constexpr std::uint8_t kNew = 255;
constexpr std::size_t kMostRowBytes = 1 + kMostRow * sizeof(double);
constexpr std::size_t kBeyond = 8;  // bytes that packing and unpacking look at past a row

std::uint64_t eight_bytes(const std::uint8_t* p) {
  std::uint64_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Bytes of a row of m elements after its code, which is valid.
std::size_t row_bytes(std::uint8_t code, std::size_t m, std::size_t size) {
  return code == kBoundedRaw ? m * size : (m * code + 7) / 8;
}

bool is_row_code(std::uint8_t code) { return code < kBoundedDelta || code == kBoundedRaw; }

// The encoder's window of the last distinct rows, compared by code and bytes.
class Window {
 public:
  // Return how many distinct rows back an equal one is; kNew if there is none.
  std::uint8_t find(const std::uint8_t* row, std::size_t bytes) {
    hash_ = hash_of(row, bytes);
    for (std::uint64_t at = heads_[hash_ % kHeads]; at && count_ - at < kWindow;) {
      const Entry& entry = entries_[at % kWindow];
      if (entry.hash == hash_ && entry.bytes == bytes && std::memcmp(entry.row, row, bytes) == 0)
        return static_cast<std::uint8_t>(count_ - at);
      at = entry.before;
    }
    return kNew;
  }

  // Add the row that was looked for last and not found; `row` stays where it is.
  void add(const std::uint8_t* row, std::size_t bytes) {
    ++count_;
    entries_[count_ % kWindow] = {row, bytes, hash_, heads_[hash_ % kHeads]};
    heads_[hash_ % kHeads] = count_;
  }

 private:
  static constexpr std::size_t kHeads = 512;

  struct Entry {
    const std::uint8_t* row;
    std::size_t bytes;
    std::uint64_t hash;
    std::uint64_t before;  // the number of the row before it with the same head; 0: none
  };

  static std::uint64_t hash_of(const std::uint8_t* row, std::size_t bytes) {
    constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15ull;
    std::uint64_t h = bytes;
    for (; bytes >= 8; bytes -= 8, row += 8) {
      h = (h ^ eight_bytes(row)) * kOdd;
      h ^= h >> 32;
    }
    std::uint64_t last = 0;
    std::memcpy(&last, row, bytes);
    h = (h ^ last) * kOdd;
    return h ^ (h >> 32);
  }

  std::uint64_t hash_ = 0, count_ = 0;
  std::uint64_t heads_[kHeads] = {};
  Entry entries_[kWindow];
};

// Write the code and the bytes of a row of m elements to `out`, and up to kBeyond more; returns the bytes.
std::size_t pack_row(const std::int32_t* q, std::size_t m, const std::uint8_t* elements, std::size_t size,
                     std::uint8_t* out) {
  std::uint32_t spread = 0, kept = 0;
  for (std::size_t i = 0; i < m; ++i) {
    spread |= bounded_spread(q[i]);
    kept |= q[i] == kBoundedKept;
  }
  const std::uint32_t width = bounded_bits(spread);
  if (kept || width >= kBoundedDelta || row_bytes(static_cast<std::uint8_t>(width), m, size) >= m * size) {
    out[0] = kBoundedRaw;
    std::memcpy(out + 1, elements, m * size);
    return 1 + m * size;
  }
  out[0] = static_cast<std::uint8_t>(width);
  const std::uint32_t mask = (1u << width) - 1;
  std::uint8_t* to = out + 1;
  std::uint64_t bits = 0;
  std::uint32_t have = 0;
  for (std::size_t i = 0; i < m; ++i) {
    bits |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(q[i]) & mask) << have;
    have += width;
    if (have >= 32) {
      std::memcpy(to, &bits, 4);
      to += 4;
      bits >>= 32;
      have -= 32;
    }
  }
  std::memcpy(to, &bits, 8);
  return 1 + row_bytes(out[0], m, size);
}

// Decode the integers of a row of m elements; `bytes` may be read from its code on.
void unpack_row(const std::uint8_t* row, std::size_t bytes, std::size_t m, std::int32_t* q) {
  const std::uint32_t width = row[0];
  if (!width) {
    std::memset(q, 0, m * sizeof(*q));
    return;
  }
  const std::size_t own = row_bytes(row[0], m, 0);
  std::uint8_t aside[kMostRow * 4 + kBeyond];
  const std::uint8_t* from = row + 1;
  if (bytes < 1 + own + kBeyond) {
    std::memcpy(aside, from, own);
    std::memset(aside + own, 0, kBeyond);
    from = aside;
  }
  for (std::size_t i = 0, at = 0; i < m; ++i, at += width)
    q[i] = bounded_signed(static_cast<std::uint32_t>(eight_bytes(from + at / 8) >> (at % 8)), width);
}

bool takes(std::uint32_t unit) { return unit >= 1 && unit <= kMostRow; }

std::size_t least(std::size_t n, std::uint32_t unit) { return blocks_of(n, unit); }

std::size_t most(std::size_t n, DTypeCode dtype, std::uint32_t unit) {
  return 2 * blocks_of(n, unit) + n * size_of(dtype);
}

std::size_t encode(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, double bound,
                   std::uint32_t unit, int, std::uint8_t* out) {
  const std::size_t size = size_of(dtype), tile = kBoundedTile / unit * unit;
  std::uint8_t* place = out;
  std::uint8_t* to = out + blocks_of(n, unit);
  Window window;
  alignas(64) std::int32_t q[kBoundedTile];
  std::uint8_t row[kMostRowBytes + kBeyond];
  for (std::size_t at = 0; at < n; at += tile) {
    const std::size_t m = n - at < tile ? n - at : tile;
    k.bounded->integers(src + at * size, dtype, m, bound, q);
    for (std::size_t i = 0; i < m; i += unit) {
      const std::size_t bytes =
          pack_row(q + i, m - i < unit ? m - i : unit, src + (at + i) * size, size, row);
      *place = window.find(row, bytes);
      if (*place++ != kNew) continue;
      std::memcpy(to, row, bytes);
      window.add(to, bytes);
      to += bytes;
    }
  }
  return static_cast<std::size_t>(to - out);
}

// Call f(i, row) for every row: the index of its first element, and the stored row that it is or equals;
// returns a Status.
template <typename F>
int for_rows(const BoundedPayload& p, std::uint32_t unit, F f) {
  const std::uint8_t* const end = p.data + p.bytes;
  const std::uint8_t* next = p.data + blocks_of(p.n, unit);
  const std::uint8_t* rows[kWindow];
  std::size_t count = 0;
  for (std::size_t i = 0, r = 0; i < p.n; i += unit, ++r) {
    const std::uint8_t place = p.data[r];
    if (place != kNew) {
      if (place >= count) return kBadWindow;
      f(i, rows[(count - 1 - place) % kWindow]);
      continue;
    }
    if (next == end) return kBadLength;
    if (!is_row_code(*next)) return kBadBoundedCode;
    const std::size_t bytes = 1 + row_bytes(*next, p.n - i < unit ? p.n - i : unit, size_of(p.dtype));
    if (bytes > static_cast<std::size_t>(end - next)) return kBadLength;
    rows[count++ % kWindow] = next;
    f(i, next);
    next += bytes;
  }
  return next == end ? kOk : kBadLength;
}

int check(const std::uint8_t* data, std::size_t bytes, DTypeCode dtype, std::size_t n, std::uint32_t unit) {
  return for_rows({data, bytes, dtype, n, 0}, unit, [](std::size_t, const std::uint8_t*) {});
}

int decode(const Kernels& k, const BoundedPayload& p, std::uint32_t unit, int, const BoundedOut& out) {
  const std::size_t tile = kBoundedTile / unit * unit;
  alignas(64) std::int32_t q[kBoundedTile];
  std::size_t begin = 0, held = 0;  // q holds elements begin .. begin + held
  const auto flush = [&](std::size_t next) {
    const BoundedOut to = out.at(begin);
    if (held) k.bounded->values(q, p.dtype, held, p.bound, to.data, to.dtype, to.add);
    begin = next;
    held = 0;
  };
  const int status = for_rows(p, unit, [&](std::size_t i, const std::uint8_t* row) {
    const std::size_t m = p.n - i < unit ? p.n - i : unit;
    if (*row == kBoundedRaw) {
      flush(i + m);
      return put_kept(k, row + 1, p.dtype, m, out.at(i));
    }
    if (held == tile) flush(i);
    unpack_row(row, static_cast<std::size_t>(p.data + p.bytes - row), m, q + held);
    held += m;
  });
  if (status == kOk) flush(p.n);
  return status;
}

}  // namespace

extern const BoundedCoder kRowCoder;
const BoundedCoder kRowCoder = {takes, least, most, encode, check, decode};

}  // namespace hybridcomp
