// Messages of a fixed layout: header, prefix, and two sections (either may be empty) of which every chunk of
// elements fills a known part.
#pragma once

#include <cstring>

#include "codecs/common/kernels.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/messages/opening.hpp"

namespace hybridcomp {

// Elements encoded between two steps of the CRC: their bytes are still in L1 then.
constexpr std::size_t kGroup = 8192;

// Opening of a message of this layout.
struct Opening {
  CodecId codec;
  DTypeCode dtype;     // type of the elements
  const void* prefix;  // the codec's own fields, at most kMaxPrefix bytes
  std::size_t prefix_bytes;
};
constexpr std::size_t kMaxPrefix = 64;

// Write the message of `n` elements to `out`; return its bytes.
//
// first(e), second(e): bytes that e elements take of the first and of the second section, exact where e is a
// multiple of `unit`. encode(at, m, a, b): write elements at .. at + m (`at` a multiple of `unit`) to their
// places a and b in the sections. It is called with at most max(unit, kGroup) elements, from several threads.
template <typename First, typename Second, typename Encode>
std::size_t write_fixed(const Kernels& k, const Opening& opening, std::size_t n, std::size_t unit,
                        int threads, std::uint8_t* out, First first, Second second, Encode encode) {
  const std::size_t payload = opening.prefix_bytes + first(n) + second(n);
  const Header header = header_of(opening.codec, opening.dtype, n, payload);
  std::memcpy(out, &header, sizeof(header));
  if (opening.prefix_bytes) std::memcpy(out + sizeof(header), opening.prefix, opening.prefix_bytes);
  std::uint8_t* const a = out + sizeof(header) + opening.prefix_bytes;
  std::uint8_t* const b = a + first(n);

  // The sections fill side by side: a CRC runs along each from zero, and they are joined in the end.
  struct Part {
    std::uint32_t crc_a, crc_b;
    std::size_t bytes_a, bytes_b;
  } parts[kMaxThreads];
  const std::size_t step = std::max<std::size_t>(1, kGroup / unit) * unit;
  const int ranges = ranges_of(n, step, threads);
  split(n, step, ranges, [&](int r, std::size_t begin, std::size_t end) {
    Part part{0, 0, first(end) - first(begin), second(end) - second(begin)};
    for (std::size_t at = begin; at < end; at += step) {
      const std::size_t m = std::min(step, end - at);
      std::uint8_t* const pa = a + first(at);
      std::uint8_t* const pb = b + second(at);
      encode(at, m, pa, pb);
      part.crc_a = k.crc32c(pa, first(at + m) - first(at), part.crc_a);
      part.crc_b = k.crc32c(pb, second(at + m) - second(at), part.crc_b);
    }
    parts[r] = part;
  });
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  crc = k.crc32c(out + sizeof(header), opening.prefix_bytes, crc);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_a, parts[r].bytes_a);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_b, parts[r].bytes_b);
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + payload;
}

}  // namespace hybridcomp
