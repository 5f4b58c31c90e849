// Transformed blocks: tiles of 2048 elements, whole blocks of a power of two, in shared memory. A thread
// takes eight elements through three stages of butterflies at a time.
#pragma once

#include "block/block_group.cuh"

namespace hybridcomp {
namespace {

constexpr uint32_t kTile = 2048;
constexpr uint32_t kTileBits = 11;
constexpr uint32_t kEight = kTile / kThreads;
static_assert(kEight == 8 && kTile == 1u << kTileBits, "a thread has eight elements of a tile");

// Return the place of element i of a tile: elements eight apart are in different banks.
HC_DEVICE uint32_t padded(uint32_t i) { return i + i / 32; }
constexpr uint32_t kPadded = kTile + kTile / 32;

// Do all stages of each block in a tile, in place.
template <typename T>
HC_DEVICE void transform(T* tile, uint32_t block) {
  const uint32_t stages = 31 - static_cast<uint32_t>(__clz(static_cast<int>(block)));
  for (uint32_t done = 0; done < stages; done += 3) {
    const uint32_t low = done < kTileBits - 3 ? done : kTileBits - 3;  // lowest index bit held in a thread
    const uint32_t t = threadIdx.x, base = ((t >> low) << (low + 3)) | (t & ((1u << low) - 1));
    T x[8];
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) x[j] = tile[padded(base + (j << low))];
#pragma unroll
    for (uint32_t bit = 0; bit < 3; ++bit) {
      if (low + bit < done || low + bit >= stages) continue;
#pragma unroll
      for (uint32_t j = 0; j < 8; ++j) {
        if (j >> bit & 1u) continue;
        const T a = x[j], b = x[j | 1u << bit];
        x[j] = a + b;
        x[j | 1u << bit] = a - b;
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) tile[padded(base + (j << low))] = x[j];
    __syncthreads();
  }
}

template <DTypeCode D>
HC_DEVICE void encode_hadamard(const void* from, uint64_t n, const Form& form, uint8_t* scales,
                               uint8_t* packed) {
  using T = ComputeOf<D>;
  HC_SHARED(T, tile, kPadded);
  HC_SHARED(typename Real<T>::Bits, peaks, kThreads / 32);
  HC_SHARED(typename Real<T>::Signed, lows, kThreads / 32);
  HC_SHARED(typename Real<T>::Signed, highs, kThreads / 32);
  HC_SHARED(T, inverses, kThreads);
  HC_SHARED(T, offsets, kThreads);
  const Plain<D> source(from);
  const uint32_t t = threadIdx.x, block = form.block;
  const uint32_t threads = block / kEight;  // threads of a block of elements: a power of two up to all
  const uint64_t whole = n / block * block;
  for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * kTile; at < whole;
       at += static_cast<uint64_t>(gridDim.x) * kTile) {
    const uint32_t count = whole - at < kTile ? static_cast<uint32_t>(whole - at) : kTile;
    const Bits32 signs(form.seed, at);
#pragma unroll
    for (uint32_t k = 0; k < kEight; ++k) {
      const uint32_t i = t + k * kThreads;
      tile[padded(i)] = i < count ? flipped(flushed(source.at(at + i)), signs.at(at + i)) : T(0);
    }
    __syncthreads();
    transform(tile, block);

    // Values that are not finite stay so in at least one of the sums: the sums' limits tell.
    auto limits = Limits<T>::none();
#pragma unroll
    for (uint32_t j = 0; j < kEight; ++j) limits.take(tile[padded(t * kEight + j)]);
    limits.over_lanes(threads < 32 ? threads : 32);
    if ((t & 31) == 0) {
      peaks[t / 32] = limits.peak;
      lows[t / 32] = limits.low;
      highs[t / 32] = limits.high;
    }
    __syncthreads();
    if (threads > 32)
      for (uint32_t w = t / threads * (threads / 32), i = 0; i < threads / 32; ++i)
        limits.join({peaks[w + i], lows[w + i], highs[w + i]});
    if (limits.peak < Hadamard<T>::kSmallestTransformed) limits = {0, 0, 0};
    const auto scale = scale_of(limits, form.affine());
    if (t % threads == 0) {
      inverses[t / threads] = scale.inverse;
      offsets[t / threads] = scale.offset;
      if (t * kEight < count) write_scale(scales, at / block + t / threads, scale, form.affine());
    }
    __syncthreads();

    const Bits32 bits(form.seed + 1, at);
    const uint32_t bytes = block / kParts;
#pragma unroll
    for (uint32_t k = 0; k < kEight / kParts; ++k) {
      const uint32_t to = t + k * kThreads, b = to / bytes, j = to - b * bytes;
      if (b * block >= count) continue;
      const AffineScale<T> own{T(0), offsets[b], inverses[b]};
      uint32_t byte = 0;
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        const uint32_t i = b * block + j + part * bytes;
        const int32_t q = integer_of(tile[padded(i)], own, form, bits, at + i);
        byte |= (static_cast<uint32_t>(q) & kField) << (part * kBits);
      }
      packed[at / kParts + to] = static_cast<uint8_t>(own.inverse == T(0) ? 0u : byte);
    }
    __syncthreads();  // before the next tile
  }
  // A short last block is not transformed.
  if (whole < n && blockIdx.x + 1 == gridDim.x && t < 32)
    encode_by_lanes(source, form, n, whole / block, scales, packed, t, 32);
}

template <typename T, DTypeCode D, bool Add>
HC_DEVICE void decode_hadamard(const uint8_t* scales, const uint8_t* packed, uint64_t n, uint32_t block,
                               uint32_t flags, uint64_t seed, void* to, const uint32_t* status) {
  HC_SHARED(T, tile, kPadded);
  if (*status) return;
  StorageOf<D>* const out = static_cast<StorageOf<D>*>(to);
  const Values<T> values(scales, packed, n, block, (flags & kAffine) != 0);
  const uint64_t whole = n / block * block;
  const T factor = T(1) / static_cast<T>(block);
  for (uint64_t at = static_cast<uint64_t>(blockIdx.x) * kTile; at < whole;
       at += static_cast<uint64_t>(gridDim.x) * kTile) {
    const uint32_t count = whole - at < kTile ? static_cast<uint32_t>(whole - at) : kTile;
    const uint64_t first = at / block;
#pragma unroll
    for (uint32_t k = 0; k < kEight; ++k) {
      const uint32_t i = threadIdx.x + k * kThreads, b = i / block;
      tile[padded(i)] = i < count ? values.of_block(first + b, i - b * block) : T(0);
    }
    __syncthreads();
    transform(tile, block);
    const Bits32 signs(seed, at);
#pragma unroll
    for (uint32_t k = 0; k < kEight; ++k) {
      const uint32_t i = threadIdx.x + k * kThreads;
      if (i < count) put<D, Add>(out + at + i, flipped(flushed(tile[padded(i)]) * factor, signs.at(at + i)));
    }
    __syncthreads();  // before the next tile
  }
  for (uint64_t i = whole + global_thread(); i < n; i += global_threads()) put<D, Add>(out + i, values.at(i));
}

}  // namespace
}  // namespace hybridcomp
