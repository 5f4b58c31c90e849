// Coder `huffman` of the codec `bounded`: integers by a Huffman code for each 32,768 elements.
//
// Payload: a uint32 for each chunk of 32,768 elements, its bytes; then the chunks, each a byte (its kind) and
//
//   kind 0  its elements as they are
//   kind 1  HuffmanHead, which begins with that byte; for each of its symbols, and then for "kept", the bits
//   of
//           its code (0: it never comes) in half a byte, lower half first; four streams of codes, each of a
//           quarter of the elements (rounded up) and of whole bytes, lowest bit first; the kept elements in
//           their order, as they are. Symbol i stands for integer `first` + i. The code is canonical
//           (huffman_code.hpp) and complete.
//   kind 2  one element, which is all of them
//
// Integers that are more than 1024 off the middle one of a sample are kept: symbols are 2048 at most.
#include <algorithm>
#include <cstring>

#include "codecs/bounded/coders.hpp"
#include "codecs/bounded/huffman_code.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/status.hpp"

namespace hybridcomp {
namespace {

constexpr std::size_t kChunk = kHuffmanChunk;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kIntegers = kMostSymbols - 1;  // symbols but for kept ones
constexpr std::size_t kSample = 255;
constexpr std::size_t kBeyond = 8;  // bytes that are written past a stream
enum Kind : std::uint8_t { kPlain = 0, kCoded = 1, kOne = 2 };

struct HuffmanHead {
  std::uint8_t kind;       // kCoded
  std::uint8_t reserved;   // zero
  std::uint16_t symbols;   // 1 .. 2048
  std::int32_t first;      // the integer of symbol 0
  std::uint32_t bytes[3];  // of all streams but the last
  std::uint32_t kept;      // elements
};
static_assert(sizeof(HuffmanHead) == 24, "the head of a chunk is 24 bytes on the wire");

std::size_t table_bytes(std::size_t symbols) { return symbols / 2 + 1; }

// Where stream s of m elements begins.
std::size_t stream_begin(std::size_t m, std::size_t s) { return std::min(m, s * blocks_of(m, kStreams)); }

// -- encode ----------------------------------------------------------------------------------------------

// The integer that is in the middle of a sample of the first tile's.
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

// The symbols of a chunk, those of kept elements kIntegers, and how often each comes.
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

  // Those from the first to the last that comes, and kept ones after them.
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
  std::uint32_t codes[kMostSymbols];  // by symbols of the chunk, with their bits
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

bool takes(std::uint32_t unit) { return unit == kHuffmanChunk; }

std::size_t least(std::size_t n, std::uint32_t) { return blocks_of(n, kChunk) * 4; }

std::size_t most(std::size_t n, DTypeCode dtype, std::uint32_t) {
  return blocks_of(n, kChunk) * 5 + n * size_of(dtype);
}

std::size_t encode(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, double bound,
                   std::uint32_t, int threads, std::uint8_t* out) {
  const std::size_t size = size_of(dtype);
  std::uint8_t* const data = out + least(n, kHuffmanChunk);

  // Each range of chunks has room for all of it as it is; what is left free is closed afterwards.
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
  return least(n, kHuffmanChunk) + sum;
}

// -- decode ----------------------------------------------------------------------------------------------

// What a coded chunk holds, checked but for the bits of its streams.
struct Chunk {
  HuffmanHead head;
  std::uint8_t bits[kMostSymbols];
  const std::uint8_t* streams[kStreams];
  std::size_t bytes[kStreams];
  const std::uint8_t* kept;
};

int open_chunk(const std::uint8_t* data, std::size_t bytes, std::size_t size, Chunk* c) {
  if (bytes < sizeof(c->head)) return kBadLength;
  std::memcpy(&c->head, data, sizeof(c->head));
  const HuffmanHead& h = c->head;
  if (h.reserved || !h.symbols || h.symbols > kIntegers) return kBadBoundedCode;
  std::size_t left = bytes - sizeof(h);
  if (table_bytes(h.symbols) > left || h.kept > kChunk) return kBadLength;
  const std::uint8_t* const table = data + sizeof(h);
  for (std::size_t s = 0; s <= h.symbols; ++s) c->bits[s] = table[s / 2] >> (s % 2 * 4) & 15;
  if (!is_complete(c->bits, h.symbols + std::size_t(1))) return kBadCodeLengths;
  left -= table_bytes(h.symbols);
  if (h.kept * size > left) return kBadLength;
  left -= h.kept * size;
  const std::uint8_t* at = table + table_bytes(h.symbols);
  for (std::size_t s = 0; s < kStreams; ++s) {
    c->streams[s] = at;
    c->bytes[s] = s + 1 < kStreams ? h.bytes[s] : left;
    if (c->bytes[s] > left) return kBadLength;
    at += c->bytes[s];
    left -= c->bytes[s];
  }
  c->kept = at;
  return kOk;
}

int check_chunk(const std::uint8_t* data, std::size_t bytes, std::size_t m, std::size_t size) {
  if (!bytes) return kBadLength;
  if (*data == kPlain) return bytes == 1 + m * size ? kOk : kBadLength;
  if (*data == kOne) return bytes == 1 + size ? kOk : kBadLength;
  Chunk chunk;
  return *data == kCoded ? open_chunk(data, bytes, size, &chunk) : static_cast<int>(kBadBoundedCode);
}

struct BitReader {
  const std::uint8_t* data;
  std::size_t readable;  // bytes, of whatever they are
  std::size_t bit;

  // At least 57 bits from here on, zeros after what is readable.
  std::uint64_t look() const {
    const std::size_t at = bit / 8;
    std::uint64_t bits = 0;
    if (at + 8 <= readable)
      std::memcpy(&bits, data + at, 8);
    else if (at < readable)
      std::memcpy(&bits, data + at, readable - at);
    return bits >> (bit % 8);
  }
};

// The symbols of m elements; a Status.
int get_symbols(const Chunk& c, std::size_t m, std::uint16_t* symbols) {
  std::uint16_t table[kCodeStates];
  decoding_table(c.bits, c.head.symbols + std::size_t(1), table);
  const std::uint8_t* const end = c.kept + c.head.kept;  // not past the chunk, however large its elements are
  BitReader readers[kStreams];
  std::uint16_t* to[kStreams];
  std::size_t many[kStreams];
  for (std::size_t s = 0; s < kStreams; ++s) {
    readers[s] = {c.streams[s], static_cast<std::size_t>(end - c.streams[s]), 0};
    to[s] = symbols + stream_begin(m, s);
    many[s] = stream_begin(m, s + 1) - stream_begin(m, s);
  }
  const auto four = [&](std::size_t s, std::size_t i, std::size_t count) {
    std::uint64_t bits = readers[s].look();
    std::size_t used = 0;
    for (std::size_t j = 0; j < count; ++j) {
      const std::uint32_t entry = table[bits % kCodeStates];
      to[s][i + j] = static_cast<std::uint16_t>(entry >> 4);
      bits >>= entry & 15;
      used += entry & 15;
    }
    readers[s].bit += used;
  };
  std::size_t i = 0;
  for (; i + 4 <= many[kStreams - 1]; i += 4) {  // the last is the shortest
    four(0, i, 4);
    four(1, i, 4);
    four(2, i, 4);
    four(3, i, 4);
  }
  for (std::size_t s = 0; s < kStreams; ++s) {
    for (std::size_t j = i; j < many[s]; j += 4) four(s, j, std::min<std::size_t>(4, many[s] - j));
    if ((readers[s].bit + 7) / 8 != c.bytes[s]) return kBadLength;
  }
  std::size_t kept = 0;
  for (std::size_t e = 0; e < m; ++e) kept += symbols[e] == c.head.symbols;
  return kept == c.head.kept ? kOk : kBadEscapes;
}

int decode_coded(const Kernels& k, const std::uint8_t* data, std::size_t bytes, const BoundedPayload& p,
                 std::size_t m, const BoundedOut& out) {
  Chunk chunk;
  const std::size_t size = size_of(p.dtype);
  int status = open_chunk(data, bytes, size, &chunk);
  if (status != kOk) return status;
  std::uint16_t symbols[kChunk];
  status = get_symbols(chunk, m, symbols);
  if (status != kOk) return status;
  const std::uint32_t first = static_cast<std::uint32_t>(chunk.head.first);
  const std::uint8_t* kept = chunk.kept;
  alignas(64) std::int32_t q[kBoundedTile];
  for (std::size_t at = 0; at < m;) {
    const std::size_t end = std::min(at + kBoundedTile, m);
    std::size_t next = end;  // of kept elements
    if (chunk.head.kept)
      next = static_cast<std::size_t>(std::find(symbols + at, symbols + end, chunk.head.symbols) - symbols);
    for (std::size_t i = at; i < next; ++i) q[i - at] = static_cast<std::int32_t>(first + symbols[i]);
    const BoundedOut to = out.at(at);
    if (next > at) k.bounded->values(q, p.dtype, next - at, p.bound, to.data, to.dtype, to.add);
    at = next;
    if (at == end) continue;
    put_kept(k, kept, p.dtype, 1, out.at(at++));
    kept += size;
  }
  return kOk;
}

int decode_chunk(const Kernels& k, const std::uint8_t* data, std::size_t bytes, const BoundedPayload& p,
                 std::size_t m, const BoundedOut& out) {
  if (bytes && *data == kCoded) return decode_coded(k, data, bytes, p, m, out);
  const std::size_t size = size_of(p.dtype);
  const int status = check_chunk(data, bytes, m, size);
  if (status != kOk) return status;
  if (*data == kPlain) {
    put_kept(k, data + 1, p.dtype, m, out);
    return kOk;
  }
  alignas(64) std::uint8_t elements[kBoundedTile * sizeof(double)];
  for (std::size_t i = 0; i < std::min(m, kBoundedTile); ++i)
    std::memcpy(elements + i * size, data + 1, size);
  for (std::size_t at = 0; at < m; at += kBoundedTile)
    put_kept(k, elements, p.dtype, std::min(kBoundedTile, m - at), out.at(at));
  return kOk;
}

std::size_t chunk_bytes(const std::uint8_t* data, std::size_t chunk) {
  std::uint32_t bytes;
  std::memcpy(&bytes, data + chunk * 4, 4);
  return bytes;
}

// Whether the chunks make the payload.
bool adds_up(const std::uint8_t* data, std::size_t bytes, std::size_t n) {
  std::size_t sum = least(n, kHuffmanChunk);
  for (std::size_t c = 0; c < blocks_of(n, kChunk); ++c) sum += chunk_bytes(data, c);
  return sum == bytes;
}

int check(const std::uint8_t* data, std::size_t bytes, DTypeCode dtype, std::size_t n, std::uint32_t unit) {
  if (!adds_up(data, bytes, n)) return kBadLength;
  const std::uint8_t* chunk = data + least(n, unit);
  for (std::size_t at = 0; at < n; at += kChunk) {
    const std::size_t own = chunk_bytes(data, at / kChunk);
    const int status = check_chunk(chunk, own, std::min(kChunk, n - at), size_of(dtype));
    if (status != kOk) return status;
    chunk += own;
  }
  return kOk;
}

int decode(const Kernels& k, const BoundedPayload& p, std::uint32_t unit, int threads,
           const BoundedOut& out) {
  if (!adds_up(p.data, p.bytes, p.n)) return kBadLength;
  int status[kMaxThreads] = {};
  const int ranges = ranges_of(p.n, kChunk, threads);
  split(p.n, kChunk, ranges, [&](int r, std::size_t begin, std::size_t end) {
    const std::uint8_t* chunk = p.data + least(p.n, unit);
    for (std::size_t c = 0; c < begin / kChunk; ++c) chunk += chunk_bytes(p.data, c);
    for (std::size_t at = begin; at < end && status[r] == kOk; at += kChunk) {
      const std::size_t own = chunk_bytes(p.data, at / kChunk);
      status[r] = decode_chunk(k, chunk, own, p, std::min(kChunk, end - at), out.at(at));
      chunk += own;
    }
  });
  for (int r = 0; r < ranges; ++r)
    if (status[r] != kOk) return status[r];
  return kOk;
}

}  // namespace

extern const BoundedCoder kHuffmanCoder;
const BoundedCoder kHuffmanCoder = {takes, least, most, encode, check, decode};

}  // namespace hybridcomp
