#include <cstring>

#include "codecs/bounded/huffman.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/status.hpp"

namespace hybridcomp {
namespace {

using namespace huffman;

// Parts of a coded chunk, checked but for the bits of its streams.
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
  std::size_t readable;  // bytes that may be read, past the stream too
  std::size_t bit;

  // Return at least 57 bits from here on, zeros after the readable bytes.
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

// Decode the symbols of m elements; returns a Status.
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
    std::size_t next = end;  // index of the next kept element
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

// Whether the chunks' lengths add up to the payload's.
bool adds_up(const std::uint8_t* data, std::size_t bytes, std::size_t n) {
  std::size_t sum = lengths_bytes(n);
  for (std::size_t c = 0; c < blocks_of(n, kChunk); ++c) sum += chunk_bytes(data, c);
  return sum == bytes;
}

int check(const std::uint8_t* data, std::size_t bytes, DTypeCode dtype, std::size_t n, std::uint32_t) {
  if (!adds_up(data, bytes, n)) return kBadLength;
  const std::uint8_t* chunk = data + lengths_bytes(n);
  for (std::size_t at = 0; at < n; at += kChunk) {
    const std::size_t own = chunk_bytes(data, at / kChunk);
    const int status = check_chunk(chunk, own, std::min(kChunk, n - at), size_of(dtype));
    if (status != kOk) return status;
    chunk += own;
  }
  return kOk;
}

int decode(const Kernels& k, const BoundedPayload& p, std::uint32_t, int threads, const BoundedOut& out) {
  if (!adds_up(p.data, p.bytes, p.n)) return kBadLength;
  int status[kMaxThreads] = {};
  const int ranges = ranges_of(p.n, kChunk, threads);
  split(p.n, kChunk, ranges, [&](int r, std::size_t begin, std::size_t end) {
    const std::uint8_t* chunk = p.data + lengths_bytes(p.n);
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

bool takes(std::uint32_t unit) { return unit == kHuffmanChunk; }

std::size_t least(std::size_t n, std::uint32_t) { return lengths_bytes(n); }

std::size_t most(std::size_t n, DTypeCode dtype, std::uint32_t) {
  return blocks_of(n, kChunk) * 5 + n * size_of(dtype);
}

}  // namespace

extern const BoundedCoder kHuffmanCoder;
const BoundedCoder kHuffmanCoder = {takes, least, most, encode, check, decode};

}  // namespace hybridcomp
