#include <cstring>

#include "codecs/common/status.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/zfp/zfp.hpp"
#include "hybridcomp/zfp.hpp"

namespace hybridcomp {

bool zfp_valid_bits(DTypeCode dtype, std::uint32_t bits) {
  return dtype == kFloat64 ? bits >= Zfp<double>::kLeastBits && bits <= Zfp<double>::kMostBits
                           : bits >= Zfp<float>::kLeastBits && bits <= Zfp<float>::kMostBits;
}

std::size_t zfp_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        std::uint32_t bits, std::uint8_t codec, std::uint32_t params, int threads,
                        std::uint8_t* out) {
  const ZfpPrefix prefix{bits, 0};
  return write_fixed(
      k, {codec, dtype, params, &prefix, sizeof(prefix)}, n, kZfpUnit, threads, out,
      [&](std::size_t e) { return zfp_bytes(e, bits); }, [](std::size_t) { return std::size_t(0); },
      [&](std::size_t at, std::size_t m, std::uint8_t* stream, std::uint8_t*) {
        k.zfp->encode(src + at * size_of(dtype), dtype, m, bits, stream);
      });
}

int zfp_check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  ZfpPrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (!zfp_valid_bits(dtype, prefix.bits) || prefix.reserved) return kBadZfpBits;
  if (n / 4 > bytes) return kBadLength;  // before n enters any arithmetic that could overflow
  return bytes == sizeof(prefix) + zfp_bytes(n, prefix.bits) ? kOk : kBadLength;
}

int zfp_decode_payload(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                       std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int status = zfp_check(payload, bytes, dtype, n);
  if (status != kOk) return status;
  ZfpPrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const std::uint8_t* stream = payload + sizeof(prefix);
  split(n, kZfpUnit, ranges_of(n, kZfpUnit, threads), [&](int, std::size_t begin, std::size_t end) {
    k.zfp->decode(stream + zfp_bytes(begin, prefix.bits), dtype == kFloat64, end - begin, prefix.bits,
                  out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace hybridcomp
