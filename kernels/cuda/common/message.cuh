// The CRC of a message by a whole grid.
#pragma once

#include "common/crc.cuh"

namespace hybridcomp {

// What a grid has between its blocks. All zero before a launch and after it.
struct Work {
  uint32_t crc;   // shares so far
  uint32_t done;  // blocks
};

// True in the first warp of the last block to come here, with the sum of all shares.
HC_DEVICE bool last_block(uint32_t share, Work* work, uint32_t* shared, uint32_t* sum) {
  if (threadIdx.x == 0) {
    atomicXor(&work->crc, share);
    __threadfence();
    shared[0] = atomicAdd(&work->done, 1u) + 1 == gridDim.x;
    if (shared[0]) {
      __threadfence();
      shared[1] = atomicExch(&work->crc, 0u);
      atomicExch(&work->done, 0u);
    }
  }
  __syncthreads();
  *sum = shared[1];
  return shared[0] && threadIdx.x < 32;
}

// What each byte of a header is multiplied by, and the CRC of as many zero bytes.
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
HC_CONSTANT CrcHeader kCrcHeader = crc_header();

// The CRC of a message with 28 bytes of header, by a whole warp: each lane has a byte.
HC_DEVICE uint32_t message_crc(const uint8_t* header, uint64_t payload, uint32_t share) {
  const uint32_t lane = threadIdx.x & 31u;
  uint32_t crc = lane < kCrcAt ? crc_multiply(kCrcHeader.powers[lane], crc_byte(0, header[lane])) : 0;
  for (int distance = 16; distance; distance /= 2) crc ^= __shfl_xor_sync(kFullWarp, crc, distance);
  return ~(crc_multiply(crc_zeros(payload), crc ^ kCrcHeader.zeros) ^ share);
}

}  // namespace hybridcomp
