#include "codecs/block/message.hpp"

#include <cstring>

#include "codecs/messages/fixed.hpp"

namespace hybridcomp {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian; so must this machine be");

std::size_t prefix_bytes(const BlockFormat& format) {
  return sizeof(QuantizePrefix) + (format.hadamard ? sizeof(format.seed) : 0);
}

// Read a payload's prefix; returns a Status.
int read_prefix(const std::uint8_t* payload, std::size_t bytes, int bits, BlockFormat* format) {
  QuantizePrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  *format = {prefix.block, bits, !(prefix.flags & kAffine), (prefix.flags & kHadamard) != 0, 0};
  if (prefix.flags & ~(kAffine | kHadamard) || !valid_format(*format)) return kBadBlock;
  if (bytes < prefix_bytes(*format)) return kBadLength;
  if (format->hadamard) std::memcpy(&format->seed, payload + sizeof(prefix), sizeof(format->seed));
  return kOk;
}

// Whether n elements make a payload of `bytes`.
bool fits(std::size_t n, std::size_t bytes, DTypeCode dtype, const BlockFormat& format) {
  // First of all before n enters any arithmetic that could overflow.
  return n / static_cast<std::size_t>(8 / format.bits) <= bytes &&
         bytes == quantized_payload(n, dtype, format);
}

}  // namespace

std::size_t quantized_payload(std::size_t n, DTypeCode dtype, const BlockFormat& format) {
  return prefix_bytes(format) + scale_bytes(blocks_of(n, format.block), dtype, format) +
         packed_bytes(n, format.block, format.bits);
}

namespace {

// Write a message whose elements encode(at, m, scales, packed) encodes.
template <typename Encode>
std::size_t write_quantized(const Kernels& k, DTypeCode dtype, std::size_t n, const BlockFormat& format,
                            std::uint8_t codec, std::uint32_t params, int threads, std::uint8_t* out,
                            Encode encode) {
  const QuantizePrefix fields{format.block,
                              (format.symmetric ? 0 : kAffine) | (format.hadamard ? kHadamard : 0)};
  std::uint8_t prefix[sizeof(fields) + sizeof(format.seed)];
  std::memcpy(prefix, &fields, sizeof(fields));
  std::memcpy(prefix + sizeof(fields), &format.seed, sizeof(format.seed));
  return write_fixed(
      k, {codec, dtype, params, prefix, prefix_bytes(format)}, n, format.block, threads, out,
      [&](std::size_t e) { return scale_bytes(blocks_of(e, format.block), dtype, format); },
      [&](std::size_t e) { return packed_bytes(e, format.block, format.bits); }, encode);
}

}  // namespace

std::size_t quantize_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             const BlockFormat& format, bool stochastic, std::uint8_t codec,
                             std::uint32_t params, int threads, std::uint8_t* out) {
  return write_quantized(k, dtype, n, format, codec, params, threads, out,
                         [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* packed) {
                           k.block->quantize(src + at * size_of(dtype), dtype, m, at, format, stochastic,
                                             scales, packed);
                         });
}

std::size_t quantize_sum(const Kernels& k, const Sum& sum, const BlockFormat& format, bool stochastic,
                         std::uint8_t codec, std::uint32_t params, int threads, std::uint8_t* out) {
  const DTypeCode dtype = sum.dtype;
  if (format.block > kPartTile || !sum.fits(format.block)) return 0;
  const std::size_t tile = tile_of(format.block);
  return write_quantized(
      k, dtype, sum.n, format, codec, params, threads, out,
      [&](std::size_t begin, std::size_t count, std::uint8_t* scales, std::uint8_t* packed) {
        Sum::Buffer buffer;
        for (std::size_t at = begin; at < begin + count; at += tile) {
          const std::size_t m = std::min(tile, begin + count - at);
          std::uint8_t* const s = scales + scale_bytes((at - begin) / format.block, dtype, format);
          std::uint8_t* const p = packed + packed_bytes(at - begin, format.block, format.bits);
          k.block->quantize(sum.tile(k, at, m, &buffer), dtype, m, at, format, stochastic, s, p);
          sum.put(k, at, m, &buffer, [&](std::uint8_t* to) {
            k.block->dequantize(s, p, dtype == kFloat64, m, at, format, to, sum.result_dtype, false);
          });
        }
        if (sum.stream) streamed();
      });
}

int view_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int bits,
                   QuantizedView* view) {
  BlockFormat format;
  const int status = read_prefix(payload, bytes, bits, &format);
  if (status != kOk) return status;
  if (!fits(n, bytes, dtype, format)) return kBadLength;
  const std::uint8_t* const scales = payload + prefix_bytes(format);
  *view = {format, scales, scales + scale_bytes(blocks_of(n, format.block), dtype, format)};
  return kOk;
}

Encoder quantize_encoder(const BlockFormat& format, bool stochastic, std::uint8_t codec,
                         std::uint32_t params) {
  const bool plain = format.symmetric && !format.hadamard && !stochastic;
  return {
      {codec, params, plain ? format.bits : 0, plain ? format.block : 0},
      [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + quantized_payload(n, dtype, format); },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
          std::uint8_t* out) {
        return quantize_message(k, src, dtype, n, format, stochastic, codec, params, threads, out);
      },
      [=](const Kernels& k, const Sum& sum, int threads, std::uint8_t* out) {
        return quantize_sum(k, sum, format, stochastic, codec, params, threads, out);
      }};
}

int check_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
                    int bits) {
  QuantizedView view;
  return view_quantized(payload, bytes, dtype, n, bits, &view);
}

int dequantize_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int bits, int threads, std::uint8_t* out, DTypeCode out_dtype,
                       bool add) {
  QuantizedView view;
  const int status = view_quantized(payload, bytes, dtype, n, bits, &view);
  if (status != kOk) return status;
  const BlockFormat& format = view.format;
  const std::size_t block = format.block;
  split(n, block, ranges_of(n, block, threads), [&](int, std::size_t begin, std::size_t end) {
    k.block->dequantize(view.scales + scale_bytes(begin / block, dtype, format),
                        view.packed + packed_bytes(begin, format.block, bits), dtype == kFloat64, end - begin,
                        begin, format, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace hybridcomp
