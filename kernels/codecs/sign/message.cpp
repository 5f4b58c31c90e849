// Messages of the sign quantizer around its kernels.
#include <cstring>

#include "codecs/block/message.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/sign/sign.hpp"

namespace hybridcomp {
namespace {

std::size_t mean_bytes(std::size_t blocks, DTypeCode dtype) { return blocks * (dtype == kFloat64 ? 8 : 4); }

std::size_t payload_bytes(std::size_t n, DTypeCode dtype, std::uint32_t block) {
  return sizeof(QuantizePrefix) + mean_bytes(blocks_of(n, block), dtype) + (n + 7) / 8;
}

Encoder make(CodecId id, const Parameters& parameters) {
  const auto block = parameters.whole<std::uint32_t>("block", kMinBlock, kMaxBlock);
  if (!valid_block(block)) Parameters::refuse("block", "a multiple of 8");
  return {{.id = id, .bits = 1, .block = block},
          [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + payload_bytes(n, dtype, block); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            const QuantizePrefix prefix{block, 0};
            return write_fixed(
                k, {id, dtype, &prefix, sizeof(prefix)}, n, block, threads, out,
                [&](std::size_t e) { return mean_bytes(blocks_of(e, block), dtype); },
                [](std::size_t e) { return (e + 7) / 8; },
                [&](std::size_t at, std::size_t m, std::uint8_t* means, std::uint8_t* bits) {
                  k.sign->encode(src + at * size_of(dtype), dtype, m, block, means, bits);
                });
          }};
}

// Check a payload of n elements and read its block size; returns a Status.
int open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
         std::uint32_t* block) {
  QuantizePrefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  if (!valid_block(prefix.block) || prefix.flags) return kBadBlock;
  *block = prefix.block;
  // The first check comes before n enters any arithmetic that could overflow.
  return n / 8 <= bytes && bytes == payload_bytes(n, dtype, prefix.block) ? kOk : kBadLength;
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  std::uint32_t block;
  return open(payload, bytes, dtype, n, &block);
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  std::uint32_t block;
  const int status = open(payload, bytes, dtype, n, &block);
  if (status != kOk) return status;
  const std::uint8_t* means = payload + sizeof(QuantizePrefix);
  const std::uint8_t* bits = means + mean_bytes(blocks_of(n, block), dtype);
  split(n, block, ranges_of(n, block, threads), [&](int, std::size_t begin, std::size_t end) {
    k.sign->decode(means + mean_bytes(begin / block, dtype), bits + begin / 8, dtype == kFloat64, end - begin,
                   block, out + begin * size_of(out_dtype), out_dtype, add);
  });
  return kOk;
}

}  // namespace

extern const CodecEntry kSignCodec = {.id = 6, .encoder = make, .check_head = check, .decode = decode};

}  // namespace hybridcomp
