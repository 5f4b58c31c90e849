// Bytes moved by a warp between any two addresses, and words loaded from unaligned addresses.
#pragma once

#include "common/common.cuh"

namespace hybridcomp {

// Copy `size` bytes. Stores are of aligned words; each is made of the one or two aligned words that hold its
// bytes, all of which overlap the source.
HC_DEVICE void warp_copy(uint8_t* dst, const uint8_t* src, uint64_t size) {
  constexpr int kBatch = 4;  // words of a lane in flight
  const uint32_t lane = threadIdx.x & 31u;
  uint64_t head = (4 - (reinterpret_cast<uint64_t>(dst) & 3)) & 3;
  if (head > size) head = size;
  if (lane < head) dst[lane] = src[lane];
  dst += head;
  src += head;
  size -= head;
  const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uint64_t>(src) & 3);
  const uint32_t* from = reinterpret_cast<const uint32_t*>(src - odd);
  uint32_t* to = reinterpret_cast<uint32_t*>(dst);
  const uint64_t inside = (odd + size) / 4;  // aligned words that do not reach past the source
  const uint64_t words = odd == 0 ? inside : (inside ? inside - 1 : 0);
  for (uint64_t base = 0; base < words; base += 32 * kBatch) {
    uint32_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint64_t at = base + i * 32 + lane;
      if (at < words) batch[i] = odd ? __funnelshift_r(from[at], from[at + 1], 8 * odd) : from[at];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint64_t at = base + i * 32 + lane;
      if (at < words) to[at] = batch[i];
    }
  }
  const uint64_t rest = size - words * 4;  // fewer than 8
  if (lane < rest) dst[words * 4 + lane] = src[words * 4 + lane];
}

// Load a word at an address that is a multiple of 2.
template <typename T>
HC_DEVICE T load_even(const uint8_t* p) {
  if constexpr (sizeof(T) > 2) {
    if (!aligned_to(p, sizeof(T))) {
      T x = 0;
      if (sizeof(T) == 8 && aligned_to(p, 4)) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i)
          x |= static_cast<T>(reinterpret_cast<const uint32_t*>(p)[i]) << (32 * i % (8 * sizeof(T)));
      } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i)
          x |= static_cast<T>(reinterpret_cast<const uint16_t*>(p)[i]) << (16 * i);
      }
      return x;
    }
  }
  return *reinterpret_cast<const T*>(p);
}

// Whether a fault was found already, as one thread sees it: other blocks may be finding faults right now, and
// all threads of this one must go the same way.
HC_DEVICE bool stopped(uint32_t* status) {
  uint32_t code = 0;
  if (threadIdx.x == 0) code = atomicOr(reinterpret_cast<unsigned int*>(status), 0u);
  return __syncthreads_or(static_cast<int>(code)) != 0;
}

// Return the sum over a warp's lanes up to and with this one.
HC_DEVICE uint32_t warp_inclusive(uint32_t x) {
  const uint32_t lane = threadIdx.x & 31u;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, x, static_cast<unsigned int>(distance));
    if (lane >= static_cast<uint32_t>(distance)) x += before;
  }
  return x;
}

}  // namespace hybridcomp
