// Messages of zfp's fixed-rate streams around its kernels.
#include <cstring>

#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/zfp/zfp.hpp"
#include "hybridcomp/zfp.hpp"

namespace hybridcomp {
namespace {

// Whether a block of this dtype can have so many bits.
bool valid_bits(DTypeCode dtype, std::uint32_t bits) {
  return dtype == kFloat64 ? bits >= Zfp<double>::kLeastBits && bits <= Zfp<double>::kMostBits
                           : bits >= Zfp<float>::kLeastBits && bits <= Zfp<float>::kMostBits;
}

Encoder make(CodecId id, const Parameters& parameters) {
  const double rate = parameters.number("rate");
  if (!(rate >= 0 && rate <= 64)) Parameters::refuse("rate", "a number of bits up to 64");
  const auto bits = static_cast<std::uint32_t>(4 * rate + 0.5);
  return {{id},
          [=](std::size_t n, DTypeCode dtype) {
            return valid_bits(dtype, bits) ? sizeof(Header) + sizeof(ZfpPrefix) + zfp_bytes(n, bits) : 0;
          },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            const ZfpPrefix prefix{bits, 0};
            return write_fixed(
                k, {id, dtype, &prefix, sizeof(prefix)}, n, kZfpUnit, threads, out,
                [&](std::size_t e) { return zfp_bytes(e, bits); }, [](std::size_t) { return std::size_t(0); },
                [&](std::size_t at, std::size_t m, std::uint8_t* stream, std::uint8_t*) {
                  k.zfp->encode(src + at * size_of(dtype), dtype, m, bits, stream);
                });
          }};
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  ZfpPrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (!valid_bits(dtype, prefix.bits) || prefix.reserved) return kBadZfpBits;
  if (n / 4 > bytes) return kBadLength;  // before n enters any arithmetic that could overflow
  return bytes == sizeof(prefix) + zfp_bytes(n, prefix.bits) ? kOk : kBadLength;
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  const int status = check(payload, bytes, dtype, n);
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

}  // namespace

extern const CodecEntry kZfpCodec = {.id = 10, .encoder = make, .check_head = check, .decode = decode};

}  // namespace hybridcomp
