// zfp's blocks of four values, one to a thread: bit planes eight at a time as the nibbles of a word, the most
// significant in the lowest. Only planes before all four values are known need a code; a table in shared
// memory gives it. The others are their nibbles.
#pragma once

#include "common/elements.cuh"
#include "hybridcomp/zfp.hpp"

namespace hybridcomp {
namespace {

constexpr int kGroup = 8;  // planes of a word

// -- tables ------------------------------------------------------------------------------------------------

constexpr uint32_t kPairs = 5 * 256;  // indexed by the known values (high bits) and two planes
constexpr uint32_t kSingles = 5 * 16;
constexpr uint32_t kCodes = kPairs + kSingles;
constexpr uint32_t kPlaneCodes = 4 * 128;  // indexed by the known values, not yet all four, and a code's bits

// Fill the codes' tables: entries are code | length << 16 | known << 24. By all threads of a block; ends with
// a barrier.
HC_DEVICE void zfp_fill_codes(uint32_t* codes) {
  uint32_t* const singles = codes + kPairs;
  for (uint32_t i = threadIdx.x; i < kSingles; i += blockDim.x) {
    const ZfpPlane c = zfp_plane_code(i & 15u, i >> 4);
    singles[i] = c.bits | static_cast<uint32_t>(c.length) << 16 | static_cast<uint32_t>(c.known) << 24;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < kPairs; i += blockDim.x) {
    const uint32_t first = singles[(i >> 8) * 16 + (i & 15u)];
    const uint32_t second = singles[(first >> 24) * 16 + ((i >> 4) & 15u)];
    const uint32_t length = (first >> 16) & 31u;
    codes[i] = ((first & 0xFFFFu) | (second & 0xFFFFu) << length) + (length << 16) + (second & 0xFFFF0000u);
  }
  __syncthreads();
}

// Fill the planes' table: entries are plane | length << 4 | known << 8.
HC_DEVICE void zfp_fill_planes(uint32_t* planes) {
  for (uint32_t i = threadIdx.x; i < kPlaneCodes; i += blockDim.x) {
    const ZfpPlane p = zfp_plane_bits(i & 127u, i >> 7);
    planes[i] = p.bits | static_cast<uint32_t>(p.length) << 4 | static_cast<uint32_t>(p.known) << 8;
  }
  __syncthreads();
}

// -- eight planes as nibbles -------------------------------------------------------------------------------

// Swap the bits at `mask` with those `Distance` above.
template <int Distance>
HC_DEVICE uint32_t swap_bits(uint32_t x, uint32_t mask) {
  const uint32_t t = (x ^ (x >> Distance)) & mask;
  return x ^ t ^ (t << Distance);
}

// Return the planes of the top bytes: bit b of a place becomes nibble 7 - b. The values' bits of an index go
// from the top of the place to its bottom by three swaps, which need values 0, 2, 1, 3 from the lowest byte.
HC_DEVICE uint32_t nibbles_of(const uint32_t u[4]) {
  const uint32_t low = __byte_perm(u[3], u[1], 0x0073), high = __byte_perm(u[2], u[0], 0x0073);
  uint32_t x = __brev(__byte_perm(low, high, 0x5410));
  x = swap_bits<12>(x, 0x0000F0F0u);
  x = swap_bits<6>(x, 0x00CC00CCu);
  return swap_bits<3>(x, 0x0A0A0A0Au);
}
HC_DEVICE uint32_t nibbles_of(const uint64_t u[4]) {
  const uint32_t top[4] = {static_cast<uint32_t>(u[0] >> 32), static_cast<uint32_t>(u[1] >> 32),
                           static_cast<uint32_t>(u[2] >> 32), static_cast<uint32_t>(u[3] >> 32)};
  return nibbles_of(top);
}

// The inverse: bytes of values 3, 1, 2, 0 from the lowest.
HC_DEVICE uint32_t bytes_of(uint32_t x) {
  x = swap_bits<3>(x, 0x0A0A0A0Au);
  x = swap_bits<6>(x, 0x00CC00CCu);
  return __brev(swap_bits<12>(x, 0x0000F0F0u));
}

// Append a byte of x to the end of u.
template <int Byte>
HC_DEVICE uint32_t with_byte(uint32_t u, uint32_t x) {
  return __byte_perm(u, x, 0x2104 + Byte);
}
template <int Byte>
HC_DEVICE uint64_t with_byte(uint64_t u, uint32_t x) {
  return (u << 8) | ((x >> (8 * Byte)) & 255u);
}

// -- writers of a block's bits: bits that do not fit are cut off
// -------------------------------------------------

// Writer to a word W, all of which the block fills.
template <typename W>
struct WordWriter {
  W word = 0;
  uint32_t fill = 0;

  __device__ __forceinline__ bool full() const { return fill >= 8 * sizeof(W); }
  // Append the low `count` bits (0 to 32) of `value`; its other bits are zero.
  __device__ __forceinline__ void put(uint32_t value, uint32_t count) {
    if (!full()) word |= static_cast<W>(value) << fill;
    fill += count;
  }
  __device__ __forceinline__ void finish() {}
};

// Writer to shared memory, where the words at a block's ends are its neighbours' too; all are zero before.
struct StageWriter {
  uint32_t* to;
  uint64_t word = 0;
  uint32_t fill, left;

  __device__ __forceinline__ StageWriter(uint32_t* stage, uint32_t at, uint32_t bits)
      : to(stage + at / 32), fill(at % 32), left(bits) {}
  __device__ __forceinline__ bool full() const { return left == 0; }
  __device__ __forceinline__ void put(uint32_t value, uint32_t count) {
    if (count > left) {
      count = left;
      value &= (1u << count) - 1;
    }
    word |= static_cast<uint64_t>(value) << fill;
    fill += count;
    left -= count;
    if (fill < 32) return;
    atomicOr(to++, static_cast<uint32_t>(word));
    word >>= 32;
    fill -= 32;
  }
  __device__ __forceinline__ void finish() {
    if (word) atomicOr(to, static_cast<uint32_t>(word));
  }
};

// -- readers of a block's bits: zeros follow them
// ------------------------------------------------------------

template <typename W>
struct WordReader {
  W word;
  __device__ __forceinline__ uint32_t peek() const { return static_cast<uint32_t>(word); }
  __device__ __forceinline__ void skip(uint32_t count) {  // at most 32
    word = count < 8 * sizeof(W) ? word >> count : 0;
  }
};

// Reader of 32-bit words of the stream, of which there are `end`.
struct StreamReader {
  const uint32_t* words;
  uint64_t at, end;     // the next word to read
  uint64_t window = 0;  // the next bits
  uint32_t have = 0;    // bits in the window: 32 or more
  uint32_t low, offset;
  int32_t rest;  // bits of the block that are not in the window yet

  __device__ __forceinline__ StreamReader(const uint32_t* stream, uint64_t count, uint64_t bit, uint32_t bits)
      : words(stream),
        at(bit / 32),
        end(count),
        offset(static_cast<uint32_t>(bit % 32)),
        rest(static_cast<int32_t>(bits)) {
    low = next_word();
    fill();
  }
  __device__ __forceinline__ uint32_t peek() const { return static_cast<uint32_t>(window); }
  __device__ __forceinline__ void skip(uint32_t count) {
    window >>= count;
    have -= count;
    if (have < 32) fill();
  }

 private:
  __device__ __forceinline__ uint32_t next_word() {
    const uint32_t word = at < end ? words[at] : 0;
    ++at;
    return word;
  }
  __device__ __forceinline__ void fill() {
    uint32_t more = 0;
    if (rest > 0) {
      const uint32_t high = next_word();
      more = __funnelshift_r(low, high, offset);
      low = high;
      if (rest < 32) more &= (1u << rest) - 1;
      rest -= 32;
    }
    window |= static_cast<uint64_t>(more) << have;
    have += 32;
  }
};

// -- a block -----------------------------------------------------------------------------------------------

// Do zfp_fixed of a block's values, by a product that is exact or below 1 where the power of two is a number.
template <typename T>
HC_DEVICE void zfp_integers(const T v[4], int e, typename Real<T>::Bits u[4]) {
  using Bits = typename Real<T>::Bits;
  constexpr int kDown = Zfp<T>::kPlanes - 2;
  if (e >= kDown) {
    const T scale = float_of(static_cast<Bits>(2 * Zfp<T>::kBias + kDown - e) << Zfp<T>::kMantissa);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = static_cast<Bits>(static_cast<typename Real<T>::Signed>(v[i] * scale));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = static_cast<Bits>(zfp_fixed(v[i], e));
  }
}

// Return the planes of a block: a float's has them all, whatever its exponent is.
template <typename T>
HC_DEVICE int planes_of(int e) {
  return sizeof(T) == 4 ? Zfp<T>::kPlanes : zfp_planes<T>(e);
}
// Return how many of `left` planes are in the next word.
template <typename T>
HC_DEVICE int planes_here(int left) {
  return sizeof(T) == 4 || left > kGroup ? kGroup : left;
}

template <typename T, typename Writer>
HC_DEVICE void zfp_encode(const T v[4], const uint32_t* codes, Writer& out) {
  using Bits = typename Real<T>::Bits;
  Bits peak = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) peak = magnitude(v[i]) > peak ? magnitude(v[i]) : peak;
  int e = zfp_exponent<T>(peak);
  if (e == 0) return;
  Bits u[4];
  if (peak >= Real<T>::kInfinity) {
    e = kZfpMaxExponent<T>;
    zfp_non_finite(u);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] = (u[i] + Zfp<T>::kNegabinary) ^ Zfp<T>::kNegabinary;
  } else {
    zfp_integers(v, e, u);
    zfp_forward(u, Zfp<T>::kNegabinary);
  }
  out.put(2 * static_cast<uint32_t>(e) + 1, kZfpHeaderBits<T>);
  uint32_t known = 0;
  for (int left = planes_of<T>(e); left > 0 && !out.full(); left -= kGroup) {
    uint32_t nibbles = nibbles_of(u);
#pragma unroll
    for (int i = 0; i < 4; ++i) u[i] <<= 8;
    const int here = planes_here<T>(left);
    if (here < kGroup) {
      for (int i = 0; i < here; ++i, nibbles >>= 4) {
        const uint32_t code = codes[kPairs + known * 16 + (nibbles & 15u)];
        out.put(code & 0xFFFFu, (code >> 16) & 31u);
        known = code >> 24;
      }
    } else if (known == 4) {
      out.put(nibbles, 32);
    } else {  // to the group's end without a branch, though some lanes' values may all be known before
#pragma unroll
      for (int i = 0; i < kGroup; i += 2) {
        const uint32_t code = codes[known * 256 + ((nibbles >> (4 * i)) & 255u)];
        out.put(code & 0xFFFFu, (code >> 16) & 31u);
        known = code >> 24;
      }
    }
  }
  out.finish();
}

template <typename T, typename Reader>
HC_DEVICE void zfp_decode(Reader& in, uint32_t bits, const uint32_t* planes, T v[4]) {
  using Bits = typename Real<T>::Bits;
  const uint32_t head = in.peek();
  if ((head & 1u) == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = T(0);
    return;
  }
  const int e = static_cast<int>(head >> 1) & kZfpMaxExponent<T>;
  in.skip(kZfpHeaderBits<T>);
  int missing = kZfpHeaderBits<T> - static_cast<int>(bits);  // bits that were taken past the block's end
  Bits u[4] = {0, 0, 0, 0};
  uint32_t known = 0;
  int shift = Zfp<T>::kPlanes;
  for (int left = planes_of<T>(e); left > 0 && missing < 0; left -= kGroup, shift -= 8) {
    const int here = planes_here<T>(left);
    uint32_t nibbles = 0, before = 4;
    int i = 0;
    for (; known < 4 && i < here && missing < 0; ++i) {
      const uint32_t entry = planes[known * 128 + (in.peek() & 127u)], length = (entry >> 4) & 15u;
      in.skip(length);
      missing += static_cast<int>(length);
      nibbles |= (entry & 15u) << (4 * i);
      before = known;
      known = entry >> 8;
    }
    if (missing > 0 && before < 4) {  // the last of these planes took bits past the end
      const uint32_t plane = (nibbles >> (4 * i - 4)) & 15u;
      nibbles ^= (plane ^ zfp_cut_run(plane, before, missing)) << (4 * i - 4);
    }
    if (known == 4 && i < here) {
      const uint32_t length = 4 * static_cast<uint32_t>(here - i);
      const uint32_t rest = length < 32 ? in.peek() & ((1u << length) - 1) : in.peek();
      nibbles |= rest << (4 * i);
      in.skip(length);
      missing += static_cast<int>(length);
    }
    const uint32_t bytes = bytes_of(nibbles);
    u[0] = with_byte<3>(u[0], bytes);
    u[1] = with_byte<1>(u[1], bytes);
    u[2] = with_byte<2>(u[2], bytes);
    u[3] = with_byte<0>(u[3], bytes);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) u[i] <<= shift;
  zfp_inverse(u, Zfp<T>::kNegabinary);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = zfp_float<T>(static_cast<typename Real<T>::Signed>(u[i]), e);
}

}  // namespace
}  // namespace hybridcomp
