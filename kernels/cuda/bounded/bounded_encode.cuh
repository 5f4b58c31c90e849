// A chunk of elements to codes and bytes.
#pragma once

#include "bounded/bounded.cuh"

namespace hybridcomp {
namespace {

// A lane's elements of its block, and their integers.
template <DTypeCode D>
struct Own {
  BitsOf<D> bits[kOwn];  // past the end of the array the last element's bits
  uint32_t q[kOwn], d[kOwn];
};

// Load the elements of the block of m > 0 at `src`.
template <DTypeCode D>
HC_DEVICE void load_block(const BitsOf<D>* src, uint32_t m, uint32_t j, bool packs, BitsOf<D> bits[kOwn]) {
  using Four = Pack<BitsOf<D>, 4>;
  if (packs && m == kBoundedBlock) {
    const Four low = *reinterpret_cast<const Four*>(src + 4 * j);
    const Four high = *reinterpret_cast<const Four*>(src + 32 + 4 * j);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i] = low.of[i];
      bits[4 + i] = high.of[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t at = place_of(j, i);
    bits[i] = src[at < m ? at : m - 1];
  }
}

// Choose the code of a block of m elements, whose integers stand for values within the bound where they hold.
// All lanes of a warp come here; m is 0 where there is no block.
template <DTypeCode D>
HC_DEVICE uint32_t choose_code(const BoundedStep<ComputeOf<D>>& step, uint32_t m, uint32_t j, Own<D>& own) {
  using T = ComputeOf<D>;
  bool holds = step.step != T(0);
  uint32_t plain = 0, sample = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const T x = value_of<D>(own.bits[i]);
    const int32_t q = bounded_integer(x, step.inverse);
    holds = holds && bounded_holds(x, bounded_stored<D>(bounded_value<T>(q, step.step)), step.limit);
    plain |= bounded_spread(q);
    own.q[i] = static_cast<uint32_t>(q);
  }
  const uint32_t before_low = __shfl_up_sync(kFullWarp, own.q[3], 1, 8);
  own.d[0] = j == 0 ? 0 : own.q[0] - before_low;
#pragma unroll
  for (int i = 1; i < 4; ++i) own.d[i] = own.q[i] - own.q[i - 1];
#pragma unroll
  for (int i = 0; i < 4; ++i) sample |= bounded_spread(static_cast<int32_t>(own.d[i]));
  uint32_t delta = or_of_eight(4 * j < kBoundedSample ? sample : 0);
  plain = or_of_eight(plain);
  const bool saves = bounded_saves(plain, delta);
  if (__any_sync(kFullWarp, saves)) {
    const uint32_t before_high = __shfl_up_sync(kFullWarp, own.q[7], 1, 8);
    const uint32_t end_of_low = __shfl_sync(kFullWarp, own.q[3], 7, 8);
    own.d[4] = own.q[4] - (j == 0 ? end_of_low : before_high);
#pragma unroll
    for (int i = 5; i < 8; ++i) own.d[i] = own.q[i] - own.q[i - 1];
#pragma unroll
    for (int i = 4; i < 8; ++i) sample |= bounded_spread(static_cast<int32_t>(own.d[i]));
    const uint32_t all = or_of_eight(sample);
    delta = saves ? all : delta;
  }
  uint32_t code = bounded_code<T>(plain, delta, m, kElement<D>);
  const bool kept = !all_of_eight(holds) || code == kBoundedRaw;
  if (__any_sync(kFullWarp, kept && m)) {
    const ShuffledOf<D> one = __shfl_sync(kFullWarp, static_cast<ShuffledOf<D>>(own.bits[0]), 0, 8);
    bool zero = true, same = true;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      zero = zero && static_cast<BitsOf<D>>(own.bits[i] << 1) == 0;
      same = same && own.bits[i] == one;
    }
    const bool zeros = all_of_eight(zero), constant = all_of_eight(same);
    if (kept) code = zeros ? 0 : constant ? kBoundedConstant : kBoundedRaw;
  }
  return code;
}

// Write a block to shared memory. All lanes of a warp come here.
template <DTypeCode D>
HC_DEVICE void put_block(uint32_t code, uint32_t m, uint32_t j, const Own<D>& own, uint8_t* to) {
  using U = BitsOf<D>;
  const bool delta = is_delta(code);
  const uint32_t planes = m ? planes_in(code) : 0;
  uint32_t v[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) v[i] = delta ? own.d[i] : own.q[i];
  if (m && delta) {
    if (j == 0) put_word<U>(to, own.q[0]);
    to += 4;
  }
  uint32_t plane = j / 2;  // first of the two planes that come to this lane
  for (uint32_t low = 0; __any_sync(kFullWarp, low < planes); low += 8, plane += 8) {
    const TwoPlanes two = planes_of(v);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) v[i] >>= 8;
    uint8_t* const half = to + plane * 8 + (j & 1u) * 4;
    if (plane < planes) put_word<U>(half, two.first);
    if (plane + 4 < planes) put_word<U>(half + 32, two.second);
  }
  if (m && code == kBoundedConstant && j == 0) put_element<U>(to, own.bits[0]);
  if (code != kBoundedRaw) return;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const uint32_t at = place_of(j, i);
    if (at < m) put_element<U>(to + at * kElement<D>, own.bits[i]);
  }
}

// Encode a chunk: codes to the payload; bytes to `out`, which is aligned and has room for the elements.
// Returns how many bytes, in every thread. `stage`, `sizes` and `kinds` are shared memory.
template <DTypeCode D>
HC_DEVICE uint32_t encode_chunk(const BitsOf<D>* src, uint64_t n, uint64_t chunk, bool packs,
                                const BoundedStep<ComputeOf<D>>& step, uint8_t* codes, uint4* out,
                                uint4* stage, uint32_t* sizes, uint32_t* kinds) {
  const uint32_t lane = threadIdx.x % 32, j = lane % 8, block = threadIdx.x / 8;
  const uint64_t from = chunk * kChunk;
  const uint32_t m = elements_of(n - from, block);
  Own<D> own = {};
  if (m) load_block<D>(src + from + block * kBoundedBlock, m, j, packs, own.bits);
  const uint32_t code = choose_code<D>(step, m, j, own);
  if (j == 0) {
    sizes[block] = m ? bounded_bytes(static_cast<uint8_t>(code), m, kElement<D>) : 0;
    kinds[block] = code;
  }
  __syncthreads();
  const uint32_t end = sum_to_here(sizes[lane]), bytes = __shfl_sync(kFullWarp, end, 31);
  const uint32_t own_end = __shfl_sync(kFullWarp, end, block), at = own_end - sizes[block];
  put_block<D>(code, m, j, own, reinterpret_cast<uint8_t*>(stage) + at);
  const uint64_t code_at = chunk * kChunkBlocks + lane;
  if (threadIdx.x < 32 && code_at < blocks_in(n)) codes[code_at] = static_cast<uint8_t>(kinds[lane]);
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < bytes / 16; i += kThreads) out[i] = stage[i];
  for (uint32_t i = bytes / 16 * 8 + threadIdx.x; i < bytes / 2; i += kThreads)
    reinterpret_cast<uint16_t*>(out)[i] = reinterpret_cast<const uint16_t*>(stage)[i];
  return bytes;
}

}  // namespace
}  // namespace hybridcomp
