// CRC-32C of device memory. A CRC is linear: each word's share is the word times a power of x that depends on
// how many bytes follow it, and shares are added by xor, in any order. So threads take words a row apart,
// which suits memory, and step their sums over a row by six look-ups (Horner's rule). A thread's sum is then
// multiplied by the power of its place in a row, the block's by that of the bytes after its rows. A
// multiplication is a chain of some 130 cycles: three follow the last word, and a small message waits for
// little else.
#pragma once

#include "common/common.cuh"

namespace hybridcomp {

constexpr uint32_t kCrcPolynomial = 0x82F63B78u;  // bit-reflected, as kernels/codecs/common/crc32c.cpp
constexpr uint32_t kCrcOne = 0x80000000u;         // x^0
constexpr int kCrcThreads = 256;
constexpr uint64_t kCrcRow = kCrcThreads * 16;  // bytes that a block reads at a time

// Multiply by x.
HC_HD constexpr uint32_t crc_step(uint32_t b) { return (b >> 1) ^ ((0u - (b & 1u)) & kCrcPolynomial); }

// Remainders of the bits that fall out last, last but one, ... of four steps.
constexpr uint32_t kCrcFall1 = kCrcPolynomial, kCrcFall2 = crc_step(kCrcFall1),
                   kCrcFall3 = crc_step(kCrcFall2), kCrcFall4 = crc_step(kCrcFall3);

// Multiply by x^4 at once, adding the remainders of the four bits that fall out.
HC_HD constexpr uint32_t crc_four_steps(uint32_t b) {
  return (b >> 4) ^ ((0u - (b & 1u)) & kCrcFall4) ^ ((0u - ((b >> 1) & 1u)) & kCrcFall3) ^
         ((0u - ((b >> 2) & 1u)) & kCrcFall2) ^ ((0u - ((b >> 3) & 1u)) & kCrcFall1);
}

// Multiply four bits at a time: a warp waits for each result, and this takes a fourth of the steps.
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

// Powers x^(8 * 2^i), by which 2^i zero bytes multiply a CRC.
struct CrcPowers {
  uint32_t of[64];
};
HC_HD constexpr CrcPowers crc_powers() {
  CrcPowers p{};
  p.of[0] = kCrcOne >> 8;
  for (int i = 1; i < 64; ++i) p.of[i] = crc_multiply(p.of[i - 1], p.of[i - 1]);
  return p;
}
HC_TABLE CrcPowers kCrcPowers = crc_powers();

// Factors that move the sum of a thread's 16 bytes in a row to the row's end, and a byte's by the number of
// bytes that follow it.
struct CrcPlaces {
  uint32_t thread[kCrcThreads];
  uint32_t byte[16];
};
HC_HD constexpr CrcPlaces crc_places() {
  const CrcPowers power = crc_powers();
  CrcPlaces p{};
  p.thread[kCrcThreads - 1] = power.of[2];  // a word's own share is the word times x^32
  for (int i = kCrcThreads - 1; i > 0; --i) p.thread[i - 1] = crc_multiply(power.of[4], p.thread[i]);
  p.byte[0] = kCrcOne;
  for (int i = 1; i < 16; ++i) p.byte[i] = crc_multiply(power.of[0], p.byte[i - 1]);
  return p;
}
HC_TABLE CrcPlaces kCrcPlaces = crc_places();

// Products of x^(8 * kCrcRow) and each bit of a word, from which the tables are made.
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

// Return x^(8 * bytes), by all lanes of a warp together.
HC_DEVICE uint32_t crc_zeros(uint64_t bytes) {
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t power = (bytes >> lane) & 1u ? kCrcPowers.of[lane] : kCrcOne;
  if ((bytes >> (lane + 32)) & 1u) power = crc_multiply(power, kCrcPowers.of[lane + 32]);
  for (int distance = 16; distance; distance /= 2)
    power = crc_multiply(power, __shfl_xor_sync(kFullWarp, power, distance));
  return power;
}

// Step a CRC, as it stands between bytes, by one byte.
HC_DEVICE uint32_t crc_byte(uint32_t crc, uint32_t byte) {
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((0u - (crc & 1u)) & kCrcPolynomial);
  return crc;
}

// Words of the table that multiplies by x^(8 * kCrcRow): the products of each six bits of a word are added.
// Each lane has a copy in its own bank of shared memory, so that random look-ups do not wait for one another.
constexpr uint32_t kCrcTableWords = (5 * 64 + 4) * 32;

// Shared memory of a block's threads.
struct CrcShared {
  uint32_t table[kCrcTableWords];
  uint32_t sums[kCrcThreads / 32];
  uint32_t after;   // x^(8 * bytes after the block's rows)
  uint32_t length;  // x^(8 * all bytes)
  uint32_t last;    // 1 in the last block of a grid to have its share
  uint32_t sum;     // sum of all shares, in that block
};

// Fill the table, by the first six warps, a part each.
HC_DEVICE void crc_fill_table(uint32_t* table) {
  const uint32_t lane = threadIdx.x & 31u, part = threadIdx.x / 32;
  const uint32_t first = 6 * part;
  uint32_t* const own = table + part * (64 * 32) + lane;
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

// Return the share of at most 16 bytes, by a warp: as if no bytes followed them.
HC_DEVICE uint32_t crc_few(const uint8_t* bytes, uint32_t count) {
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t own =
      lane < count ? crc_multiply(kCrcPlaces.byte[(count - 1 - lane) & 15u], crc_byte(0, bytes[lane])) : 0;
  for (int distance = 16; distance; distance /= 2) own ^= __shfl_xor_sync(kFullWarp, own, distance);
  return own;
}

// Return the share of this block's part of `length` bytes at any address, in all threads of its first warp;
// fills `shared`. The block has kCrcThreads threads. The CRC begins at zero, without the inversions at either
// end. Rows end with the last whole 16 bytes: the first row has zeros before the data, which change nothing.
HC_DEVICE uint32_t crc_share(const uint8_t* begin_of_data, uint64_t length, CrcShared* shared,
                             Grid grid = whole_grid()) {
  constexpr CrcPowers kPower = crc_powers();
  const uint64_t before = (0 - reinterpret_cast<uint64_t>(begin_of_data)) & 15;  // the first aligned byte
  const uint32_t lead = static_cast<uint32_t>(before < length ? before : length);
  const uint8_t* const data = begin_of_data + lead;
  const uint64_t size = length - lead, whole = size / 16;
  const uint32_t tail = static_cast<uint32_t>(size % 16);
  const uint32_t thread = threadIdx.x, lane = thread & 31u, warp = thread / 32;
  const uint64_t rows = (whole + kCrcThreads - 1) / kCrcThreads, absent = rows * kCrcThreads - whole;
  const uint64_t each = rows / grid.blocks, more = rows % grid.blocks, block = grid.block;
  const uint64_t begin = block * each + (block < more ? block : more);
  const uint64_t end = begin + each + (block < more ? 1 : 0);
  const uint64_t place = begin * kCrcThreads + thread;  // counted with the absent words
  const uint4* words = reinterpret_cast<const uint4*>(data) +
                       (static_cast<std::int64_t>(place) - static_cast<std::int64_t>(absent));
  uint4 c = {0, 0, 0, 0};
  if (begin < end && place >= absent) c = *words;
  const uint32_t own_place = kCrcPlaces.thread[thread];
  if (warp < 6) crc_fill_table(shared->table);
  if (warp == 6) {
    const uint32_t power = crc_zeros((rows - end) * kCrcRow + tail);
    if (lane == 0) shared->after = power;
  }
  if (warp == 7) {
    const uint32_t power = crc_zeros(length);
    if (lane == 0) shared->length = power;
  }
  __syncthreads();
#pragma unroll 4
  for (uint64_t row = begin + 1; row < end; ++row) {
    words += kCrcThreads;
    const uint4 w = *words;
    c.x = crc_over_row(shared->table, c.x) ^ w.x;
    c.y = crc_over_row(shared->table, c.y) ^ w.y;
    c.z = crc_over_row(shared->table, c.z) ^ w.z;
    c.w = crc_over_row(shared->table, c.w) ^ w.w;
  }
  constexpr uint32_t kTwelve = crc_multiply(kPower.of[2], kPower.of[3]);  // bytes
  uint32_t sum =
      crc_multiply(kTwelve, c.x) ^ crc_multiply(kPower.of[3], c.y) ^ crc_multiply(kPower.of[2], c.z) ^ c.w;
  sum = crc_multiply(own_place, sum);
  for (int distance = 16; distance; distance /= 2) sum ^= __shfl_xor_sync(kFullWarp, sum, distance);
  if (lane == 0) shared->sums[warp] = sum;
  __syncthreads();
  if (thread >= 32) return 0;
  sum = lane < kCrcThreads / 32 ? shared->sums[lane] : 0;
  for (int distance = 16; distance; distance /= 2) sum ^= __shfl_xor_sync(kFullWarp, sum, distance);
  uint32_t share = crc_multiply(shared->after, sum);
  if (block + 1 == grid.blocks && tail) share ^= crc_few(data + whole * 16, tail);
  if (block == 0 && lead) share ^= crc_multiply(crc_zeros(size), crc_few(begin_of_data, lead));
  return share;
}

}  // namespace hybridcomp
