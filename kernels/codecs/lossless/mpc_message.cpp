#include <cstring>

#include "codecs/common/parallel.hpp"
#include "codecs/convert/convert.hpp"
#include "codecs/lossless/mpc.hpp"

namespace hybridcomp {
namespace {

// Bytes between two steps of the CRC: enough for it to run at its full speed, and still in the nearest
// caches.
constexpr std::size_t kCrcStep = 24576;

// A payload's parts, by what its data's bytes say.
struct Layout {
  std::size_t words, chunks, tail;

  Layout(std::size_t bytes, int width)
      : words(bytes / static_cast<std::size_t>(width)),
        chunks(blocks_of(words, kMpcChunk)),
        tail(bytes % static_cast<std::size_t>(width)) {}

  std::size_t words_of(std::size_t chunk) const { return std::min(kMpcChunk, words - chunk * kMpcChunk); }
  std::size_t head() const { return sizeof(MpcPrefix) + 2 * chunks; }
};

std::size_t load_size(const std::uint8_t* sizes, std::size_t chunk) {
  std::uint16_t size;
  std::memcpy(&size, sizes + 2 * chunk, 2);
  return size;
}

}  // namespace

std::size_t mpc_bound(std::size_t bytes, int width) { return Layout(bytes, width).head() + bytes; }

std::size_t mpc_message(const Kernels& k, const std::uint8_t* src, std::size_t bytes, int width,
                        std::uint32_t lag, std::uint8_t codec, std::uint8_t dtype, std::uint64_t count,
                        std::uint32_t params, int threads, std::uint8_t* out) {
  const Layout layout(bytes, width);
  const std::size_t word = static_cast<std::size_t>(width);
  const MpcPrefix prefix{lag, 0};
  std::uint8_t* const payload = out + sizeof(Header);
  std::uint8_t* const sizes = payload + sizeof(prefix);
  std::uint8_t* const chunks = payload + layout.head();
  std::memcpy(payload, &prefix, sizeof(prefix));

  // Each range writes where its chunks would be if none were compressed; then they move together.
  struct Part {
    std::size_t begin, bytes;
    std::uint32_t crc;
  } parts[kMaxThreads];
  const int ranges = ranges_of(layout.words, kMpcChunk, threads);
  split(layout.words, kMpcChunk, ranges, [&](int r, std::size_t begin, std::size_t end) {
    std::uint8_t* to = chunks + begin * word;
    const std::uint8_t* summed = to;
    std::uint32_t crc = 0;
    for (std::size_t at = begin; at < end; at += kMpcChunk) {
      const std::size_t m = std::min(kMpcChunk, end - at);
      const std::size_t room = static_cast<std::size_t>(chunks + end * word - to);
      const std::size_t size = k.mpc->encode(src + at * word, m, width, lag, to, room);
      const std::uint16_t stored = static_cast<std::uint16_t>(size);
      std::memcpy(sizes + at / kMpcChunk * 2, &stored, 2);
      to += size;
      for (; to - summed >= static_cast<std::ptrdiff_t>(kCrcStep); summed += kCrcStep)
        crc = k.crc32c(summed, kCrcStep, crc);
    }
    crc = k.crc32c(summed, static_cast<std::size_t>(to - summed), crc);
    parts[r] = {begin, static_cast<std::size_t>(to - (chunks + begin * word)), crc};
  });
  std::uint8_t* end = chunks;
  for (int r = 0; r < ranges; ++r) {
    std::uint8_t* const from = chunks + parts[r].begin * word;
    if (from != end) std::memmove(end, from, parts[r].bytes);
    end += parts[r].bytes;
  }
  std::memcpy(end, src + layout.words * word, layout.tail);

  const std::size_t total = static_cast<std::size_t>(end - payload) + layout.tail;
  const Header header{kMagic, codec, dtype, 0, count, total, params, 0};
  std::memcpy(out, &header, sizeof(header));
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  crc = k.crc32c(payload, layout.head(), crc);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc, parts[r].bytes);
  crc = k.crc32c(end, layout.tail, crc);
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + total;
}

int check_mpc(const std::uint8_t* payload, std::size_t payload_bytes, std::size_t bytes, int width) {
  MpcPrefix prefix;
  if (payload_bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (prefix.lag < 1 || prefix.lag > kMpcMaxLag || prefix.reserved) return kBadLag;
  const Layout layout(bytes, width);
  if (layout.chunks > payload_bytes / 2 || payload_bytes < layout.head()) return kBadLength;
  std::size_t total = layout.head() + layout.tail;  // of at most 2^49 chunks of 16-bit sizes: no overflow
  for (std::size_t c = 0; c < layout.chunks; ++c) {
    const std::size_t size = load_size(payload + sizeof(prefix), c);
    const std::size_t raw = layout.words_of(c) * static_cast<std::size_t>(width);
    if (size > raw || (size < raw && size < mpc_bitmap_bytes(width))) return kBadLength;
    total += size;
  }
  return total == payload_bytes ? kOk : kBadLength;
}

int mpc_values(const Kernels& k, const std::uint8_t* payload, std::size_t payload_bytes, std::size_t bytes,
               int width, int threads, const MpcTarget& target) {
  const int checked = check_mpc(payload, payload_bytes, bytes, width);
  if (checked != kOk) return checked;
  const Layout layout(bytes, width);
  const std::size_t word = static_cast<std::size_t>(width);
  MpcPrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const std::uint8_t* const sizes = payload + sizeof(prefix);
  const int ranges = ranges_of(layout.words, kMpcChunk, threads);

  std::size_t starts[kMaxThreads];
  int status[kMaxThreads];
  std::size_t at_byte = layout.head(), chunk = 0;
  for (int r = 0; r < ranges; ++r) {  // where `split` begins its ranges
    const std::size_t first = layout.chunks * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranges);
    for (; chunk < first; ++chunk) at_byte += load_size(sizes, chunk);
    starts[r] = at_byte;
    status[r] = kOk;
  }
  split(layout.words, kMpcChunk, ranges, [&](int r, std::size_t begin, std::size_t end) {
    alignas(64) std::uint8_t values[kMpcChunk * 8];
    const std::uint8_t* from = payload + starts[r];
    for (std::size_t at = begin; at < end; at += kMpcChunk) {
      const std::size_t m = std::min(kMpcChunk, end - at), size = load_size(sizes, at / kMpcChunk);
      std::uint8_t* const to = target.convert ? values : target.out + at * word;
      const int found = k.mpc->decode(from, size, m, width, prefix.lag, to);
      if (found != kOk) {
        status[r] = found;
        return;
      }
      if (target.convert)
        k.convert->convert(values, target.from, target.out + at * size_of(target.to), target.to, m,
                           target.add);
      from += size;
    }
  });
  for (int r = 0; r < ranges; ++r)
    if (status[r] != kOk) return status[r];
  if (layout.tail)  // of types that are not converted
    std::memcpy(target.out + layout.words * word, payload + payload_bytes - layout.tail, layout.tail);
  return kOk;
}

}  // namespace hybridcomp
