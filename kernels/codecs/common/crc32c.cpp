#include "codecs/common/crc32c.hpp"

#include <array>
#include <cstring>

#if HC_X86
#include <nmmintrin.h>
#endif

namespace hybridcomp {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;

// kTable[0] steps one byte; kTable[i] steps a byte that is followed by i zero bytes.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_table() {
  std::array<std::array<std::uint32_t, 256>, 8> t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    t[0][i] = c;
  }
  for (std::size_t k = 1; k < 8; ++k)
    for (std::size_t i = 0; i < 256; ++i) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xFF];
  return t;
}
constexpr auto kTable = make_table();

std::uint64_t load64(const std::uint8_t* p) {
  std::uint64_t v;
  std::memcpy(&v, p, 8);
  if constexpr (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__) v = __builtin_bswap64(v);
  return v;
}

// Polynomials modulo the CRC's, bit-reflected: bit 31 is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int i = 0; i < 32; ++i) {
    if (a & (0x80000000u >> i)) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// kPower[i] is x^(8 * 2^i): the factor by which 2^i zero bytes multiply a CRC.
constexpr std::array<std::uint32_t, 64> make_powers() {
  std::array<std::uint32_t, 64> p{};
  p[0] = 0x80000000u >> 8;
  for (std::size_t i = 1; i < 64; ++i) p[i] = multiply(p[i - 1], p[i - 1]);
  return p;
}
constexpr auto kPower = make_powers();

constexpr std::uint32_t zeros(std::uint64_t bytes) {
  std::uint32_t factor = 0x80000000u;
  for (std::size_t i = 0; bytes; ++i, bytes >>= 1)
    if (bytes & 1) factor = multiply(factor, kPower[i]);
  return factor;
}

}  // namespace

std::uint32_t crc32c_table(const std::uint8_t* data, std::size_t size, std::uint32_t crc) {
  crc = ~crc;
  for (; size >= 8; size -= 8, data += 8) {
    const std::uint64_t v = load64(data) ^ crc;
    crc = kTable[7][v & 0xFF] ^ kTable[6][(v >> 8) & 0xFF] ^ kTable[5][(v >> 16) & 0xFF] ^
          kTable[4][(v >> 24) & 0xFF] ^ kTable[3][(v >> 32) & 0xFF] ^ kTable[2][(v >> 40) & 0xFF] ^
          kTable[1][(v >> 48) & 0xFF] ^ kTable[0][v >> 56];
  }
  for (; size; --size, ++data) crc = (crc >> 8) ^ kTable[0][(crc ^ *data) & 0xFF];
  return ~crc;
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t size_b) {
  return multiply(zeros(size_b), crc_a) ^ crc_b;
}

#if HC_X86

namespace {

// A step over `kStripe` zero bytes by four table look-ups: joins the three streams of one round.
constexpr std::size_t kStripe = 2048;
constexpr std::array<std::array<std::uint32_t, 256>, 4> make_shift(std::size_t bytes) {
  std::array<std::array<std::uint32_t, 256>, 4> t{};
  const std::uint32_t factor = zeros(bytes);
  for (std::uint32_t k = 0; k < 4; ++k)
    for (std::uint32_t i = 0; i < 256; ++i) t[k][i] = multiply(factor, i << (8 * k));
  return t;
}
const auto kShift = make_shift(kStripe);

std::uint32_t shift(std::uint32_t crc) {
  return kShift[0][crc & 0xFF] ^ kShift[1][(crc >> 8) & 0xFF] ^ kShift[2][(crc >> 16) & 0xFF] ^
         kShift[3][crc >> 24];
}

}  // namespace

// The instruction has a latency of three cycles and starts one a cycle: three streams keep it busy.
__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(const std::uint8_t* data, std::size_t size,
                                                             std::uint32_t crc) {
  std::uint64_t c = static_cast<std::uint32_t>(~crc);
  for (; size >= 3 * kStripe; size -= 3 * kStripe, data += 3 * kStripe) {
    std::uint64_t c1 = 0, c2 = 0;
    for (std::size_t line = 0; line < kStripe; line += 64) {
      for (std::size_t stream = 0; stream < 3; ++stream)  // the next round's; also past the end
        _mm_prefetch(reinterpret_cast<const char*>(data) + (3 + stream) * kStripe + line, _MM_HINT_T0);
      for (std::size_t i = line; i < line + 64; i += 8) {
        c = _mm_crc32_u64(c, load64(data + i));
        c1 = _mm_crc32_u64(c1, load64(data + kStripe + i));
        c2 = _mm_crc32_u64(c2, load64(data + 2 * kStripe + i));
      }
    }
    c = shift(static_cast<std::uint32_t>(c)) ^ c1;
    c = shift(static_cast<std::uint32_t>(c)) ^ c2;
  }
  for (; size >= 8; size -= 8, data += 8) c = _mm_crc32_u64(c, load64(data));
  for (; size; --size, ++data) c = _mm_crc32_u8(static_cast<std::uint32_t>(c), *data);
  return ~static_cast<std::uint32_t>(c);
}

#endif

}  // namespace hybridcomp
