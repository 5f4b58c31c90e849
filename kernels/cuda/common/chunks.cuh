// Helpers that decoders of blocks share. A warp writes a chunk of 1024 elements at a time, in eight rows of
// 128: lane l has elements 4 l to 4 l + 3 of each row, so that the lanes' writes lie side by side.
#pragma once

#include "common/elements.cuh"

namespace hybridcomp {

constexpr int kRows = 8;        // rows of a chunk
constexpr int kFour = 4;        // elements of a lane in a row
constexpr uint32_t kRow = 128;  // elements of a row
constexpr uint32_t kChunk = kRows * kRow;

HC_DEVICE uint32_t lane_of() { return threadIdx.x & 31u; }
HC_DEVICE uint64_t global_warp() { return global_thread() / 32; }
HC_DEVICE uint64_t global_warps() { return global_threads() / 32; }

// Numbers of the blocks of `size` elements near an element: one division for many look-ups.
struct NearBlocks {
  uint64_t first;  // block of the element
  uint32_t rest;   // elements of that block before it
  uint32_t size, shift;

  // Return the block of the element `offset` further on.
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

// Whether packs of four can be read and written at `p`.
template <DTypeCode D>
HC_DEVICE bool packs_of_four(const void* p) {
  return aligned_to(p, alignof(Pack<StorageOf<D>, kFour>));
}

// Write, or add, a whole chunk, which begins at `chunk`: values(row, v) gives a lane's four of a row.
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
          add_to(pack[row].of + i, static_cast<StorageOf<D>>(v[i]));
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

// Write the rest of an array after its whole chunks, from element `at` on, by all threads of the grid: a warp
// alone would wait for memory again and again. value(e) gives an element's value.
template <DTypeCode D, bool Add, typename Value>
HC_DEVICE void put_rest(StorageOf<D>* out, uint64_t at, uint64_t n, Value value) {
  for (uint64_t e = at + global_thread(); e < n; e += global_threads()) put<D, Add>(out + e, value(e));
}

// -- sums of messages --

constexpr int kMostPeers = 8;  // messages added in one pass
constexpr int kSumRows = 2;    // rows of all messages that a warp has at a time
constexpr uint32_t kSumChunk = kSumRows * kRow;

struct Messages {
  const uint8_t* of[kMostPeers];  // payloads of the same layout
};

// Compute acc += the values of `peers` messages, one after the other, as their decoders would, in one pass
// over acc. Elements before `whole`, a multiple of kSumChunk, come in fours: load(payload, e, block, word,
// scale) reads the four from e on, which lie in `block`; values(word, scale, v) decodes them. value(payload,
// e) gives a single element's.
template <typename T, typename S, typename Load, typename Values, typename Value>
HC_DEVICE void sum_messages(T* acc, uint64_t whole, uint64_t n, uint32_t block, const Messages& messages,
                            uint32_t peers, Load load, Values values, Value value) {
  constexpr DTypeCode kType = sizeof(T) == 8 ? kFloat64 : kFloat32;
  using P = Pack<T, kFour>;
  const bool packs = packs_of_four<kType>(acc);
  for (uint64_t at = global_warp() * kSumChunk; at < whole; at += global_warps() * kSumChunk) {
    const NearBlocks near = near_blocks(at, block);
    T* const here = acc + at + kFour * lane_of();
    P sums[kSumRows];
    uint32_t words[kMostPeers][kSumRows];
    S scales[kMostPeers][kSumRows];
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p) {
#pragma unroll
      for (int row = 0; row < kSumRows; ++row) {
        if (static_cast<uint32_t>(p) >= peers) continue;  // all loads before the first use of one
        const uint32_t offset = row * kRow + kFour * lane_of();
        load(messages.of[p], at + offset, near(offset), &words[p][row], &scales[p][row]);
      }
    }
#pragma unroll
    for (int row = 0; row < kSumRows; ++row) {
      if (packs) {
        sums[row] = *reinterpret_cast<const P*>(here + row * kRow);
      } else {
#pragma unroll
        for (int i = 0; i < kFour; ++i) sums[row].of[i] = here[row * kRow + i];
      }
    }
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p) {
#pragma unroll
      for (int row = 0; row < kSumRows; ++row) {
        if (static_cast<uint32_t>(p) >= peers) continue;
        S v[kFour];
        values(words[p][row], scales[p][row], v);
#pragma unroll
        for (int i = 0; i < kFour; ++i) add_to(sums[row].of + i, static_cast<T>(v[i]));
      }
    }
#pragma unroll
    for (int row = 0; row < kSumRows; ++row) {
      if (packs) {
        *reinterpret_cast<P*>(here + row * kRow) = sums[row];
      } else {
#pragma unroll
        for (int i = 0; i < kFour; ++i) here[row * kRow + i] = sums[row].of[i];
      }
    }
  }
  for (uint64_t e = whole + global_thread(); e < n; e += global_threads()) {
    T sum = acc[e];
#pragma unroll
    for (int p = 0; p < kMostPeers; ++p)
      if (static_cast<uint32_t>(p) < peers) add_to(&sum, static_cast<T>(value(messages.of[p], e)));
    acc[e] = sum;
  }
}

}  // namespace hybridcomp

// Parameters and Messages of a kernel of sums.
#define HC_MESSAGES                                                                               \
  const std::uint8_t *m0, const std::uint8_t *m1, const std::uint8_t *m2, const std::uint8_t *m3, \
      const std::uint8_t *m4, const std::uint8_t *m5, const std::uint8_t *m6, const std::uint8_t *m7
#define HC_THESE_MESSAGES            \
  {                                  \
    {                                \
      m0, m1, m2, m3, m4, m5, m6, m7 \
    }                                \
  }
