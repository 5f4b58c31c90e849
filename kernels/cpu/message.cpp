#include "message.hpp"

#include <algorithm>
#include <cstring>

namespace hybridcomp {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian; so must this machine be");

// Elements quantized between two steps of the CRC: their bytes are still in L1 then.
constexpr std::size_t kGroup = 8192;

std::size_t scale_bytes(DTypeCode dtype) { return dtype == kFloat64 ? 8 : 4; }

}  // namespace

std::size_t quantized_payload(std::size_t n, DTypeCode dtype, std::uint32_t block, int bits) {
  return sizeof(QuantizePrefix) + blocks_of(n, block) * scale_bytes(dtype) + packed_bytes(n, block, bits);
}

std::size_t quantize_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                             std::uint32_t block, int bits, std::uint8_t codec, std::uint32_t params,
                             std::uint8_t* out) {
  const std::size_t payload = quantized_payload(n, dtype, block, bits);
  Header header{kMagic, codec, static_cast<std::uint8_t>(dtype), 0, n, payload, params, 0};
  const QuantizePrefix prefix{block, 0};
  std::uint8_t* const scales = out + sizeof(Header) + sizeof(prefix);
  std::uint8_t* const packed = scales + blocks_of(n, block) * scale_bytes(dtype);
  std::memcpy(out, &header, sizeof(header));
  std::memcpy(out + sizeof(Header), &prefix, sizeof(prefix));

  // The scales lie before the integers but are ready only with them: the integers' CRC runs along from zero
  // and is joined to that of all before it in the end.
  const std::size_t step = std::max<std::size_t>(1, kGroup / block) * block;
  std::uint32_t packed_crc = 0;
  std::uint8_t* scale = scales;
  std::uint8_t* q = packed;
  for (std::size_t at = 0; at < n; at += step) {
    const std::size_t m = std::min(step, n - at);
    k.quantize(src + at * size_of(dtype), dtype, m, block, bits, scale, q);
    const std::size_t bytes = packed_bytes(m, block, bits);
    packed_crc = k.crc32c(q, bytes, packed_crc);
    q += bytes;
    scale += blocks_of(m, block) * scale_bytes(dtype);
  }
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  crc = k.crc32c(out + sizeof(Header), static_cast<std::size_t>(packed - out) - sizeof(Header), crc);
  crc = crc32c_combine(crc, packed_crc, static_cast<std::size_t>(q - packed));
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(Header) + payload;
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
                       std::size_t n, int bits, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int status = check_quantized(payload, bytes, dtype, n, bits);
  if (status != kOk) return status;
  QuantizePrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const std::uint8_t* scales = payload + sizeof(prefix);
  const std::uint8_t* packed = scales + blocks_of(n, prefix.block) * scale_bytes(dtype);
  k.dequantize(scales, packed, dtype == kFloat64, n, prefix.block, bits, out, out_dtype, add);
  return kOk;
}

const char* status_text(int code) {
  switch (code) {
    case kOk:
      return "no error";
    case kBadLength:
      return "the payload's length does not fit its counts";
    case kBadBlock:
      return "the block size is not a multiple of 8 from 8 to 65536, or reserved bits are set";
    case kBadIndexCount:
      return "the blocks' counts do not add up to the number of values";
    case kBadIndexOrder:
      return "indices are not strictly ascending";
    case kBadIndexRange:
      return "an index lies past the end of its block";
    case kBadBitmap:
      return "a bitmap has another number of bits set than its block's count";
    default:
      return "unknown status";
  }
}

}  // namespace hybridcomp
