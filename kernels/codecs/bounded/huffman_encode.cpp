#include <cstring>

#include "codecs/bounded/huffman.hpp"

namespace hybridcomp::huffman {
namespace {

constexpr std::size_t kSample = 255;
constexpr std::size_t kBeyond = 8;  // bytes that are written past a stream

// Return the middle integer of a sample of the first tile's.
std::int32_t middle_of(const std::int32_t* q, std::size_t m) {
  std::int32_t sample[kSample];
  std::size_t found = 0;
  const std::size_t stride = blocks_of(m, kSample);
  for (std::size_t i = 0; i < m; i += stride)
    if (q[i] != kBoundedKept) sample[found++] = q[i];
  if (!found) return 0;
  std::nth_element(sample, sample + found / 2, sample + found);
  return sample[found / 2];
}

// Symbols of a chunk, kIntegers for kept elements, and how often each comes.
struct Symbols {
  std::uint16_t of[kChunk];
  std::uint32_t counts[kMostSymbols] = {};
  std::int32_t first;  // the integer of symbol 0
};

void find_symbols(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t m, double bound,
                  Symbols* symbols) {
  alignas(64) std::int32_t q[kBoundedTile];
  std::uint32_t odd[kMostSymbols] = {};  // counts of every other element: equal neighbours wait for no store
  for (std::size_t at = 0; at < m; at += kBoundedTile) {
    const std::size_t tile = std::min(kBoundedTile, m - at);
    k.bounded->integers(src + at * size_of(dtype), dtype, tile, bound, q);
    if (!at) symbols->first = middle_of(q, tile) - static_cast<std::int32_t>(kIntegers / 2);
    const std::uint32_t first = static_cast<std::uint32_t>(symbols->first);
    for (std::size_t i = 0; i < tile; ++i) {
      const std::uint32_t s = static_cast<std::uint32_t>(q[i]) - first;
      symbols->of[at + i] = static_cast<std::uint16_t>(std::min<std::uint32_t>(s, kIntegers));
    }
    for (std::size_t i = 0; i + 1 < tile; i += 2) {
      ++symbols->counts[symbols->of[at + i]];
      ++odd[symbols->of[at + i + 1]];
    }
    if (tile % 2) ++symbols->counts[symbols->of[at + tile - 1]];
  }
  for (std::size_t s = 0; s < kMostSymbols; ++s) symbols->counts[s] += odd[s];
}

// Write the codes of symbols to `out`, and up to kBeyond bytes more; returns the bytes.
std::size_t put_stream(const std::uint16_t* symbols, std::size_t m, const std::uint32_t* codes,
                       std::uint8_t* out) {
  std::uint8_t* to = out;
  std::uint64_t bits = 0;
  std::uint32_t have = 0;
  const auto add = [&](std::uint16_t symbol) {
    bits |= static_cast<std::uint64_t>(codes[symbol] >> 4) << have;
    have += codes[symbol] & 15;
  };
  const auto flush = [&] {
    std::memcpy(to, &bits, 8);
    to += have / 8;
    bits >>= have & ~7u;
    have %= 8;
  };
  std::size_t i = 0;
  for (; i + 4 <= m; i += 4) {  // 7 bits and 4 codes at most
    for (std::size_t j = 0; j < 4; ++j) add(symbols[i + j]);
    flush();
  }
  for (; i < m; ++i) add(symbols[i]);
  flush();
  return static_cast<std::size_t>(to - out) + (have != 0);
}

std::size_t put_one(const std::uint8_t* element, std::size_t size, std::uint8_t* out) {
  out[0] = kOne;
  std::memcpy(out + 1, element, size);
  return 1 + size;
}

// Encode a chunk of m elements to `out`, which has room for 1 + m elements' bytes; returns the bytes.
std::size_t encode_chunk(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t m,
                         double bound, std::uint8_t* out) {
  const std::size_t size = size_of(dtype);
  if (std::memcmp(src, src + size, (m - 1) * size) == 0) return put_one(src, size, out);
  Symbols symbols;
  find_symbols(k, src, dtype, m, bound, &symbols);
  const auto plain = [&] {
    out[0] = kPlain;
    std::memcpy(out + 1, src, m * size);
    return 1 + m * size;
  };

  // The code has the symbols from the first to the last that comes, and "kept" after them.
  std::size_t low = 0, high = kIntegers;
  while (low < high && !symbols.counts[low]) ++low;
  while (high > low && !symbols.counts[high - 1]) --high;
  const std::size_t many = high - low;
  const std::uint32_t kept = symbols.counts[kIntegers];
  if (!many) return plain();
  const std::int32_t first = symbols.first + static_cast<std::int32_t>(low);
  if (many == 1 && !kept) {
    std::uint8_t element[sizeof(double)];
    k.bounded->values(&first, dtype, 1, bound, element, dtype, false);
    return put_one(element, size, out);
  }
  symbols.counts[high] = kept;
  const std::uint32_t* const counts = symbols.counts + low;
  std::uint8_t bits[kMostSymbols];
  code_bits(counts, many + 1, bits);
  std::size_t total = 0;
  for (std::size_t s = 0; s <= many; ++s) total += std::size_t(counts[s]) * bits[s];
  const std::size_t head = sizeof(HuffmanHead) + table_bytes(many);
  if (head + total / 8 + kStreams + kBeyond + kept * size > m * size) return plain();

  std::uint16_t canonical[kMostSymbols];
  canonical_codes(bits, many + 1, canonical);
  std::uint32_t codes[kMostSymbols];  // by symbol of the chunk: its code, and the code's bits
  for (std::size_t s = 0; s < many; ++s)
    codes[low + s] = static_cast<std::uint32_t>(canonical[s]) << 4 | bits[s];
  codes[kIntegers] = static_cast<std::uint32_t>(canonical[many]) << 4 | bits[many];

  HuffmanHead h{kCoded, 0, static_cast<std::uint16_t>(many), first, {}, kept};
  std::memset(out + sizeof(h), 0, table_bytes(many));
  for (std::size_t s = 0; s <= many; ++s)
    out[sizeof(h) + s / 2] = static_cast<std::uint8_t>(out[sizeof(h) + s / 2] | bits[s] << (s % 2 * 4));
  std::uint8_t* to = out + head;
  for (std::size_t s = 0; s < kStreams; ++s) {
    const std::size_t begin = stream_begin(m, s);
    const std::size_t bytes = put_stream(symbols.of + begin, stream_begin(m, s + 1) - begin, codes, to);
    if (s + 1 < kStreams) h.bytes[s] = static_cast<std::uint32_t>(bytes);
    to += bytes;
  }
  std::memcpy(out, &h, sizeof(h));
  for (std::size_t i = 0; kept && i < m; ++i) {
    if (symbols.of[i] != kIntegers) continue;
    std::memcpy(to, src + i * size, size);
    to += size;
  }
  return static_cast<std::size_t>(to - out);
}

}  // namespace

std::size_t encode(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, double bound,
                   std::uint32_t, int threads, std::uint8_t* out) {
  const std::size_t size = size_of(dtype);
  std::uint8_t* const data = out + lengths_bytes(n);

  // Each range of chunks has room for all its elements as they are; gaps are closed afterwards.
  std::size_t begins[kMaxThreads], bytes[kMaxThreads];
  const int ranges = ranges_of(n, kChunk, threads);
  split(n, kChunk, ranges, [&](int r, std::size_t begin, std::size_t end) {
    begins[r] = begin / kChunk + begin * size;
    std::uint8_t* to = data + begins[r];
    for (std::size_t at = begin; at < end; at += kChunk) {
      const std::size_t own = encode_chunk(k, src + at * size, dtype, std::min(kChunk, end - at), bound, to);
      const auto told = static_cast<std::uint32_t>(own);
      std::memcpy(out + at / kChunk * 4, &told, 4);
      to += own;
    }
    bytes[r] = static_cast<std::size_t>(to - data) - begins[r];
  });
  std::size_t sum = 0;
  for (int r = 0; r < ranges; ++r) {
    if (sum != begins[r]) std::memmove(data + sum, data + begins[r], bytes[r]);
    sum += bytes[r];
  }
  return lengths_bytes(n) + sum;
}

}  // namespace hybridcomp::huffman
