// Block quantization in every form: long blocks, offsets, stochastic rounding, the Hadamard transform; part
// of loops.cpp, which has faster loops for the plain form.
#pragma once

#include "codecs/block/block.hpp"
#include "codecs/common/tile.hpp"
#include "hybridcomp/quantize.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <int Bits>
constexpr int limit_of() {  // symmetric integers lie in -limit .. limit
  return (1 << (Bits - 1)) - 1;
}

template <int Bits>
constexpr std::size_t bytes_of(std::size_t m) {  // bytes of the packed integers of a block of m
  return (m + 8 / Bits - 1) / (8 / Bits);
}

// Return the key of a rounding's random numbers: a stream of its own, since the transform's signs draw from
// the seed's.
inline RandomKey rounding_key(std::uint64_t seed, std::uint32_t high) { return random_key(seed + 1, high); }

template <typename T>
void range_of(const T* x, std::size_t m, typename Real<T>::Signed* low, typename Real<T>::Signed* high) {
  typename Real<T>::Signed a = *low, b = *high;
  for (std::size_t i = 0; i < m; ++i) {
    const auto key = ordered(x[i]);
    a = key < a ? key : a;
    b = key > b ? key : b;
  }
  *low = a;
  *high = b;
}

template <typename T, bool Add>
void put(T* out, T value) {
  if constexpr (Add)
    *out = quieted(*out + value);
  else
    *out = value;
}

// -- the Hadamard transform --------------------------------------------------------------------------------

// Stages of distance 1, 2, 4 and 8 within sixteen floats.
typedef float Lanes __attribute__((vector_size(64)));

template <int D>
void butterfly(Lanes& v) {
  constexpr auto sign = [](int i) { return i & D ? -1.0f : 1.0f; };
  const Lanes partner = __builtin_shufflevector(v, v, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D,
                                                8 ^ D, 9 ^ D, 10 ^ D, 11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
  const Lanes signs = {sign(0), sign(1), sign(2),  sign(3),  sign(4),  sign(5),  sign(6),  sign(7),
                       sign(8), sign(9), sign(10), sign(11), sign(12), sign(13), sign(14), sign(15)};
  v = partner + v * signs;
}

template <typename T>
void stages(T* x, std::size_t n, std::size_t from) {
  for (std::size_t h = from; h < n; h *= 2) {
    for (std::size_t i = 0; i < n; i += 2 * h) {
      T* __restrict a = x + i;
      T* __restrict b = x + i + h;
      for (std::size_t j = 0; j < h; ++j) {
        const T sum = a[j] + b[j], difference = a[j] - b[j];
        a[j] = sum;
        b[j] = difference;
      }
    }
  }
}

// Do all stages of n (a power of two) values in place.
inline void transform(float* x, std::size_t n) {
  if (n < 16) return stages(x, n, 1);
  for (std::size_t i = 0; i < n; i += 16) {
    Lanes v;
    std::memcpy(&v, x + i, sizeof(v));
    butterfly<1>(v);
    butterfly<2>(v);
    butterfly<4>(v);
    butterfly<8>(v);
    std::memcpy(x + i, &v, sizeof(v));
  }
  stages(x, n, 16);
}
inline void transform(double* x, std::size_t n) { stages(x, n, 1); }

// out[i] = x[i] (or 0 where it is tiny) with the random sign of element first + i.
template <typename T>
void flip(const T* x, std::size_t n, std::uint64_t first, std::uint64_t seed, T factor, T* out) {
  for (std::size_t i = 0; i < n;) {  // one key for the indices that share their high half
    const std::uint64_t index = first + i;
    const std::uint64_t rest = (std::uint64_t(1) << 32) - (index & 0xFFFFFFFFu);
    const std::size_t end = n - i < rest ? n : i + static_cast<std::size_t>(rest);
    const RandomKey key = random_key(seed, static_cast<std::uint32_t>(index >> 32));
    const std::uint32_t low = static_cast<std::uint32_t>(index) - static_cast<std::uint32_t>(i);
    for (; i < end; ++i)
      out[i] = flipped(flushed(x[i]) * factor, random_bits(key, low + static_cast<std::uint32_t>(i)));
  }
}

// -- encoding ----------------------------------------------------------------------------------------------

template <DTypeCode D, int Bits>
struct GeneralEncoder {
  using T = ComputeOf<D>;
  static constexpr std::size_t kSize = sizeof(StorageOf<D>);
  static constexpr std::size_t kParts = 8 / Bits;
  static constexpr std::size_t kPiece = 512;  // bytes packed at a time

  const BlockFormat& format;
  const bool stochastic;

  // Quantize `len` values, from index `first` on, to integers `q`.
  void integers(const T* __restrict x, std::size_t len, std::uint64_t first, T offset, T inverse,
                std::int32_t* __restrict q) const {
    const T half = format.symmetric ? T(1) : T(0.5);
    const std::int32_t low = format.symmetric ? -limit_of<Bits>() : 0;
    const std::int32_t high = format.symmetric ? limit_of<Bits>() : (1 << Bits) - 1;
    if (!stochastic) {
      for (std::size_t i = 0; i < len; ++i)
        q[i] = static_cast<std::int32_t>(quantized(x[i] * half - offset, inverse));
      return;
    }
    for (std::size_t i = 0; i < len;) {
      const std::uint64_t index = first + i;
      const std::uint64_t rest = (std::uint64_t(1) << 32) - (index & 0xFFFFFFFFu);
      const std::size_t end = len - i < rest ? len : i + static_cast<std::size_t>(rest);
      const RandomKey key = rounding_key(format.seed, static_cast<std::uint32_t>(index >> 32));
      const std::uint32_t base = static_cast<std::uint32_t>(index) - static_cast<std::uint32_t>(i);
      for (; i < end; ++i) {
        const std::uint32_t bits = random_bits(key, base + static_cast<std::uint32_t>(i));
        q[i] = clamped(quantized_stochastic(x[i] * half - offset, inverse, bits), low, high);
      }
    }
  }

  // Write the scale (and offset) of a block, found from its limits; returns offset and inverse.
  AffineScale<T> scale_of(typename Real<T>::Bits peak, typename Real<T>::Signed low,
                          typename Real<T>::Signed high) const {
    if (!format.symmetric)
      return affine_scale<T>(peak, from_ordered(low), from_ordered(high), T((1 << Bits) - 1));
    const BlockScale<T> scale = block_scale<T>(peak, T(limit_of<Bits>()));
    return {scale.stored, T(0), scale.inverse};
  }

  void run(const std::uint8_t* src, std::size_t n, std::uint64_t first, std::uint8_t* scales,
           std::uint8_t* q) const {
    alignas(64) T buffer[kTile];
    alignas(64) T turned[kTile];
    std::int32_t fields[kParts][kPiece];
    for (std::size_t at = 0; at < n; at += format.block) {
      const std::size_t m = smaller(format.block, n - at);
      // The whole block is read at once where it fits a tile; else it is read tile by tile, twice.
      const T* whole = m <= kTile ? view<D>(src + at * kSize, m, buffer) : nullptr;
      const bool turn = format.hadamard && m == format.block;
      typename Real<T>::Bits peak = 0;
      if (turn) {
        peak = peak_of<T, 0>(whole, m);
        if (peak < Real<T>::kInfinity) peak = 0;  // only whether the data is finite matters
        flip(whole, m, first + at, format.seed, T(1), turned);
        transform(turned, m);
        whole = turned;
      }
      typename Real<T>::Signed low = ordered(float_of(Real<T>::kInfinity)), high = ~low;
      for (std::size_t i = 0; i < m; i += kTile) {
        const std::size_t len = smaller(kTile, m - i);
        const T* x = whole ? whole : view<D>(src + (at + i) * kSize, len, buffer);
        const auto p = peak_of<T, 0>(x, len);
        peak = p > peak ? p : peak;
        if (!format.symmetric) range_of(x, len, &low, &high);
      }
      if (turn && peak < Hadamard<T>::kSmallestTransformed) {  // the whole block is taken for zero
        peak = 0;
        low = high = 0;
      }
      const AffineScale<T> scale = scale_of(peak, low, high);
      std::memcpy(scales, &scale.stored, sizeof(T));
      if (!format.symmetric) std::memcpy(scales + sizeof(T), &scale.offset, sizeof(T));
      scales += format.symmetric ? sizeof(T) : 2 * sizeof(T);

      const std::size_t bytes = bytes_of<Bits>(m);
      for (std::size_t b = 0; b < bytes; b += kPiece) {
        const std::size_t len = smaller(kPiece, bytes - b);
        if (scale.inverse == T(0)) {
          std::memset(q + b, 0, len);
          continue;
        }
        for (std::size_t part = 0; part < kParts; ++part) {
          const std::size_t begin = part * bytes + b;
          const std::size_t count = begin < m ? smaller(len, m - begin) : 0;
          std::memset(fields[part] + count, 0, (len - count) * sizeof(fields[part][0]));
          if (!count) continue;
          const T* x = whole ? whole + begin : view<D>(src + (at + begin) * kSize, count, buffer);
          integers(x, count, first + at + begin, scale.offset, scale.inverse, fields[part]);
        }
        for (std::size_t i = 0; i < len; ++i) {
          std::uint32_t byte = 0;
          for (std::size_t part = 0; part < kParts; ++part)
            byte |= (static_cast<std::uint32_t>(fields[part][i]) & ((1u << Bits) - 1)) << (part * Bits);
          q[b + i] = static_cast<std::uint8_t>(byte);
        }
      }
      q += bytes;
    }
  }
};

// -- decoding ----------------------------------------------------------------------------------------------

template <typename T, int Bits>
struct GeneralDecoder {
  const BlockFormat& format;

  // Decode values begin .. begin + len of a block of m.
  void values(const std::uint8_t* q, std::size_t m, T scale, T offset, std::size_t begin, std::size_t len,
              T* __restrict out) const {
    const std::size_t bytes = bytes_of<Bits>(m);
    for (std::size_t part = 0; part < 8 / Bits; ++part) {
      const std::size_t start = part * bytes;
      const std::size_t from = begin > start ? begin : start;
      const std::size_t to = smaller(begin + len, start + bytes);
      if (from >= to) continue;
      const std::uint8_t* __restrict fields = q + (from - start);
      T* __restrict here = out + (from - begin);
      if (format.symmetric) {
        for (std::size_t i = 0; i < to - from; ++i)
          here[i] = static_cast<T>(signed_field<Bits>(fields[i], static_cast<int>(part))) * scale;
      } else {
        for (std::size_t i = 0; i < to - from; ++i)
          here[i] = affine_value(static_cast<T>(unsigned_field<Bits>(fields[i], static_cast<int>(part))),
                                 scale, offset);
      }
    }
  }

  void run(const std::uint8_t* scales, const std::uint8_t* q, std::size_t n, std::uint64_t first,
           std::uint8_t* out, DTypeCode out_dtype, bool add) const {
    alignas(64) T buffer[kTile];
    for (std::size_t at = 0; at < n; at += format.block) {
      const std::size_t m = smaller(format.block, n - at);
      T scale, offset = T(0);
      std::memcpy(&scale, scales, sizeof(T));
      if (!format.symmetric) std::memcpy(&offset, scales + sizeof(T), sizeof(T));
      scales += format.symmetric ? sizeof(T) : 2 * sizeof(T);
      const bool turn = format.hadamard && m == format.block;
      for (std::size_t begin = 0; begin < m; begin += kTile) {
        const std::size_t len = smaller(kTile, m - begin);
        values(q, m, scale, offset, begin, len, buffer);
        if (turn) {
          transform(buffer, m);
          flip(buffer, m, first + at, format.seed, T(1) / static_cast<T>(m), buffer);
        }
        put_tile(buffer, len, out, at + begin, out_dtype, add);
      }
      q += bytes_of<Bits>(m);
    }
  }
};

}  // namespace
}  // namespace hybridcomp::HC_ISA
