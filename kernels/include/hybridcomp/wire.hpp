// The header of every message: the C++ and CUDA twin of hybridcomp/wire.py. Little-endian.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hybridcomp {

// Element types, by their code in a header (hybridcomp.arrays.DType).
enum DTypeCode : std::uint8_t { kFloat32 = 1, kFloat64 = 2, kFloat16 = 3, kBFloat16 = 4 };

// Wire ids that code other than the codec's own looks for (hybridcomp.codecs has all ids).
enum WireId : std::uint8_t { kNoneId = 0, kInt8Id = 3, kTopkId = 16, kThresholdId = 17, kSidcoId = 18 };

struct Header {
  std::uint32_t magic;    // kMagic
  std::uint8_t codec;     // wire id
  std::uint8_t dtype;     // DTypeCode of the encoded array
  std::uint16_t flags;    // reserved, zero
  std::uint64_t count;    // elements
  std::uint64_t payload;  // bytes after the header
  std::uint32_t params;   // CRC-32C of the codec's spec string
  std::uint32_t crc;      // CRC-32C of the 28 bytes before it and of the payload
};
static_assert(sizeof(Header) == 32, "the header is 32 bytes on the wire");
constexpr std::size_t kCrcAt = 28;
#if !defined(__CUDACC_RTC__)  // NVRTC has no offsetof
static_assert(offsetof(Header, codec) == 4 && offsetof(Header, dtype) == 5 && offsetof(Header, flags) == 6 &&
                  offsetof(Header, count) == 8 && offsetof(Header, payload) == 16 &&
                  offsetof(Header, params) == 24 && offsetof(Header, crc) == kCrcAt,
              "the header has no padding");
#endif

constexpr std::uint32_t kMagic = 0x01435948u;  // "HYC" and the format's version, 1

// Prefix of the quantizers' payload. After it come, with kHadamard, a uint64 seed; a scale per block (float;
// double for a double message), with kAffine followed by an offset; then the packed integers.
struct QuantizePrefix {
  std::uint32_t block;  // elements that share a scale
  std::uint32_t flags;  // kAffine and kHadamard; other bits are zero
};
static_assert(sizeof(QuantizePrefix) == 8, "the quantizers' prefix is 8 bytes on the wire");

constexpr std::uint32_t kAffine = 1;    // unsigned integers and an offset per block
constexpr std::uint32_t kHadamard = 2;  // whole blocks are transformed, with signs drawn by the seed

constexpr std::uint32_t kMinBlock = 8;
constexpr std::uint32_t kMaxBlock = 65536;

}  // namespace hybridcomp
