// Messages of MPC around its kernels.
#include <cstring>

#include "codecs/common/parallel.hpp"
#include "codecs/convert/convert.hpp"
#include "codecs/lossless/mpc.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/opening.hpp"

namespace hybridcomp {
namespace {

// Bytes between two steps of the CRC: enough for it to run at its full speed, and still in the nearest
// caches.
constexpr std::size_t kCrcStep = 24576;

// Layout of a payload, found from the type and number of its elements.
struct Layout {
  std::size_t bytes, word, words, chunks, tail;

  Layout(DTypeCode dtype, std::size_t n)
      : bytes(n * element_bytes(dtype)),
        word(word_bytes(dtype)),
        words(bytes / word),
        chunks(blocks_of(words, kMpcChunk)),
        tail(bytes % word) {}

  // An element is a word, a complex one two words; four elements of a 1-byte type make one word.
  static std::size_t word_bytes(DTypeCode dtype) {
    if (dtype == kComplex64 || dtype == kComplex128) return element_bytes(dtype) / 2;
    return element_bytes(dtype) == 1 ? 4 : element_bytes(dtype);
  }

  int width() const { return static_cast<int>(word); }
  std::size_t bytes_of(std::size_t chunk) const {
    return std::min(kMpcChunk, words - chunk * kMpcChunk) * word;
  }
  std::size_t head() const { return sizeof(MpcPrefix) + 2 * chunks; }
};

std::size_t load_size(const std::uint8_t* sizes, std::size_t chunk) {
  std::uint16_t size;
  std::memcpy(&size, sizes + 2 * chunk, 2);
  return size;
}

std::size_t write(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                  std::uint32_t lag, CodecId id, int threads, std::uint8_t* out) {
  const Layout layout(dtype, n);
  const std::size_t word = layout.word;
  const MpcPrefix prefix{lag, 0};
  std::uint8_t* const payload = out + sizeof(Header);
  std::uint8_t* const sizes = payload + sizeof(prefix);
  std::uint8_t* const chunks = payload + layout.head();
  std::memcpy(payload, &prefix, sizeof(prefix));

  // Each range writes its chunks where they would be if none were compressed; then they move together.
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
      const std::size_t size = k.mpc->encode(src + at * word, m, layout.width(), lag, to, room);
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
  const Header header = header_of(id, dtype, n, total);
  std::memcpy(out, &header, sizeof(header));
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  crc = k.crc32c(payload, layout.head(), crc);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc, parts[r].bytes);
  crc = k.crc32c(end, layout.tail, crc);
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + total;
}

Encoder make(CodecId id, const Parameters& parameters) {
  const auto lag = parameters.whole<std::uint32_t>("lag", 1, kMpcMaxLag);
  return {{id},
          [](std::size_t n, DTypeCode dtype) {
            const Layout layout(dtype, n);
            return sizeof(Header) + layout.head() + layout.bytes;
          },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) { return write(k, src, dtype, n, lag, id, threads, out); }};
}

// Return the fewest bytes that a chunk of `raw` bytes can be encoded to.
std::size_t least_bytes(std::size_t raw, int width) { return std::min(raw, mpc_bitmap_bytes(width)); }

int check_head(const std::uint8_t* head, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  MpcPrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, head, sizeof(prefix));
  if (prefix.lag < 1 || prefix.lag > kMpcMaxLag || prefix.reserved) return kBadLag;
  const Layout layout(dtype, n);
  // The checks come in this order: after the first part, the chunks are not so many that the arithmetic could
  // overflow.
  if (layout.chunks > bytes / 2 || layout.head() + layout.tail > bytes) return kBadLength;
  if (!layout.chunks) return layout.head() + layout.tail == bytes ? kOk : kBadLength;
  const std::size_t least = (layout.chunks - 1) * least_bytes(kMpcChunk * layout.word, layout.width()) +
                            least_bytes(layout.bytes_of(layout.chunks - 1), layout.width());
  const std::size_t chunks = bytes - layout.head() - layout.tail;
  return least <= chunks && chunks <= layout.words * layout.word ? kOk : kBadLength;
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  const int status = check_head(payload, bytes, dtype, n);
  if (status != kOk) return status;
  const Layout layout(dtype, n);
  std::size_t total = layout.head() + layout.tail;  // at most 2^49 chunks of 16-bit sizes: no overflow
  for (std::size_t c = 0; c < layout.chunks; ++c) {
    const std::size_t size = load_size(payload + sizeof(MpcPrefix), c), raw = layout.bytes_of(c);
    if (size > raw || size < least_bytes(raw, layout.width())) return kBadLength;
    total += size;
  }
  return total == bytes ? kOk : kBadLength;
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int checked = check(payload, bytes, dtype, n);
  if (checked != kOk) return checked;
  const bool converts = add || dtype != out_dtype;
  const Layout layout(dtype, n);
  const std::size_t word = layout.word;
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
      std::uint8_t* const to = converts ? values : out + at * word;
      const int found = k.mpc->decode(from, size, m, layout.width(), prefix.lag, to);
      if (found != kOk) {
        status[r] = found;
        return;
      }
      if (converts) k.convert->convert(values, dtype, out + at * size_of(out_dtype), out_dtype, m, add);
      from += size;
    }
  });
  for (int r = 0; r < ranges; ++r)
    if (status[r] != kOk) return status[r];
  if (layout.tail)  // only types that are not converted have a tail
    std::memcpy(out + layout.words * word, payload + bytes - layout.tail, layout.tail);
  return kOk;
}

}  // namespace

extern const CodecEntry kMpcCodec = {
    .id = 13, .exact = true, .encoder = make, .check_head = check_head, .check = check, .decode = decode};

}  // namespace hybridcomp
