// One block of a block quantizer by a group of threads, in every form but the Hadamard transform's: any
// length, with or without offset, to nearest or at random. HC_BITS is the width of an integer.
#pragma once

#include "common/halves.cuh"
#include "hybridcomp/quantize.hpp"

namespace hybridcomp {
namespace {

constexpr int kBits = HC_BITS;
constexpr int kParts = 8 / kBits;  // integers in a byte
constexpr int kLimit = (1 << (kBits - 1)) - 1;
constexpr int kLevels = (1 << kBits) - 1;
constexpr int kThreads = 256;
constexpr uint32_t kField = (1u << kBits) - 1;
constexpr uint32_t kStochastic = 4;  // flag beside kAffine and kHadamard; not in messages

HC_DEVICE uint64_t bytes_of(uint64_t m) { return (m + kParts - 1) / kParts; }

// Format that a kernel gets.
struct Form {
  uint32_t block;
  uint32_t flags;
  uint64_t seed;

  HC_METHOD bool affine() const { return (flags & kAffine) != 0; }
};

// Write the payload's prefix, by one thread of the grid. Null where no message is written (a state).
HC_DEVICE void write_prefix(uint8_t* prefix, const Form& form, Grid grid = whole_grid()) {
  if (!prefix || grid.thread() != 0) return;
  uint32_t* words = reinterpret_cast<uint32_t*>(prefix);
  words[0] = form.block;
  words[1] = form.flags & (kAffine | kHadamard);
  if (form.flags & kHadamard) {
    words[2] = static_cast<uint32_t>(form.seed);
    words[3] = static_cast<uint32_t>(form.seed >> 32);
  }
}

// Limits of some values; after join() those of a whole group.
template <typename T>
struct Limits {
  using Bits = typename Real<T>::Bits;
  using Key = typename Real<T>::Signed;
  Bits peak;
  Key low, high;

  HC_METHOD static Limits none() {
    const Key top = ordered(float_of(Real<T>::kInfinity));
    return {0, top, static_cast<Key>(~top)};
  }
  HC_METHOD void take(T x) {
    const Bits a = magnitude(x);
    const Key key = ordered(x);
    peak = a > peak ? a : peak;
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  HC_METHOD void join(const Limits& o) {
    peak = o.peak > peak ? o.peak : peak;
    low = o.low < low ? o.low : low;
    high = o.high > high ? o.high : high;
  }
  // Join the limits of `lanes` neighbours (a power of two, at most a warp); all lanes of the warp come here.
  HC_METHOD void over_lanes(uint32_t lanes) {
    for (uint32_t d = lanes / 2; d; d /= 2)
      join({__shfl_xor_sync(kFullWarp, peak, d), __shfl_xor_sync(kFullWarp, low, d),
            __shfl_xor_sync(kFullWarp, high, d)});
  }
};

template <typename T>
HC_DEVICE AffineScale<T> scale_of(const Limits<T>& limits, bool affine) {
  if (affine)
    return affine_scale<T>(limits.peak, from_ordered(limits.low), from_ordered(limits.high), T(kLevels));
  const BlockScale<T> scale = block_scale<T>(limits.peak, T(kLimit));
  return {scale.stored, T(0), scale.inverse};
}

template <typename T>
HC_DEVICE void write_scale(uint8_t* scales, uint64_t b, const AffineScale<T>& scale, bool affine) {
  T* to = reinterpret_cast<T*>(scales) + (affine ? 2 * b : b);
  to[0] = scale.stored;
  if (affine) to[1] = scale.offset;
}

// Random bits of elements by their indices: 2^32 indices share a key.
class Bits32 {
 public:
  HC_METHOD Bits32(uint64_t seed, uint64_t first)
      : seed_(seed), high_(static_cast<uint32_t>(first >> 32)), key_(random_key(seed, high_)) {}
  HC_METHOD uint32_t at(uint64_t index) const {
    const uint32_t high = static_cast<uint32_t>(index >> 32);
    const RandomKey key = high == high_ ? key_ : random_key(seed_, high);
    return random_bits(key, static_cast<uint32_t>(index));
  }

 private:
  uint64_t seed_;
  uint32_t high_;
  RandomKey key_;
};

// Return the integer of a value; its low kBits bits are stored.
template <typename T>
HC_DEVICE int32_t integer_of(T x, const AffineScale<T>& scale, const Form& form, const Bits32& bits,
                             uint64_t index) {
  const T part = x * (form.affine() ? T(0.5) : T(1)) - scale.offset;
  if (!(form.flags & kStochastic)) return static_cast<int32_t>(quantized(part, scale.inverse));
  const int32_t low = form.affine() ? 0 : -kLimit, high = form.affine() ? kLevels : kLimit;
  return clamped(quantized_stochastic(part, scale.inverse, bits.at(index)), low, high);
}

HC_DEVICE int32_t signed_part(uint32_t field) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  return static_cast<int32_t>((field & kField) ^ kSign) - static_cast<int32_t>(kSign);
}

// Source of a message's elements. at(i) returns one; keep() gets it with the value that it decodes to, and
// see() each block's largest magnitude.
template <DTypeCode D>
struct Plain {
  using T = ComputeOf<D>;
  static constexpr DTypeCode kType = D;
  static constexpr bool kKeeps = false;
  const StorageOf<D>* src;
  bool wide;

  HC_METHOD explicit Plain(const void* from)
      : src(static_cast<const StorageOf<D>*>(from)), wide(takes_quads<D>(src)) {}
  HC_METHOD T at(uint64_t i) const { return value_of<D>(src[i]); }
  HC_METHOD void quad(uint64_t i, T* out) const { load_quad<D>(src + i, wide, out); }
  HC_METHOD void keep(uint64_t, T, T) const {}
  HC_METHOD void keep_quad(uint64_t, const T*, const T*) const {}
  HC_METHOD void see(typename Real<T>::Bits) const {}
};

// Find the limits of elements first .. first + m, those of one thread of `lanes`.
template <typename Source>
HC_DEVICE Limits<typename Source::T> limits_of(const Source& source, uint64_t first, uint64_t m,
                                               uint32_t lane, uint32_t lanes) {
  auto limits = Limits<typename Source::T>::none();
#pragma unroll 4
  for (uint64_t i = lane; i < m; i += lanes) limits.take(source.at(first + i));
  return limits;
}

// Write the integers of a block's elements, those of one thread of `lanes`.
template <typename Source>
HC_DEVICE void write_integers(const Source& source, const Form& form, uint64_t first, uint64_t m,
                              const AffineScale<typename Source::T>& scale, uint8_t* packed, uint32_t lane,
                              uint32_t lanes) {
  using T = typename Source::T;
  const uint64_t bytes = bytes_of(m);
  const Bits32 bits(form.seed + 1, first);  // own stream: the transform's signs draw from the seed's
  uint8_t* const to = packed + first / form.block * (form.block / kParts);
  const bool zero = scale.inverse == T(0);
  if (!Source::kKeeps && zero) {
    for (uint64_t j = lane; j < bytes; j += lanes) to[j] = 0;
    return;
  }
#pragma unroll 1
  for (uint64_t j = lane; j < bytes; j += lanes) {
    uint32_t byte = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t i = j + part * bytes;
      if (i >= m) continue;
      const T x = source.at(first + i);
      const int32_t q = zero ? 0 : integer_of(x, scale, form, bits, first + i);
      byte |= (static_cast<uint32_t>(q) & kField) << (part * kBits);
      source.keep(first + i, x, static_cast<T>(signed_part(static_cast<uint32_t>(q))) * scale.stored);
    }
    to[j] = static_cast<uint8_t>(byte);
  }
}

// Encode block b by `lanes` neighbours of a warp; all lanes of the warp come here, and a block past the end
// is left out.
template <typename Source>
HC_DEVICE void encode_by_lanes(const Source& source, const Form& form, uint64_t n, uint64_t b,
                               uint8_t* scales, uint8_t* packed, uint32_t lane, uint32_t lanes) {
  const uint64_t first = b * form.block;
  const uint64_t m = first >= n ? 0 : n - first < form.block ? n - first : form.block;
  auto limits = limits_of(source, first, m, lane, lanes);
  limits.over_lanes(lanes);
  if (m == 0) return;
  const auto scale = scale_of(limits, form.affine());
  if (lane == 0) {
    write_scale(scales, b, scale, form.affine());
    source.see(limits.peak);
  }
  write_integers(source, form, first, m, scale, packed, lane, lanes);
}

// Encode all blocks, each by as many lanes as divide it.
template <typename Source>
HC_DEVICE void encode_groups(const Source& source, const Form& form, uint64_t n, uint8_t* scales,
                             uint8_t* packed) {
  const uint32_t divides = form.block & (0u - form.block), lanes = divides < 32 ? divides : 32;
  const uint32_t lane = threadIdx.x & (lanes - 1), place = (threadIdx.x & 31) / lanes, each = 32 / lanes;
  const uint64_t blocks = (n + form.block - 1) / form.block;
  for (uint64_t b = global_thread() / 32 * each; b < blocks; b += global_threads() / 32 * each)
    encode_by_lanes(source, form, n, b + place, scales, packed, lane, lanes);
}

// Encode all blocks, each by a block of threads: for long ones.
template <typename Source>
HC_DEVICE void encode_long(const Source& source, const Form& form, uint64_t n, uint8_t* scales,
                           uint8_t* packed) {
  using T = typename Source::T;
  HC_SHARED(typename Real<T>::Bits, peaks, kThreads / 32);
  HC_SHARED(typename Real<T>::Signed, lows, kThreads / 32);
  HC_SHARED(typename Real<T>::Signed, highs, kThreads / 32);
  const uint64_t blocks = (n + form.block - 1) / form.block;
  for (uint64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const uint64_t first = b * form.block, m = n - first < form.block ? n - first : form.block;
    auto limits = limits_of(source, first, m, threadIdx.x, kThreads);
    limits.over_lanes(32);
    if ((threadIdx.x & 31) == 0) {
      peaks[threadIdx.x / 32] = limits.peak;
      lows[threadIdx.x / 32] = limits.low;
      highs[threadIdx.x / 32] = limits.high;
    }
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) limits.join({peaks[w], lows[w], highs[w]});
    const auto scale = scale_of(limits, form.affine());
    if (threadIdx.x == 0) {
      write_scale(scales, b, scale, form.affine());
      source.see(limits.peak);
    }
    write_integers(source, form, first, m, scale, packed, threadIdx.x, kThreads);
    __syncthreads();  // the next block's limits are written after this
  }
}

// -- decoding -------------------------------------------------------------------------------------------

// Decoded values by their indices, in any form; for transformed blocks the transform's outputs.
template <typename T>
class Values {
 public:
  HC_METHOD Values(const uint8_t* scales, const uint8_t* packed, uint64_t n, uint32_t block, bool affine)
      : scales_(reinterpret_cast<const T*>(scales)), packed_(packed), n_(n), block_(block), affine_(affine) {}

  HC_METHOD T at(uint64_t i) const {
    const uint64_t b = block_of(i);
    return of_block(b, i - b * block_);
  }
  // Return element `pos` of block b.
  HC_METHOD T of_block(uint64_t b, uint64_t pos) const {
    const uint64_t first = b * block_, m = n_ - first < block_ ? n_ - first : block_, bytes = bytes_of(m);
    uint32_t part = 0;
#pragma unroll
    for (int p = 1; p < kParts; ++p)
      if (pos >= bytes) {
        pos -= bytes;
        ++part;
      }
    const uint32_t byte = packed_[b * (block_ / kParts) + pos];
    const uint32_t field = byte >> (part * kBits);
    if (affine_)
      return affine_value(static_cast<T>(static_cast<int32_t>(field & kField)), scales_[2 * b],
                          scales_[2 * b + 1]);
    return static_cast<T>(signed_part(field)) * scales_[b];
  }
  HC_METHOD uint64_t block_of(uint64_t i) const {  // 64-bit divisions are slow
    return i >> 32 ? i / block_ : static_cast<uint32_t>(i) / block_;
  }

 private:
  const T* scales_;
  const uint8_t* packed_;
  uint64_t n_;
  uint32_t block_;
  bool affine_;
};

template <typename T, DTypeCode D, bool Add>
HC_DEVICE void decode_any(const uint8_t* scales, const uint8_t* packed, uint64_t n, uint32_t block,
                          uint32_t flags, void* to, const uint32_t* status) {
  if (*status) return;
  StorageOf<D>* const out = static_cast<StorageOf<D>*>(to);
  const Values<T> values(scales, packed, n, block, (flags & kAffine) != 0);
  const bool wide = takes_quads<D>(out);
  // Four neighbours lie in one block: its length is a multiple of 8.
  for (uint64_t i = 4 * global_thread(); i < n; i += 4 * global_threads()) {
    const uint64_t b = values.block_of(i), pos = i - b * block;
    if (n - i >= 4) {
      T quad[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) quad[k] = values.of_block(b, pos + k);
      put_quad<D, Add>(out + i, wide, quad);
    } else {
      for (uint64_t k = 0; k < n - i; ++k) put<D, Add>(out + i + k, values.of_block(b, pos + k));
    }
  }
}

}  // namespace
}  // namespace hybridcomp
