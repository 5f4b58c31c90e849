// Messages of `sketch`: the bitmap of the elements whose bits are not all zero, and their values; and the
// moves of its reductions between a tensor and packed values. Layout: hybridcomp/codecs/linear/sketch.py.
#include "common/bitmap.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kDense = 0, kPacked = 1;
constexpr uint64_t kPrefixBytes = 16;
constexpr int kScanThreads = 1024;
constexpr int kScanEach = 4;  // tiles of a thread at a time

// Write the bitmap of n elements, and how many bits each tile has.
template <typename U>
HC_DEVICE void mask(const U* src, uint64_t n, uint64_t* words, uint64_t* counts) {
  HC_SHARED(uint32_t, sums, kBitmapWarps);
  constexpr int kEach = 4;   // elements of a load
  constexpr int kSteps = 8;  // loads in flight
  constexpr uint64_t kWide = sizeof(U) * kEach < 16 ? sizeof(U) * kEach : 16;
  uint32_t* halves = reinterpret_cast<uint32_t*>(words);
  const uint64_t all = 2 * bitmap_words(n);
  const uint32_t lane = threadIdx.x & 31u;
  for (uint64_t tile = blockIdx.x; tile < bitmap_tiles(n); tile += gridDim.x) {
    const uint64_t first = tile * kTileElements + threadIdx.x / 32 * kWarpElements;
    const bool whole = aligned_to(src, kWide) && first + kWarpElements <= n;
    uint32_t count = 0;
    for (uint32_t part = 0; part < 2; ++part) {
      const uint64_t begin = first + part * (kWarpElements / 2) + lane * kEach;
      uint32_t nibbles[kSteps];
      if (whole) {
        Pack<U, kEach> packs[kSteps];
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          packs[s] = *reinterpret_cast<const Pack<U, kEach>*>(src + begin + static_cast<uint32_t>(s) * 128);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          nibbles[s] = 0;
#pragma unroll
          for (int i = 0; i < kEach; ++i) nibbles[s] |= static_cast<uint32_t>(packs[s].of[i] != 0) << i;
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          nibbles[s] = 0;
#pragma unroll
          for (int i = 0; i < kEach; ++i) {
            const uint64_t at = begin + static_cast<uint32_t>(s * 128 + i);
            if (at < n) nibbles[s] |= static_cast<uint32_t>(src[at] != 0) << i;
          }
        }
      }
      // Eight lanes make half a word in each of the eight steps; each lane keeps the half word of one step.
      uint32_t kept = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t half = nibbles[s] << (4 * (lane & 7u));
        half |= __shfl_xor_sync(kFullWarp, half, 1);
        half |= __shfl_xor_sync(kFullWarp, half, 2);
        half |= __shfl_xor_sync(kFullWarp, half, 4);
        if ((lane & 7u) == static_cast<uint32_t>(s)) kept = half;
      }
      const uint64_t at = first / 32 + part * 32 + 4 * (lane & 7u) + (lane >> 3);
      if (at < all) halves[at] = kept;
      count += static_cast<uint32_t>(__popc(kept));
    }
    count = block_sum(count, sums);
    if (threadIdx.x == 0) counts[tile] = count;
  }
}

template <typename U>
HC_DEVICE void gather(const uint64_t* words, const void* src, uint64_t n, const uint64_t* offsets,
                      void* values) {
  HC_SHARED(uint32_t, sums, kBitmapWarps);
  bitmap_gather<U>(words, static_cast<const U*>(src), n, offsets, static_cast<U*>(values), sums);
}

// Write the payload, in the form that is shorter, and its bytes to *length.
template <typename U>
HC_DEVICE void pack(const uint64_t* words, const void* from, uint64_t n, const uint64_t* offsets,
                    const uint64_t* total, uint8_t* payload, uint64_t* length) {
  HC_SHARED(uint32_t, sums, kBitmapWarps);
  const U* src = static_cast<const U*>(from);
  const uint64_t k = *total, bitmap = 8 * bitmap_words(n);
  const bool packed = bitmap + k * sizeof(U) < n * sizeof(U);
  if (global_thread() == 0) {
    reinterpret_cast<uint32_t*>(payload)[0] = packed ? kPacked : kDense;
    reinterpret_cast<uint32_t*>(payload)[1] = 0;
    reinterpret_cast<uint64_t*>(payload)[1] = packed ? k : n;
    *length = kPrefixBytes + (packed ? bitmap + k * sizeof(U) : n * sizeof(U));
  }
  uint8_t* body = payload + kPrefixBytes;
  if (packed) {
    for (uint64_t w = global_thread(); w < bitmap_words(n); w += global_threads())
      reinterpret_cast<uint64_t*>(body)[w] = words[w];
    bitmap_gather<U>(words, src, n, offsets, reinterpret_cast<U*>(body + bitmap), sums);
    return;
  }
  constexpr uint64_t kIn16 = 16 / sizeof(U);
  const uint64_t whole = aligned_to(src, 16) ? n / kIn16 : 0;
  for (uint64_t i = global_thread(); i < whole; i += global_threads())
    reinterpret_cast<uint4*>(body)[i] = reinterpret_cast<const uint4*>(src)[i];
  for (uint64_t i = whole * kIn16 + global_thread(); i < n; i += global_threads())
    reinterpret_cast<U*>(body)[i] = src[i];
}

template <DTypeCode S, DTypeCode D, bool Add>
HC_DEVICE void scatter(const uint64_t* words, uint64_t n, const uint64_t* offsets, const void* values,
                       void* out) {
  HC_SHARED(uint32_t, sums, kBitmapWarps);
  bitmap_scatter<S, D, Add>(words, n, offsets, static_cast<const StorageOf<S>*>(values),
                            static_cast<StorageOf<D>*>(out), sums);
}

}  // namespace

// Count the bits of each tile of a bitmap; none may be past the end. (A kernel that sets the status does not
// read it: a block's threads must agree.)
HC_KERNEL(kBitmapThreads)
sketch_count(const uint64_t* words, uint64_t n, uint64_t* counts, uint32_t* status) {
  HC_SHARED(uint32_t, sums, kBitmapWarps);
  for (uint64_t tile = blockIdx.x; tile < bitmap_tiles(n); tile += gridDim.x) {
    const uint64_t w = tile * kBitmapThreads + threadIdx.x;
    const uint64_t bits = w < bitmap_words(n) ? words[w] : 0;
    if (w == n / 64 && n % 64 && bits >> (n % 64)) fail(status, kBadIndexRange);
    const uint32_t count = block_sum(static_cast<uint32_t>(__popcll(bits)), sums);
    if (threadIdx.x == 0) counts[tile] = count;
  }
}

// Turn the counts into the starts of the tiles' values; their sum goes to *total, and must be `expected`
// unless that is ~0. One block.
HC_KERNEL(kScanThreads)
sketch_scan(uint64_t* counts, uint64_t tiles, uint64_t* total, uint64_t expected, uint32_t* status) {
  HC_SHARED(uint64_t, sums, kScanThreads / 32);
  if (*status) return;
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x / 32;
  uint64_t carry = 0;
  for (uint64_t begin = 0; begin < tiles; begin += kScanThreads * kScanEach) {
    const uint64_t first = begin + threadIdx.x * kScanEach;
    uint64_t own[kScanEach], until = 0;
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) {
      own[i] = first + static_cast<uint32_t>(i) < tiles ? counts[first + static_cast<uint32_t>(i)] : 0;
      until += own[i];
    }
    const uint64_t mine = until;
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint64_t before = __shfl_up_sync(kFullWarp, until, distance);
      if (lane >= distance) until += before;
    }
    if (lane == 31) sums[warp] = until;
    __syncthreads();
    if (warp == 0) {
      uint64_t sum = sums[lane];
      for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint64_t before = __shfl_up_sync(kFullWarp, sum, distance);
        if (lane >= distance) sum += before;
      }
      __syncwarp();
      sums[lane] = sum;
    }
    __syncthreads();
    uint64_t at = carry + until - mine + (warp ? sums[warp - 1] : 0);
#pragma unroll
    for (int i = 0; i < kScanEach; ++i) {
      if (first + static_cast<uint32_t>(i) < tiles) counts[first + static_cast<uint32_t>(i)] = at;
      at += own[i];
    }
    carry += sums[kScanThreads / 32 - 1];
    __syncthreads();
  }
  __syncthreads();  // all threads have read the status
  if (threadIdx.x == 0) {
    *total = carry;
    if (expected != ~uint64_t(0) && carry != expected) fail(status, kBadBitmap);
  }
}

}  // namespace hybridcomp

#define HC_BY_SIZE(size, U)                                                                           \
  HC_KERNEL(hybridcomp::kBitmapThreads)                                                               \
  sketch_mask_##size(const U* src, std::uint64_t n, std::uint64_t* words, std::uint64_t* counts) {    \
    hybridcomp::mask<U>(src, n, words, counts);                                                       \
  }                                                                                                   \
  HC_KERNEL(hybridcomp::kBitmapThreads)                                                               \
  sketch_gather_##size(const std::uint64_t* words, const void* src, std::uint64_t n,                  \
                       const std::uint64_t* offsets, void* values) {                                  \
    hybridcomp::gather<U>(words, src, n, offsets, values);                                            \
  }                                                                                                   \
  HC_KERNEL(hybridcomp::kBitmapThreads)                                                               \
  sketch_pack_##size(const std::uint64_t* words, const void* src, std::uint64_t n,                    \
                     const std::uint64_t* offsets, const std::uint64_t* total, std::uint8_t* payload, \
                     std::uint64_t* length) {                                                         \
    hybridcomp::pack<U>(words, src, n, offsets, total, payload, length);                              \
  }
HC_BY_SIZE(2, std::uint16_t)
HC_BY_SIZE(4, std::uint32_t)
HC_BY_SIZE(8, std::uint64_t)

#define HC_SCATTER(name, S, D, Add)                                                                   \
  HC_KERNEL(hybridcomp::kBitmapThreads)                                                               \
  name(const std::uint64_t* words, std::uint64_t n, const std::uint64_t* offsets, const void* values, \
       void* out, const std::uint32_t* status) {                                                      \
    if (*status) return;                                                                              \
    hybridcomp::scatter<S, D, Add>(words, n, offsets, values, out);                                   \
  }
#define HC_SCATTER_FROM(s, S, a, A)                                      \
  HC_SCATTER(sketch_scatter_##s##_f32, S, hybridcomp::kFloat32, false)   \
  HC_SCATTER(sketch_scatter_##s##_f64, S, hybridcomp::kFloat64, false)   \
  HC_SCATTER(sketch_scatter_##s##_f16, S, hybridcomp::kFloat16, false)   \
  HC_SCATTER(sketch_scatter_##s##_bf16, S, hybridcomp::kBFloat16, false) \
  HC_SCATTER(sketch_scatter_##s##_##a##_add, S, A, true)
HC_SCATTER_FROM(f32, hybridcomp::kFloat32, f32, hybridcomp::kFloat32)
HC_SCATTER_FROM(f64, hybridcomp::kFloat64, f64, hybridcomp::kFloat64)
HC_SCATTER_FROM(f16, hybridcomp::kFloat16, f32, hybridcomp::kFloat32)
HC_SCATTER_FROM(bf16, hybridcomp::kBFloat16, f32, hybridcomp::kFloat32)
