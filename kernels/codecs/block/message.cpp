// Whole messages of the block quantizers: header, prefix, scales, packed integers and CRC around the kernels.
#include "codecs/block/message.hpp"

#include <cstring>

#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/messages/sums.hpp"

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

std::size_t payload_bytes(std::size_t n, DTypeCode dtype, const BlockFormat& format) {
  return prefix_bytes(format) + scale_bytes(blocks_of(n, format.block), dtype, format) +
         packed_bytes(n, format.block, format.bits);
}

// Write a message, encoding elements at .. at + m by encode(at, m, scales, packed).
template <typename Encode>
std::size_t write_quantized(const Kernels& k, DTypeCode dtype, std::size_t n, const BlockFormat& format,
                            CodecId id, int threads, std::uint8_t* out, Encode encode) {
  const QuantizePrefix fields{format.block,
                              (format.symmetric ? 0 : kAffine) | (format.hadamard ? kHadamard : 0)};
  std::uint8_t prefix[sizeof(fields) + sizeof(format.seed)];
  std::memcpy(prefix, &fields, sizeof(fields));
  std::memcpy(prefix + sizeof(fields), &format.seed, sizeof(format.seed));
  return write_fixed(
      k, {id, dtype, prefix, prefix_bytes(format)}, n, format.block, threads, out,
      [&](std::size_t e) { return scale_bytes(blocks_of(e, format.block), dtype, format); },
      [&](std::size_t e) { return packed_bytes(e, format.block, format.bits); }, encode);
}

// Encode a sum of messages, tile by tile; returns the bytes, or 0 if its messages have other blocks than
// `format`, or too long ones.
std::size_t quantize_sum(const Kernels& k, const Sum& sum, const BlockFormat& format, bool stochastic,
                         CodecId id, int threads, std::uint8_t* out) {
  const DTypeCode dtype = sum.dtype;
  if (format.block > kPartTile || !sum.fits(format.block)) return 0;
  const std::size_t tile = tile_of(format.block);
  return write_quantized(
      k, dtype, sum.n, format, id, threads, out,
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

// Sections of a checked payload.
struct View {
  BlockFormat format;
  const std::uint8_t* scales;
  const std::uint8_t* packed;
};

// Check a payload and find its sections; a Status.
int view(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int bits,
         View* view) {
  BlockFormat format;
  const int status = read_prefix(payload, bytes, bits, &format);
  if (status != kOk) return status;
  // This check comes before n enters any arithmetic that could overflow.
  if (n / static_cast<std::size_t>(8 / bits) > bytes || bytes != payload_bytes(n, dtype, format))
    return kBadLength;
  const std::uint8_t* const scales = payload + prefix_bytes(format);
  *view = {format, scales, scales + scale_bytes(blocks_of(n, format.block), dtype, format)};
  return kOk;
}

template <int Bits>
Encoder make(CodecId id, const Parameters& parameters) {
  BlockFormat format{parameters.whole<std::uint32_t>("block", kMinBlock, kMaxBlock), Bits,
                     parameters.flag("symmetric"), parameters.flag("hadamard"),
                     parameters.whole<std::uint64_t>("seed", 0, ~std::uint64_t(0))};
  if (!valid_format(format)) Parameters::refuse("block", "a multiple of 8, with hadamard a power of two");
  return quantize_encoder(format, parameters.word("rounding") == "stochastic", id);
}

template <int Bits>
int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  View sections;
  return view(payload, bytes, dtype, n, Bits, &sections);
}

template <int Bits>
int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  View sections;
  const int status = view(payload, bytes, dtype, n, Bits, &sections);
  if (status != kOk) return status;
  const BlockFormat& format = sections.format;
  const std::size_t block = format.block;
  split(n, block, ranges_of(n, block, threads), [&](int, std::size_t begin, std::size_t end) {
    k.block->dequantize(sections.scales + scale_bytes(begin / block, dtype, format),
                        sections.packed + packed_bytes(begin, format.block, Bits), dtype == kFloat64,
                        end - begin, begin, format, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

template <int Bits>
bool open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, Parts* parts) {
  View sections;
  if (view(payload, bytes, dtype, n, Bits, &sections) != kOk || sections.format.block > kPartTile)
    return false;
  *parts = {dtype, sections.format.block, sections.packed, dtype, sections.scales, sections.format};
  return true;
}

template <int Bits>
constexpr CodecEntry entry(std::uint8_t id) {
  return {
      .id = id, .encoder = make<Bits>, .check_head = check<Bits>, .decode = decode<Bits>, .open = open<Bits>};
}

}  // namespace

Encoder quantize_encoder(const BlockFormat& format, bool stochastic, CodecId id) {
  const bool plain = format.symmetric && !format.hadamard;
  return {{id, plain ? format.bits : 0, plain ? format.block : 0, stochastic, format.seed},
          [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + payload_bytes(n, dtype, format); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return write_quantized(
                k, dtype, n, format, id, threads, out,
                [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* packed) {
                  k.block->quantize(src + at * size_of(dtype), dtype, m, at, format, stochastic, scales,
                                    packed);
                });
          },
          [=](const Kernels& k, const Sum& sum, int threads, std::uint8_t* out) {
            return quantize_sum(k, sum, format, stochastic, id, threads, out);
          }};
}

extern const CodecEntry kInt8Codec = entry<8>(kInt8Id), kInt4Codec = entry<4>(4), kInt2Codec = entry<2>(5);

}  // namespace hybridcomp
