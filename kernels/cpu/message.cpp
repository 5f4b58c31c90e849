#include "message.hpp"

#include <cstring>

#include "fixed.hpp"

namespace hybridcomp {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian; so must this machine be");

std::size_t prefix_bytes(const BlockFormat& format) {
  return sizeof(QuantizePrefix) + (format.hadamard ? sizeof(format.seed) : 0);
}

std::size_t scale_bytes(std::size_t blocks, DTypeCode dtype, const BlockFormat& format) {
  return blocks * (dtype == kFloat64 ? 8 : 4) * (format.symmetric ? 1 : 2);
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

std::size_t quantize_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             const BlockFormat& format, bool stochastic, std::uint8_t codec,
                             std::uint32_t params, int threads, std::uint8_t* out) {
  const QuantizePrefix fields{format.block,
                              (format.symmetric ? 0 : kAffine) | (format.hadamard ? kHadamard : 0)};
  std::uint8_t prefix[sizeof(fields) + sizeof(format.seed)];
  std::memcpy(prefix, &fields, sizeof(fields));
  std::memcpy(prefix + sizeof(fields), &format.seed, sizeof(format.seed));
  return write_fixed(
      k, {codec, dtype, params, prefix, prefix_bytes(format)}, n, format.block, threads, out,
      [&](std::size_t e) { return scale_bytes(blocks_of(e, format.block), dtype, format); },
      [&](std::size_t e) { return packed_bytes(e, format.block, format.bits); },
      [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* packed) {
        k.block->quantize(src + at * size_of(dtype), dtype, m, at, format, stochastic, scales, packed);
      });
}

int check_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
                    int bits) {
  BlockFormat format;
  const int status = read_prefix(payload, bytes, bits, &format);
  if (status != kOk) return status;
  return fits(n, bytes, dtype, format) ? kOk : kBadLength;
}

int dequantize_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int bits, int threads, std::uint8_t* out, DTypeCode out_dtype,
                       bool add) {
  BlockFormat format;
  const int status = read_prefix(payload, bytes, bits, &format);
  if (status != kOk) return status;
  if (!fits(n, bytes, dtype, format)) return kBadLength;
  const std::size_t block = format.block;
  const std::uint8_t* scales = payload + prefix_bytes(format);
  const std::uint8_t* packed = scales + scale_bytes(blocks_of(n, block), dtype, format);
  split(n, block, ranges_of(n, block, threads), [&](int, std::size_t begin, std::size_t end) {
    k.block->dequantize(scales + scale_bytes(begin / block, dtype, format),
                        packed + packed_bytes(begin, format.block, bits), dtype == kFloat64, end - begin,
                        begin, format, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace hybridcomp
