// Messages of the 8-bit and 4-bit floating-point formats around their kernels.
#include <cstring>

#include "codecs/block/message.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/minifloat/minifloat.hpp"

namespace hybridcomp {
namespace {

std::size_t payload_bytes(std::size_t n, std::uint32_t block, MinifloatKind kind) {
  return sizeof(MinifloatPrefix) + blocks_of(n, block) * kind.scale_bytes() + kind.code_bytes(n);
}

Encoder encoder_of(CodecId id, std::uint32_t block, MinifloatKind kind) {
  return {{id},
          [=](std::size_t n, DTypeCode) { return sizeof(Header) + payload_bytes(n, block, kind); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            const MinifloatPrefix prefix{block, kind.format};
            return write_fixed(
                k, {id, dtype, &prefix, sizeof(prefix)}, n, block, threads, out,
                [&](std::size_t e) { return blocks_of(e, block) * kind.scale_bytes(); },
                [&](std::size_t e) { return kind.code_bytes(e); },
                [&](std::size_t at, std::size_t m, std::uint8_t* scales, std::uint8_t* codes) {
                  k.minifloat->encode(src + at * size_of(dtype), dtype, m, block, kind, scales, codes);
                });
          }};
}

// Make the encoder of a codec with elements of `Bits` (8 or 4) bits; `Mx`: in blocks of the microscaling
// formats.
template <int Bits, bool Mx>
Encoder make(CodecId id, const Parameters& parameters) {
  MinifloatFormat format = kE2M1;
  if (Bits == 8) {
    const std::string& name = parameters.word("format");
    if (name != "e4m3" && name != "e5m2") Parameters::refuse("format", "e4m3 or e5m2");
    format = name == "e4m3" ? kE4M3 : kE5M2;
  }
  const auto block = Mx ? kMxBlock : parameters.whole<std::uint32_t>("block", kMinBlock, kMaxBlock);
  if (!valid_block(block)) Parameters::refuse("block", "a multiple of 8");
  return encoder_of(id, block, {format, Mx});
}

int open(const std::uint8_t* payload, std::size_t bytes, std::size_t n, int bits, bool mx,
         MinifloatPrefix* prefix) {
  if (bytes < sizeof(*prefix)) return kBadLength;
  std::memcpy(prefix, payload, sizeof(*prefix));
  if (bits == 4 ? prefix->format != kE2M1 : prefix->format != kE4M3 && prefix->format != kE5M2)
    return kBadFormat;
  if (mx && prefix->block != kMxBlock) return kBadMxBlock;
  if (!valid_block(prefix->block)) return kBadBlock;
  if (n > bytes * 2) return kBadLength;  // before n enters any arithmetic that could overflow
  const MinifloatKind kind{static_cast<MinifloatFormat>(prefix->format), mx};
  return bytes == payload_bytes(n, prefix->block, kind) ? kOk : kBadLength;
}

template <int Bits, bool Mx>
int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode, std::size_t n) {
  MinifloatPrefix prefix;
  return open(payload, bytes, n, Bits, Mx, &prefix);
}

template <int Bits, bool Mx>
int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  MinifloatPrefix prefix;
  const int status = open(payload, bytes, n, Bits, Mx, &prefix);
  if (status != kOk) return status;
  const MinifloatKind kind{static_cast<MinifloatFormat>(prefix.format), Mx};
  const std::uint8_t* scales = payload + sizeof(prefix);
  const std::uint8_t* codes = scales + blocks_of(n, prefix.block) * kind.scale_bytes();
  const std::size_t step = prefix.block;
  split(n, step, ranges_of(n, step, threads), [&](int, std::size_t begin, std::size_t end) {
    k.minifloat->decode(scales + begin / step * kind.scale_bytes(), codes + kind.code_bytes(begin),
                        end - begin, prefix.block, kind, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

template <int Bits, bool Mx>
constexpr CodecEntry entry(std::uint8_t id) {
  return {.id = id, .encoder = make<Bits, Mx>, .check_head = check<Bits, Mx>, .decode = decode<Bits, Mx>};
}

}  // namespace

extern const CodecEntry kFp8Codec = entry<8, false>(7), kMxfp8Codec = entry<8, true>(8),
                        kMxfp4Codec = entry<4, true>(9);

}  // namespace hybridcomp
