#include "message.hpp"

#include <cstring>

#include "fixed.hpp"

namespace hybridcomp {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian; so must this machine be");

std::size_t scale_bytes(DTypeCode dtype) { return dtype == kFloat64 ? 8 : 4; }

}  // namespace

std::size_t quantized_payload(std::size_t n, DTypeCode dtype, std::uint32_t block, int bits) {
  return sizeof(QuantizePrefix) + blocks_of(n, block) * scale_bytes(dtype) + packed_bytes(n, block, bits);
}

std::size_t quantize_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             std::uint32_t block, int bits, std::uint8_t codec, std::uint32_t params,
                             int threads, std::uint8_t* out) {
  const QuantizePrefix prefix{block, 0};
  return write_fixed(
      k, {codec, dtype, params, &prefix, sizeof(prefix)}, n, block, threads, out,
      [&](std::size_t e) { return blocks_of(e, block) * scale_bytes(dtype); },
      [&](std::size_t e) { return packed_bytes(e, block, bits); },
      [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* packed) {
        k.block->quantize(src + at * size_of(dtype), dtype, m, block, bits, scales, packed);
      });
}

int check_quantized(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
                    int bits) {
  QuantizePrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (!valid_block(prefix.block) || prefix.reserved) return kBadBlock;
  if (n > bytes * 2) return kBadLength;  // before n enters any arithmetic that could overflow
  return bytes == quantized_payload(n, dtype, prefix.block, bits) ? kOk : kBadLength;
}

int dequantize_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int bits, int threads, std::uint8_t* out, DTypeCode out_dtype,
                       bool add) {
  const int status = check_quantized(payload, bytes, dtype, n, bits);
  if (status != kOk) return status;
  QuantizePrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const std::uint8_t* scales = payload + sizeof(prefix);
  const std::uint8_t* packed = scales + blocks_of(n, prefix.block) * scale_bytes(dtype);
  const std::size_t step = prefix.block;
  split(n, step, ranges_of(n, step, threads), [&](int, std::size_t begin, std::size_t end) {
    k.block->dequantize(scales + begin / step * scale_bytes(dtype),
                        packed + packed_bytes(begin, prefix.block, bits), dtype == kFloat64, end - begin,
                        prefix.block, bits, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace hybridcomp
