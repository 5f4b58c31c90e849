#include "codecs/messages/parts.hpp"

#include <algorithm>
#include <cstring>

#include "codecs/block/message.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/convert/convert.hpp"

#if HC_X86
#include <xmmintrin.h>
#endif

namespace hybridcomp {

void Parts::decode(const Kernels& k, std::size_t at, std::size_t m, void* out, DTypeCode out_dtype,
                   bool add) const {
  if (!scales) {
    k.convert->convert(values + at * size_of(stored), stored, out, out_dtype, m, add);
    return;
  }
  const BlockPart from = blocks_at(at);
  k.block->dequantize(from.scales, from.packed, dtype == kFloat64, m, at, format, out, out_dtype, add);
}

BlockPart Parts::blocks_at(std::size_t at) const {
  return {scales + scale_bytes(at / unit, dtype, format),
          values + packed_bytes(at, format.block, format.bits)};
}

void add_parts(const Kernels& k, std::span<const Parts> messages, std::size_t at, std::size_t m, bool wide,
               const void* own, void* sums) {
  constexpr std::size_t kMost = 4;
  while (!messages.empty()) {
    // Messages in a row with one plain format are added together, a few at a time.
    BlockPart blocks[kMost];
    std::size_t count = 0;
    for (const Parts& message : messages) {
      if (count == kMost || !message.plain() || message.format.bits != messages[0].format.bits) break;
      blocks[count++] = message.blocks_at(at);
    }
    if (count) {
      k.block->add(blocks, count, wide, m, messages[0].format, own, sums);
    } else {
      if (own != sums) std::memcpy(sums, own, m * (wide ? 8 : 4));
      messages[0].decode(k, at, m, sums, wide ? kFloat64 : kFloat32, true);
    }
    own = sums;
    messages = messages.subspan(count ? count : 1);
  }
}

void decode_streaming(const Kernels& k, const Parts& parts, std::size_t n, int threads, std::uint8_t* out,
                      DTypeCode out_dtype) {
  // Tiles are short, so that the stores of one leave for memory while the next is computed.
  constexpr std::size_t kShort = 512;
  const std::size_t tile = std::max(kShort / parts.unit, std::size_t(1)) * parts.unit;
  const std::size_t size = size_of(out_dtype);
  split(n, tile, ranges_of(n, tile, threads), [&](int, std::size_t begin, std::size_t end) {
    alignas(64) std::uint8_t buffer[kPartTile * sizeof(double)];
    for (std::size_t at = begin; at < end; at += tile) {
      const std::size_t m = std::min(tile, end - at);
      parts.decode(k, at, m, buffer, out_dtype, false);
      k.convert->stream(buffer, out + at * size, m * size);
    }
    streamed();
  });
}

void streamed() {
#if HC_X86
  _mm_sfence();
#endif
}

}  // namespace hybridcomp
