// The CRC of a message by a whole grid.
#pragma once

#include "crc.cuh"

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

// The CRC of a message with 28 bytes of header, by a whole warp.
HC_DEVICE uint32_t message_crc(const uint8_t* header, uint64_t payload, uint32_t share) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < kCrcAt; ++i) crc = crc_byte(crc, header[i]);
  return ~(crc_multiply(crc_zeros(payload), crc) ^ share);
}

}  // namespace hybridcomp
