// The CRC of a message by a whole grid.
#pragma once

#include "common/crc.cuh"

namespace hybridcomp {

// Memory that a grid's blocks share. All zero before a launch and after it.
struct Work {
  uint32_t crc;   // shares so far
  uint32_t done;  // blocks that have added theirs
};

// Return true in the first warp of the last block to come here, with the sum of all shares.
HC_DEVICE bool last_block(uint32_t share, Work* work, CrcShared* shared, uint32_t* sum,
                          Grid grid = whole_grid()) {
  if (threadIdx.x >= 32) return false;
  if (threadIdx.x == 0) {
    atomicXor(&work->crc, share);
    __threadfence();
    shared->last = atomicAdd(&work->done, 1u) + 1 == grid.blocks;
    if (shared->last) {
      __threadfence();
      shared->sum = atomicExch(&work->crc, 0u);
      atomicExch(&work->done, 0u);
    }
  }
  __syncwarp();
  if (!shared->last) return false;
  *sum = shared->sum;
  return true;
}

// Factors of a header's bytes, and the CRC of as many zero bytes.
struct CrcHeader {
  uint32_t powers[32];
  uint32_t zeros;
};
HC_HD constexpr CrcHeader crc_header() {
  CrcHeader h{};
  uint32_t power = kCrcOne;
  for (int i = static_cast<int>(kCrcAt) - 1; i >= 0; --i) {
    h.powers[i] = power;
    power = crc_multiply(power, kCrcOne >> 8);
  }
  h.zeros = crc_multiply(power, ~0u);
  return h;
}
HC_TABLE CrcHeader kCrcHeader = crc_header();

// Return the CRC of a message with 28 bytes of header, by a whole warp, of which each lane has a byte;
// `length` is x^(8 * payload), `share` the payload's.
HC_DEVICE uint32_t message_crc(uint32_t byte, uint32_t length, uint32_t share) {
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t crc = lane < kCrcAt ? crc_multiply(kCrcHeader.powers[lane], crc_byte(0, byte)) : 0;
  for (int distance = 16; distance; distance /= 2) crc ^= __shfl_xor_sync(kFullWarp, crc, distance);
  return ~(crc_multiply(length, crc ^ kCrcHeader.zeros) ^ share);
}

// Write the header of a message of which this warp has the sum of all shares, at any address.
HC_DEVICE void write_header(uint8_t* msg, const Header& header, Header* room, const CrcShared& shared,
                            uint32_t sum) {
  const uint32_t lane = threadIdx.x & 31u;
  if (lane == 0) *room = header;
  __syncwarp();
  const uint32_t byte = lane < kCrcAt ? reinterpret_cast<const uint8_t*>(room)[lane] : 0;
  const uint32_t crc = message_crc(byte, shared.length, sum);
  msg[lane] = static_cast<uint8_t>(lane < kCrcAt ? byte : crc >> (8 * (lane - kCrcAt)));
}

}  // namespace hybridcomp
