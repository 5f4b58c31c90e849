// Helpers that encoders and decoders of the 8-bit and 4-bit floating-point formats share: a payload's
// sections, and the codes of a row of a chunk in memory.
#pragma once

#include "hybridcomp/minifloat.hpp"

#include "common/chunks.cuh"

namespace hybridcomp {

template <bool Mx>
constexpr int kScaleBytes = Mx ? 1 : 4;

// Bytes of the codes of `n` elements: 8 bits each, or 4.
template <MinifloatFormat F, typename Count>
HC_DEVICE Count code_bytes(Count n) {
  return Minifloat<F>::kBits == 8 ? n : n / 2 + n % 2;
}

// Return the start of the codes in a payload: prefix, scales, codes. The codes of fp8 begin at an address
// divisible by 4, those of MX anywhere.
template <bool Mx>
HC_DEVICE uint64_t codes_at(uint64_t n, uint32_t block) {
  return sizeof(MinifloatPrefix) + (n + block - 1) / block * kScaleBytes<Mx>;
}

// A scale as it is stored, and its inverse.
template <bool Mx>
struct Scale;
template <>
struct Scale<true> {
  using Type = MxScale;
  template <MinifloatFormat F>
  __device__ static __forceinline__ Type of(uint32_t peak) {
    return mx_scale<F>(peak);
  }
};
template <>
struct Scale<false> {
  using Type = BlockScale<float>;
  template <MinifloatFormat F>
  __device__ static __forceinline__ Type of(uint32_t peak) {
    return minifloat_scale<F>(peak);
  }
};

template <bool Mx>
HC_DEVICE float read_scale(const uint8_t* scales, uint64_t block) {
  if constexpr (Mx)
    return mx_scale_value(scales[block]);
  else
    return reinterpret_cast<const float*>(scales)[block];
}

// Return a value's code; 0 in a block that is zero or not finite.
template <MinifloatFormat F, bool Mx>
HC_DEVICE uint32_t code_of(float x, float inverse) {
  if (inverse == 0.0f) return 0;
  return Mx ? minifloat_saturated<F>(x * inverse) : minifloat_of<F>(x * inverse);
}

// Return four codes in the low bytes, or the low half, of a word.
template <MinifloatFormat F, bool Mx>
HC_DEVICE uint32_t codes_of(const float* x, float inverse) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kFour; ++i)
    word |= code_of<F, Mx>(x[i], inverse) << (Minifloat<F>::kBits * static_cast<uint32_t>(i));
  return word;
}

// Write the words of a warp's lanes, four bytes each, one after the other to any address. Words of two lanes
// meet in each aligned one.
HC_DEVICE void put_words(uint8_t* to, uint32_t word) {
  const uint32_t lane = lane_of();
  const uint32_t past = static_cast<uint32_t>(reinterpret_cast<uint64_t>(to) & 3);
  if (past == 0) {  // the same in all lanes
    reinterpret_cast<uint32_t*>(to)[lane] = word;
    return;
  }
  const uint32_t before = __shfl_up_sync(kFullWarp, word, 1);
  if (lane) {
    reinterpret_cast<uint32_t*>(to - past)[lane] = __funnelshift_l(before, word, 8 * past);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i)
      if (i < 4 - past) to[i] = static_cast<uint8_t>(word >> (8 * i));
  }
  if (lane == 31) {
#pragma unroll
    for (uint32_t i = 1; i < 4; ++i)
      if (i >= 4 - past) to[4 * 31 + i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

// The same for halves of words.
HC_DEVICE void put_halves(uint8_t* to, uint32_t half) {
  if (aligned_to(to, 2)) {
    reinterpret_cast<uint16_t*>(to)[lane_of()] = static_cast<uint16_t>(half);
  } else {
    to += 2 * lane_of();
    to[0] = static_cast<uint8_t>(half);
    to[1] = static_cast<uint8_t>(half >> 8);
  }
}

// Read a lane's four codes, which begin anywhere. Eight bits each: the aligned word after the last byte may
// be read too, and must be memory.
template <MinifloatFormat F>
HC_DEVICE uint32_t codes_from(const uint8_t* mine) {
  if constexpr (Minifloat<F>::kBits == 8) {
    const uint32_t past =
        static_cast<uint32_t>(reinterpret_cast<uint64_t>(mine) & 3);  // the same in all lanes
    const uint32_t* words = reinterpret_cast<const uint32_t*>(mine - past);
    return past == 0 ? words[0] : __funnelshift_r(words[0], words[1], 8 * past);
  } else {
    if (aligned_to(mine, 2)) return *reinterpret_cast<const uint16_t*>(mine);
    return mine[0] | static_cast<uint32_t>(mine[1]) << 8;
  }
}

// Return how many of n elements codes_from may be used for.
template <MinifloatFormat F>
HC_DEVICE uint64_t in_fours(const uint8_t* codes, uint64_t n) {
  const uint64_t more = Minifloat<F>::kBits == 8 && !aligned_to(codes, 4) ? 3 : 0;
  return n > more ? n - more : 0;
}

// Decode four elements.
template <MinifloatFormat F>
HC_DEVICE void values_of(uint32_t word, float scale, float* v) {
  constexpr uint32_t kMask = (1u << Minifloat<F>::kBits) - 1;
#pragma unroll
  for (int i = 0; i < kFour; ++i)
    v[i] = minifloat_value<F>((word >> (Minifloat<F>::kBits * i)) & kMask) * scale;
}

// Decode one element.
template <MinifloatFormat F>
HC_DEVICE float value_of(const uint8_t* codes, uint64_t e, float scale) {
  constexpr uint32_t kMask = (1u << Minifloat<F>::kBits) - 1;
  const uint32_t shift = Minifloat<F>::kBits == 8 ? 0 : static_cast<uint32_t>(e % 2) * 4;
  return minifloat_value<F>((static_cast<uint32_t>(codes[e * Minifloat<F>::kBits / 8]) >> shift) & kMask) *
         scale;
}

}  // namespace hybridcomp
