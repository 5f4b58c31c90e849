// Messages of the 8-bit and 4-bit floating-point formats around their kernels.
#include <cstring>

#include "codecs/block/message.hpp"
#include "codecs/common/status.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/minifloat/minifloat.hpp"

namespace hybridcomp {

std::size_t minifloat_payload(std::size_t n, std::uint32_t block, MinifloatKind kind) {
  return sizeof(MinifloatPrefix) + blocks_of(n, block) * kind.scale_bytes() + kind.code_bytes(n);
}

std::size_t minifloat_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                              std::uint32_t block, MinifloatKind kind, std::uint8_t codec,
                              std::uint32_t params, int threads, std::uint8_t* out) {
  const MinifloatPrefix prefix{block, kind.format};
  return write_fixed(
      k, {codec, dtype, params, &prefix, sizeof(prefix)}, n, block, threads, out,
      [&](std::size_t e) { return blocks_of(e, block) * kind.scale_bytes(); },
      [&](std::size_t e) { return kind.code_bytes(e); },
      [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* codes) {
        k.minifloat->encode(src + at * size_of(dtype), dtype, m, block, kind, scales, codes);
      });
}

int check_minifloat(const std::uint8_t* payload, std::size_t bytes, std::size_t n, int bits, bool mx) {
  MinifloatPrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (bits == 4 ? prefix.format != kE2M1 : prefix.format != kE4M3 && prefix.format != kE5M2)
    return kBadFormat;
  if (mx && prefix.block != kMxBlock) return kBadMxBlock;
  if (!valid_block(prefix.block)) return kBadBlock;
  if (n > bytes * 2) return kBadLength;  // before n enters any arithmetic that could overflow
  const MinifloatKind kind{static_cast<MinifloatFormat>(prefix.format), mx};
  return bytes == minifloat_payload(n, prefix.block, kind) ? kOk : kBadLength;
}

int decode_minifloat(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, std::size_t n,
                     int bits, bool mx, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int status = check_minifloat(payload, bytes, n, bits, mx);
  if (status != kOk) return status;
  MinifloatPrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const MinifloatKind kind{static_cast<MinifloatFormat>(prefix.format), mx};
  const std::uint8_t* scales = payload + sizeof(prefix);
  const std::uint8_t* codes = scales + blocks_of(n, prefix.block) * kind.scale_bytes();
  const std::size_t step = prefix.block;
  split(n, step, ranges_of(n, step, threads), [&](int, std::size_t begin, std::size_t end) {
    k.minifloat->decode(scales + begin / step * kind.scale_bytes(), codes + kind.code_bytes(begin),
                        end - begin, prefix.block, kind, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace hybridcomp
