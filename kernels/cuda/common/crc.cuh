// CRC-32C of device memory. A CRC is linear: each word's share is the word times a power of x that depends on
// how many bytes follow it, and shares are added by xor, in any order. So threads take words a row apart, as
// memory likes it, and step their sums over a row by six look-ups (Horner's rule); what is left at the end
// of a region of rows is joined by multiplications.
#pragma once

#include "common/common.cuh"

namespace hybridcomp {

constexpr uint32_t kCrcPolynomial = 0x82F63B78u;  // bit-reflected, as kernels/codecs/common/crc32c.cpp
constexpr uint32_t kCrcOne = 0x80000000u;         // x^0
constexpr int kCrcThreads = 256;
constexpr uint64_t kCrcRow = kCrcThreads * 16;  // bytes that a block reads at a time

// Times x.
HC_HD constexpr uint32_t crc_step(uint32_t b) { return (b >> 1) ^ ((0u - (b & 1u)) & kCrcPolynomial); }

// What a bit that falls out last, last but one, ... of four steps leaves.
constexpr uint32_t kCrcFall1 = kCrcPolynomial, kCrcFall2 = crc_step(kCrcFall1),
                   kCrcFall3 = crc_step(kCrcFall2), kCrcFall4 = crc_step(kCrcFall3);

// Times x^4 at once, with what the four bits that fall out leave.
HC_HD constexpr uint32_t crc_four_steps(uint32_t b) {
  return (b >> 4) ^ ((0u - (b & 1u)) & kCrcFall4) ^ ((0u - ((b >> 1) & 1u)) & kCrcFall3) ^
         ((0u - ((b >> 2) & 1u)) & kCrcFall2) ^ ((0u - ((b >> 3) & 1u)) & kCrcFall1);
}

// Four bits at a time: a warp waits for each result, and this is a fourth of the way to it.
HC_HD constexpr uint32_t crc_multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 31; i > 0; i -= 4) {
    const uint32_t b1 = crc_step(b), b2 = crc_step(b1), b3 = crc_step(b2);
    product ^= ((0u - ((a >> i) & 1u)) & b) ^ ((0u - ((a >> (i - 1)) & 1u)) & b1) ^
               ((0u - ((a >> (i - 2)) & 1u)) & b2) ^ ((0u - ((a >> (i - 3)) & 1u)) & b3);
    b = crc_four_steps(b);
  }
  return product;
}

// x^(8 * 2^i): what 2^i zero bytes multiply a CRC by.
struct CrcPowers {
  uint32_t of[64];
};
HC_HD constexpr CrcPowers crc_powers() {
  CrcPowers p{};
  p.of[0] = kCrcOne >> 8;
  for (int i = 1; i < 64; ++i) p.of[i] = crc_multiply(p.of[i - 1], p.of[i - 1]);
  return p;
}
HC_CONSTANT CrcPowers kCrcPowers = crc_powers();

// Products of x^(8 * kCrcRow) and each bit of a word, of which the tables are made.
struct CrcBasis {
  uint32_t of[32];
};
HC_HD constexpr CrcBasis crc_row_basis() {
  uint32_t power = kCrcOne >> 8;
  for (uint64_t bytes = kCrcRow; bytes > 1; bytes /= 2) power = crc_multiply(power, power);
  CrcBasis b{};
  for (int i = 0; i < 32; ++i) b.of[i] = crc_multiply(power, 1u << i);
  return b;
}
HC_CONSTANT CrcBasis kCrcRowBasis = crc_row_basis();

// x^(8 * bytes), by all lanes of a warp together.
HC_DEVICE uint32_t crc_zeros(uint64_t bytes) {
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t power = (bytes >> lane) & 1u ? kCrcPowers.of[lane] : kCrcOne;
  if ((bytes >> (lane + 32)) & 1u) power = crc_multiply(power, kCrcPowers.of[lane + 32]);
  for (int distance = 16; distance; distance /= 2)
    power = crc_multiply(power, __shfl_xor_sync(kFullWarp, power, distance));
  return power;
}

// One byte, of a CRC as it stands between bytes.
HC_DEVICE uint32_t crc_byte(uint32_t crc, uint32_t byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((0u - (crc & 1u)) & kCrcPolynomial);
  return crc;
}

// What multiplies by x^(8 * kCrcRow): the products of each six bits of a word, added. A lane has a copy of
// its own, in its own bank of shared memory, so that look-ups at random do not wait for one another.
constexpr uint32_t kCrcTableWords = (5 * 64 + 4) * 32;

HC_DEVICE void crc_fill_table(uint32_t* table) {
  const uint32_t lane = threadIdx.x & 31u, part = threadIdx.x / 32;
  if (part < 6) {
    const uint32_t first = 6 * part;
    uint32_t* const own = table + first / 6 * (64 * 32) + lane;
    uint32_t value[64];
    value[0] = 0;
#pragma unroll
    for (uint32_t i = 1; i < 64; ++i) {
      const uint32_t bit = i & 1 ? 0 : i & 2 ? 1 : i & 4 ? 2 : i & 8 ? 3 : i & 16 ? 4 : 5;  // i's lowest
      value[i] = value[i & (i - 1)] ^ kCrcRowBasis.of[first + bit < 32 ? first + bit : 31];
    }
#pragma unroll
    for (uint32_t i = 0; i < 64; ++i)
      if (i < 4 || part < 5) own[i * 32] = value[i];
  }
}

HC_DEVICE uint32_t crc_over_row(const uint32_t* table, uint32_t c) {
  const char* const own = reinterpret_cast<const char*>(table + (threadIdx.x & 31u));
  constexpr uint32_t kEntry = 63u << 7, kPart = 64 * 128;  // bytes: an entry is 32 words
  return *reinterpret_cast<const uint32_t*>(own + ((c << 7) & kEntry)) ^
         *reinterpret_cast<const uint32_t*>(own + kPart + ((c << 1) & kEntry)) ^
         *reinterpret_cast<const uint32_t*>(own + 2 * kPart + ((c >> 5) & kEntry)) ^
         *reinterpret_cast<const uint32_t*>(own + 3 * kPart + ((c >> 11) & kEntry)) ^
         *reinterpret_cast<const uint32_t*>(own + 4 * kPart + ((c >> 17) & kEntry)) ^
         *reinterpret_cast<const uint32_t*>(own + 5 * kPart + ((c >> 23) & (3u << 7)));
}

// The share of this block's part of `length` bytes at any address, in all threads of its first warp. The
// block has kCrcThreads threads. `table` (kCrcTableWords, filled and synchronised) and `sums` (8) are shared
// memory. A CRC that begins at zero, without the inversions at either end.
HC_DEVICE uint32_t crc_share(const uint8_t* begin_of_data, uint64_t length, const uint32_t* table,
                             uint32_t* sums) {
  const uint64_t before = (0 - reinterpret_cast<uint64_t>(begin_of_data)) & 15;  // the first aligned byte
  const uint64_t lead = before < length ? before : length;
  const uint8_t* const data = begin_of_data + lead;
  const uint64_t size = length - lead;
  const uint32_t thread = threadIdx.x, lane = thread & 31u;
  const uint64_t rows = size / kCrcRow;
  const uint64_t each = rows / gridDim.x, more = rows % gridDim.x, block = blockIdx.x;
  const uint64_t begin = block * each + (block < more ? block : more);
  const uint64_t end = begin + each + (block < more ? 1 : 0);
  const uint4* words = reinterpret_cast<const uint4*>(data) + begin * kCrcThreads + thread;
  uint4 c = {0, 0, 0, 0};
#pragma unroll 4
  for (uint64_t row = begin; row < end; ++row, words += kCrcThreads) {
    const uint4 w = *words;
    c.x = crc_over_row(table, c.x) ^ w.x;
    c.y = crc_over_row(table, c.y) ^ w.y;
    c.z = crc_over_row(table, c.z) ^ w.z;
    c.w = crc_over_row(table, c.w) ^ w.w;
  }
  // The four words of a thread, then pairs of threads, warps and the block: the later one's place is the
  // power 1.
  constexpr CrcPowers kPower = crc_powers();
  uint32_t sum = crc_multiply(kPower.of[2], c.x) ^ c.y;
  sum = crc_multiply(kPower.of[2], sum) ^ c.z;
  sum = crc_multiply(kPower.of[2], sum) ^ c.w;
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const uint32_t later = __shfl_down_sync(kFullWarp, sum, 1u << step);
    sum = crc_multiply(kPower.of[4 + step], sum) ^ later;
  }
  if (lane == 0) sums[thread / 32] = sum;
  __syncthreads();
  if (thread >= 32) return 0;
  sum = lane < kCrcThreads / 32 ? sums[lane] : 0;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const uint32_t later = __shfl_down_sync(kFullWarp, sum, 1u << step);
    sum = crc_multiply(kPower.of[9 + step], sum) ^ later;
  }
  sum = __shfl_sync(kFullWarp, sum, 0);
  // A word's own share is the word times x^32.
  uint32_t share = crc_multiply(crc_zeros(4 + (size - end * kCrcRow)), sum);
  // What is left after the last row: 128 bytes for each lane of the last block.
  if (block + 1 == gridDim.x) {
    const uint64_t rest = size - rows * kCrcRow, from = lane * (kCrcRow / 32),
                   left = rest > from ? rest - from : 0;
    const uint64_t count = left < kCrcRow / 32 ? left : kCrcRow / 32;
    const uint8_t* bytes = data + rows * kCrcRow + from;
    uint32_t own = 0;
    for (uint64_t i = 0; i < count; ++i) own = crc_byte(own, bytes[i]);
    const uint64_t after = left - count;
    uint32_t power = kCrcOne;
    for (uint32_t i = 0; i < 12; ++i)
      if ((after >> i) & 1u) power = crc_multiply(power, kCrcPowers.of[i]);
    own = crc_multiply(power, own);
    for (int distance = 16; distance; distance /= 2) own ^= __shfl_xor_sync(kFullWarp, own, distance);
    share ^= own;
  }
  if (block == 0 && lead) {
    uint32_t own = 0;
    for (uint64_t i = 0; i < lead; ++i) own = crc_byte(own, begin_of_data[i]);
    share ^= crc_multiply(crc_zeros(size), own);
  }
  return share;
}

}  // namespace hybridcomp
