// A chunk's codes and bytes to elements.
#pragma once

#include "bounded/bounded.cuh"

namespace hybridcomp {
namespace {

// Return the 32-bit word at an aligned address; bytes that lie at `end` or after are zero.
HC_DEVICE uint32_t word_before(const uint8_t* at, const uint8_t* end) {
  if (end - at >= 4) return *reinterpret_cast<const uint32_t*>(at);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 3; ++i)
    if (at + i < end) word |= static_cast<uint32_t>(at[i]) << (8 * i);
  return word;
}

// Copy bytes from any address to shared memory by whole words; zeros complete the last one. `end` is the end
// of the memory that may be read.
HC_DEVICE void stage_bytes(const uint8_t* from, uint32_t bytes, const uint8_t* end, uint32_t* stage) {
  const uint32_t off = static_cast<uint32_t>(reinterpret_cast<uint64_t>(from) & 3u);
  const uint8_t* const base = from - off;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < (bytes + 3) / 4; i += kThreads) {
    const uint8_t* const at = base + i * 4;
    const uint32_t low = word_before(at, end);
    stage[i] = off ? __funnelshift_r(low, word_before(at + 4, end), 8 * off) : low;
  }
}

// Read the integers of a block. All lanes of a warp come here.
template <typename U>
HC_DEVICE void get_integers(uint32_t code, uint32_t j, const uint8_t* from, uint32_t q[kOwn]) {
  const uint32_t planes = planes_in(code);
  const bool delta = is_delta(code);
  const uint8_t* const half = from + (delta ? 4 : 0) + j / 2 * 8 + (j & 1u) * 4;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) q[i] = 0;
  for (uint32_t group = 4; group-- > 0;) {
    if (!__any_sync(kFullWarp, 8 * group < planes)) continue;
    const uint32_t plane = 8 * group + j / 2;
    const uint32_t first = plane < planes ? get_word<U>(half + group * 64) : 0;
    const uint32_t second = plane + 4 < planes ? get_word<U>(half + group * 64 + 32) : 0;
    add_planes({first, second}, q);
  }
  if (planes) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) q[i] = static_cast<uint32_t>(bounded_signed(q[i], planes));
  }
  if (!__any_sync(kFullWarp, delta)) return;
  uint32_t sums[kOwn];  // sums over a thread's four, low and high
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sums[i] = q[i] + (i & 3 ? sums[(i + 7) & 7] : 0);
  uint32_t low = sums[3], high = sums[7];
#pragma unroll
  for (uint32_t distance = 1; distance < 8; distance *= 2) {
    const uint32_t low_before = __shfl_up_sync(kFullWarp, low, distance, 8);
    const uint32_t high_before = __shfl_up_sync(kFullWarp, high, distance, 8);
    low += j >= distance ? low_before : 0;
    high += j >= distance ? high_before : 0;
  }
  const uint32_t all_low = __shfl_sync(kFullWarp, low, 7, 8);
  if (!delta) return;
  const uint32_t first = get_word<U>(from);
  const uint32_t before_low = first + low - sums[3], before_high = first + all_low + high - sums[7];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q[i] = before_low + sums[i];
    q[4 + i] = before_high + sums[4 + i];
  }
}

// Write, or add, a lane's values to its block of m elements at `out`. A kept block of the output's own type
// is copied bit for bit.
template <DTypeCode D, DTypeCode O, bool Add>
HC_DEVICE void put_values(const ComputeOf<D> y[kOwn], bool kept, const BitsOf<D> bits[kOwn], uint32_t m,
                          uint32_t j, bool packs, StorageOf<O>* out) {
  if constexpr (Add) {
    if (packs && m == kBoundedBlock) {
      put_pack<O, true, 4>(out + 4 * j, y);
      put_pack<O, true, 4>(out + 32 + 4 * j, y + 4);
      return;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (place_of(j, i) < m) put<O, true>(out + place_of(j, i), y[i]);
  } else {
    Pack<StorageOf<O>, 4> low, high;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low.of[i] = stored<O>(y[i]);
      high.of[i] = stored<O>(y[4 + i]);
      if constexpr (D == O && sizeof(BitsOf<D>) == 2) {
        low.of[i] = kept ? bits[i] : low.of[i];
        high.of[i] = kept ? bits[4 + i] : high.of[i];
      }
    }
    if (packs && m == kBoundedBlock) {
      *reinterpret_cast<Pack<StorageOf<O>, 4>*>(out + 4 * j) = low;
      *reinterpret_cast<Pack<StorageOf<O>, 4>*>(out + 32 + 4 * j) = high;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (place_of(j, i) < m) out[place_of(j, i)] = low.of[i];
      if (place_of(j, 4 + i) < m) out[place_of(j, 4 + i)] = high.of[i];
    }
  }
}

// Decode the chunk whose bytes begin at `data`. The codes are valid. `end` is the payload's end.
template <DTypeCode D, DTypeCode O, bool Add>
HC_DEVICE void decode_chunk(const uint8_t* codes, const uint8_t* data, const uint8_t* end, uint64_t n,
                            uint64_t chunk, ComputeOf<D> step, bool packs, StorageOf<O>* out,
                            uint32_t* stage) {
  using U = BitsOf<D>;
  const uint32_t lane = threadIdx.x % 32, j = lane % 8, block = threadIdx.x / 8;
  const uint64_t from = chunk * kChunk, left = n - from;
  const uint64_t blocks = left >= kChunk ? kChunkBlocks : blocks_in(left);
  const uint32_t lane_code = lane < blocks ? codes[chunk * kChunkBlocks + lane] : 0;
  const uint32_t lane_end =
      sum_to_here(bounded_bytes(static_cast<uint8_t>(lane_code), elements_of(left, lane), kElement<D>));
  const uint32_t bytes = __shfl_sync(kFullWarp, lane_end, 31);
  stage_bytes(data, bytes, end, stage);
  __syncthreads();
  const uint32_t code = __shfl_sync(kFullWarp, lane_code, block), m = elements_of(left, block);
  const uint32_t before = __shfl_sync(kFullWarp, lane_end, block > 0 ? block - 1 : 0);
  const uint8_t* const own = reinterpret_cast<const uint8_t*>(stage) + (block > 0 ? before : 0);
  uint32_t q[kOwn];
  get_integers<U>(code, j, own, q);
  ComputeOf<D> y[kOwn];
  U bits[kOwn] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) y[i] = bounded_value<ComputeOf<D>>(static_cast<int32_t>(q[i]), step);
  const bool kept = code >= kBoundedRaw;
  if (kept) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t at = code == kBoundedConstant ? 0 : place_of(j, i);
      if (place_of(j, i) < m) bits[i] = get_element<U>(own + at * kElement<D>);
      y[i] = value_of<D>(bits[i]);
    }
  }
  if (m) put_values<D, O, Add>(y, kept, bits, m, j, packs, out + from + block * kBoundedBlock);
  __syncthreads();  // `stage` is written again
}

}  // namespace
}  // namespace hybridcomp
