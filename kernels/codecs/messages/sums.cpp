#include "codecs/messages/sums.hpp"

#include <algorithm>
#include <cstring>

#include "codecs/common/parallel.hpp"
#include "codecs/common/status.hpp"
#include "codecs/messages/table.hpp"

namespace hybridcomp {

const std::uint8_t* Sum::tile(const Kernels& k, std::size_t at, std::size_t m, Buffer* buffer) const {
  const DTypeCode wide = accumulator();
  const std::uint8_t* from = own ? own + at * size_of(own_dtype) : buffer->wide;
  if (!own) {
    std::memset(buffer->wide, 0, m * size_of(wide));
  } else if (own_dtype != wide || reinterpret_cast<std::uintptr_t>(from) % size_of(wide) ||
             messages.empty()) {
    k.convert->convert(from, own_dtype, buffer->wide, wide, m, false);
    from = buffer->wide;
  }
  add_parts(k, messages, at, m, wide == kFloat64, from, buffer->wide);
  if (ranks != 1) k.convert->divide(buffer->wide, wide == kFloat64, m, ranks);
  if (dtype == wide) return buffer->wide;
  k.convert->convert(buffer->wide, wide, buffer->narrow, dtype, m, false);
  return buffer->narrow;
}

bool Sum::fits(std::size_t unit) const {
  for (const Parts& message : messages)
    if (unit % message.unit) return false;
  return true;
}

std::size_t Sum::unit() const {
  std::size_t most = 1;
  for (const Parts& message : messages) most = std::max(most, message.unit);
  return fits(most) ? most : 0;
}

const std::uint8_t* sum_whole(const Kernels& k, const Sum& sum, std::span<const Payload> messages,
                              int threads, Scratch* memory) {
  const DTypeCode wide = sum.accumulator();
  const std::size_t bytes = sum.n * size_of(wide);
  std::uint8_t* const total = memory->reserve(bytes + (sum.dtype == wide ? 0 : sum.n * size_of(sum.dtype)));
  if (sum.own)
    convert_all(k, sum.own, sum.own_dtype, sum.n, threads, total, wide, false);
  else
    std::memset(total, 0, bytes);
  for (const Payload& m : messages)
    if (decode_payload(k, m.codec, m.data, m.bytes, m.dtype, sum.n, threads, total, wide, true) != kOk)
      return nullptr;
  if (sum.ranks != 1)
    split(sum.n, kPartTile, ranges_of(sum.n, kPartTile, threads),
          [&](int, std::size_t begin, std::size_t end) {
            k.convert->divide(total + begin * size_of(wide), wide == kFloat64, end - begin, sum.ranks);
          });
  if (sum.dtype == wide) return total;
  convert_all(k, total, wide, sum.n, threads, total + bytes, sum.dtype, false);
  return total + bytes;
}

void write_sum(const Kernels& k, const Sum& sum, int threads, std::uint8_t* also) {
  const std::size_t tile = tile_of(sum.unit()), size = size_of(sum.dtype);
  split(sum.n, tile, ranges_of(sum.n, tile, threads), [&](int, std::size_t begin, std::size_t end) {
    Sum::Buffer buffer;
    for (std::size_t at = begin; at < end; at += tile) {
      const std::size_t m = std::min(tile, end - at);
      const std::uint8_t* const values = sum.tile(k, at, m, &buffer);
      if (also) std::memcpy(sum.result + at * size, values, m * size);
      std::uint8_t* const last = (also ? also : sum.result) + at * size;
      if (sum.stream)
        k.convert->stream(values, last, m * size);
      else
        std::memcpy(last, values, m * size);
    }
    if (sum.stream) streamed();
  });
}

}  // namespace hybridcomp
