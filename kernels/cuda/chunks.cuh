// What decoders of blocks share. A warp writes a chunk of 1024 elements at a time, in eight rows of 128: lane
// l has elements 4 l to 4 l + 3 of each row, so that all that it writes at once lies side by side with what
// the other lanes write.
#pragma once

#include "elements.cuh"

namespace hybridcomp {

constexpr int kRows = 8;        // of a chunk
constexpr int kFour = 4;        // elements of a lane in a row
constexpr uint32_t kRow = 128;  // elements
constexpr uint32_t kChunk = kRows * kRow;

HC_DEVICE uint32_t lane_of() { return threadIdx.x & 31u; }
HC_DEVICE uint64_t global_warp() { return global_thread() / 32; }
HC_DEVICE uint64_t global_warps() { return global_threads() / 32; }

// The blocks of `size` elements near an element: one division for many look-ups.
struct NearBlocks {
  uint64_t first;  // block of the element
  uint32_t rest;   // elements of that block before it
  uint32_t size, shift;

  // The block of the element `offset` further on.
  __device__ __forceinline__ uint64_t operator()(uint32_t offset) const {
    const uint32_t o = rest + offset;
    return first + (shift < 32 ? o >> shift : o / size);
  }
};
HC_DEVICE NearBlocks near_blocks(uint64_t at, uint32_t size) {
  const bool power = (size & (size - 1)) == 0;
  const uint32_t shift = power ? static_cast<uint32_t>(__ffs(static_cast<int>(size))) - 1 : 32;
  const uint64_t first = power ? at >> shift : at / size;
  return {first, static_cast<uint32_t>(at - first * size), size, shift};
}

// Whether packs of four can be read and written there.
template <DTypeCode D>
HC_DEVICE bool packs_of_four(const void* p) {
  return aligned_to(p, alignof(Pack<StorageOf<D>, kFour>));
}

// Write, or add, a whole chunk to where it begins at: values(row, v) gives a lane's four of a row.
template <DTypeCode D, bool Add, typename T, typename Values>
HC_DEVICE void put_chunk(StorageOf<D>* chunk, bool packs, Values values) {
  StorageOf<D>* out = chunk + kFour * lane_of();
  if (packs) {
    Pack<StorageOf<D>, kFour> pack[kRows];
    if constexpr (Add) {  // all loads before any store: they do not wait for each other
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        pack[row] = *reinterpret_cast<const Pack<StorageOf<D>, kFour>*>(out + row * kRow);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      T v[kFour];
      values(row, v);
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        if constexpr (Add)
          pack[row].of[i] += static_cast<StorageOf<D>>(v[i]);
        else
          pack[row].of[i] = stored<D>(v[i]);
      }
      *reinterpret_cast<Pack<StorageOf<D>, kFour>*>(out + row * kRow) = pack[row];
    }
  } else {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      T v[kFour];
      values(row, v);
#pragma unroll
      for (int i = 0; i < kFour; ++i) put<D, Add>(out + row * kRow + i, v[i]);
    }
  }
}

// What is left of an array after its whole chunks, from element `at` on, by all threads of the grid: a warp
// alone would wait for memory again and again. value(e) gives an element's.
template <DTypeCode D, bool Add, typename Value>
HC_DEVICE void put_rest(StorageOf<D>* out, uint64_t at, uint64_t n, Value value) {
  for (uint64_t e = at + global_thread(); e < n; e += global_threads()) put<D, Add>(out + e, value(e));
}

}  // namespace hybridcomp
