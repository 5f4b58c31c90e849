// Bitmaps of elements in tiles of a block: bit i % 64 of word i / 64 is element i. A thread of a block has a
// word of a tile. Values that belong to the bits lie packed; a tile's start among them comes from a scan over
// the tiles' counts.
#pragma once

#include "common/elements.cuh"

namespace hybridcomp {

constexpr int kBitmapThreads = 256;
constexpr int kBitmapWarps = kBitmapThreads / 32;
constexpr uint64_t kWarpElements = 2048;  // 32 words
constexpr uint64_t kTileElements = kWarpElements * kBitmapWarps;

HC_DEVICE uint64_t bitmap_words(uint64_t n) { return n / 64 + (n % 64 != 0); }
HC_DEVICE uint64_t bitmap_tiles(uint64_t n) { return n / kTileElements + (n % kTileElements != 0); }

// A thread's word of a tile, and the start of its values among the tile's.
struct BitmapWord {
  uint64_t bits;
  uint32_t at;
};

// Return a thread's BitmapWord. `sums` is shared memory for a number of each warp; may be called again at
// once.
HC_DEVICE BitmapWord bitmap_word(const uint64_t* words, uint64_t n, uint64_t tile, uint32_t* sums) {
  const uint64_t w = tile * kBitmapThreads + threadIdx.x;
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x / 32;
  const uint64_t bits = w < bitmap_words(n) ? words[w] : 0;
  const uint32_t count = static_cast<uint32_t>(__popcll(bits));
  uint32_t until = count;
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const uint32_t before = __shfl_up_sync(kFullWarp, until, distance);
    if (lane >= distance) until += before;
  }
  __syncthreads();  // the reads of an earlier call are done
  if (lane == 31) sums[warp] = until;
  __syncthreads();
  uint32_t at = until - count;
  for (uint32_t earlier = 0; earlier < warp; ++earlier) at += sums[earlier];
  return {bits, at};
}

// Return the sum of a number of each thread, in thread 0. `sums` as above.
HC_DEVICE uint32_t block_sum(uint32_t value, uint32_t* sums) {
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
  __syncthreads();
  if ((threadIdx.x & 31u) == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < kBitmapWarps; ++w) value += sums[w];
  return value;
}

// Copy the elements of a bitmap to `values`, packed.
template <typename U>
HC_DEVICE void bitmap_gather(const uint64_t* words, const U* src, uint64_t n, const uint64_t* offsets,
                             U* values, uint32_t* sums) {
  constexpr int kTogether = 8;  // halves of words whose loads are in flight
  constexpr uint32_t kNowhere = ~0u;
  const uint32_t lane = threadIdx.x & 31u, below = (1u << lane) - 1u;
  for (uint64_t tile = blockIdx.x; tile < bitmap_tiles(n); tile += gridDim.x) {
    const BitmapWord word = bitmap_word(words, n, tile, sums);
    const U* from = src + (tile * kTileElements + threadIdx.x / 32 * kWarpElements + lane);
    U* const to = values + offsets[tile];
    for (int h = 0; h < 64; h += kTogether) {
      U x[kTogether];
      uint32_t at[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint64_t bits = __shfl_sync(kFullWarp, word.bits, (h + i) / 2);
        const uint32_t begin = __shfl_sync(kFullWarp, word.at, (h + i) / 2);
        const uint32_t low = static_cast<uint32_t>(bits),
                       half = i % 2 ? static_cast<uint32_t>(bits >> 32) : low;
        at[i] = begin + static_cast<uint32_t>(__popc(half & below)) +
                (i % 2 ? static_cast<uint32_t>(__popc(low)) : 0u);
        if (!((half >> lane) & 1u)) at[i] = kNowhere;
        if (at[i] != kNowhere) x[i] = from[(h + i) * 32];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (at[i] != kNowhere) to[at[i]] = x[i];
    }
  }
}

// Write one element of type D, or add it to a float or double.
template <DTypeCode S, DTypeCode D, bool Add>
HC_DEVICE void move(StorageOf<S> value, StorageOf<D>* out) {
  if constexpr (S == D && !Add)
    *out = value;  // NaN payloads too
  else
    put<D, Add>(out, loaded<S>(value));
}

// Write values to the places of a bitmap's bits and zero to the others; with Add leave the others.
template <DTypeCode S, DTypeCode D, bool Add>
HC_DEVICE void bitmap_scatter(const uint64_t* words, uint64_t n, const uint64_t* offsets,
                              const StorageOf<S>* values, StorageOf<D>* out, uint32_t* sums) {
  constexpr int kEach = 4;                // neighbours that a lane writes
  constexpr int kTogether = Add ? 2 : 4;  // groups of these whose loads are in flight
  constexpr uint64_t kWide = sizeof(StorageOf<D>) * kEach < 16 ? sizeof(StorageOf<D>) * kEach : 16;
  using P = Pack<StorageOf<D>, kEach>;
  const bool packs = aligned_to(out, kWide);
  const uint32_t lane = threadIdx.x & 31u, shift = (lane & 15u) * kEach;
  for (uint64_t tile = blockIdx.x; tile < bitmap_tiles(n); tile += gridDim.x) {
    const BitmapWord word = bitmap_word(words, n, tile, sums);
    const uint64_t first = tile * kTileElements + threadIdx.x / 32 * kWarpElements + lane * kEach;
    const StorageOf<S>* const from = values + offsets[tile];
    for (int s = 0; s < 16; s += kTogether) {
      StorageOf<S> x[kTogether][kEach];
      uint32_t nibbles[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int source = 2 * (s + i) + static_cast<int>(lane >> 4);
        const uint64_t bits = __shfl_sync(kFullWarp, word.bits, source);
        uint32_t at = __shfl_sync(kFullWarp, word.at, source);
        at += static_cast<uint32_t>(__popcll(bits & ((1ull << shift) - 1)));
        nibbles[i] = static_cast<uint32_t>(bits >> shift) & 15u;
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          x[i][j] = 0;
          if ((nibbles[i] >> j) & 1u) x[i][j] = from[at++];
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint64_t begin = first + static_cast<uint32_t>(s + i) * 128;
        if (packs && begin + kEach <= n) {
          if (Add && !nibbles[i]) continue;
          P pack;
          if constexpr (Add) pack = *reinterpret_cast<const P*>(out + begin);
#pragma unroll
          for (int j = 0; j < kEach; ++j)
            if (!Add || ((nibbles[i] >> j) & 1u)) move<S, D, Add>(x[i][j], &pack.of[j]);
          *reinterpret_cast<P*>(out + begin) = pack;
        } else {
          for (int j = 0; j < kEach; ++j) {
            StorageOf<S> value = x[i][0];
            if (j == 1) value = x[i][1];
            if (j == 2) value = x[i][2];
            if (j == 3) value = x[i][3];
            if (begin + static_cast<uint32_t>(j) < n && (!Add || ((nibbles[i] >> j) & 1u)))
              move<S, D, Add>(value, out + begin + static_cast<uint32_t>(j));
          }
        }
      }
    }
  }
}

}  // namespace hybridcomp
