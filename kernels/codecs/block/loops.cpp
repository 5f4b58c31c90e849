// Block quantization; compiled once per instruction set. The loops are plain so that the compiler vectorizes
// them for each instruction set; blocks of 128 get a copy with a constant length, which decodes up to a
// quarter faster.
#include "codecs/block/general.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kUsualBlock = 128;

// Roundings of a block's values to integers. Both are called with the value's index in the block.
template <typename T>
struct ToNearest {
  T inverse;
  std::int32_t operator()(T x, std::size_t) const { return static_cast<std::int32_t>(quantized(x, inverse)); }
};

template <typename T, int Bits>
struct AtRandom {
  T inverse;
  RandomKey key;
  std::uint32_t first;  // low half of the index of the block's first element; all share the high half
  std::int32_t operator()(T x, std::size_t i) const {
    const std::uint32_t bits = random_bits(key, first + static_cast<std::uint32_t>(i));
    return clamped(quantized_stochastic(x, inverse, bits), -limit_of<Bits>(), limit_of<Bits>());
  }
};

template <typename T, std::size_t N, typename Rounding>
void quantize8(const T* __restrict x, std::size_t m, Rounding round, std::uint8_t* __restrict q) {
  const std::size_t n = N ? N : m;
  for (std::size_t i = 0; i < n; ++i) q[i] = static_cast<std::uint8_t>(round(x[i], i));
}

// Quantize values to m bytes of nibbles: x[i] for the low ones, x[half + i] for the high ones.
template <typename T, std::size_t N, typename Rounding>
void quantize4(const T* __restrict x, std::size_t half, std::size_t m, Rounding round,
               std::uint8_t* __restrict q) {
  const std::size_t n = N ? N : m;
  const std::size_t h = N ? N : half;
  for (std::size_t i = 0; i < n; ++i) q[i] = pack_nibbles(round(x[i], i), round(x[h + i], h + i));
}

// Quantize values to m bytes of four 2-bit fields: field f of byte i from x[f * quarter + i].
template <typename T, std::size_t N, typename Rounding>
void quantize2(const T* __restrict x, std::size_t quarter, std::size_t m, Rounding round,
               std::uint8_t* __restrict q) {
  const std::size_t n = N ? N : m;
  const std::size_t h = N ? N : quarter;
  for (std::size_t i = 0; i < n; ++i) {
    const std::int32_t a = round(x[i], i);
    const std::int32_t b = round(x[h + i], h + i);
    const std::int32_t c = round(x[2 * h + i], 2 * h + i);
    const std::int32_t d = round(x[3 * h + i], 3 * h + i);
    q[i] = static_cast<std::uint8_t>((a & 3) | ((b & 3) << 2) | ((c & 3) << 4) | ((d & 3) << 6));
  }
}

// Quantize values of a block that is already in its computing type.
template <typename T, int Bits, std::size_t N, typename Rounding>
void quantize_values(const T* x, std::size_t m, Rounding round, std::uint8_t* q) {
  if constexpr (Bits == 8) {
    quantize8<T, N>(x, m, round, q);
  } else if constexpr (Bits == 4) {
    const std::size_t half = (m + 1) / 2;
    quantize4<T, N / 2>(x, half, m / 2, round, q);
    if (m % 2) q[half - 1] = pack_nibbles(round(x[half - 1], half - 1), 0);
  } else {
    const std::size_t quarter = (m + 3) / 4;
    const std::size_t full =
        m > 3 * quarter ? m - 3 * quarter : 0;  // bytes of which all four fields are used
    quantize2<T, N / 4>(x, quarter, full, round, q);
    for (std::size_t i = N ? N / 4 : full; i < quarter; ++i) {
      std::uint32_t byte = 0;
      for (std::size_t part = 0, at = i; at < m; ++part, at += quarter)
        byte |= (static_cast<std::uint32_t>(round(x[at], at)) & 3u) << (2 * part);
      q[i] = static_cast<std::uint8_t>(byte);
    }
  }
}

// Quantize m <= kTile values: whole blocks, the last of which may be short. All peaks are found first, then
// all scales, then all integers: one block after another would wait for each block's maximum and divisions in
// turn. `rounding(inverse, i)` returns the rounding of the block that begins at element i.
template <typename T, int Bits, typename RoundingOf>
void quantize_tile(const T* x, std::size_t m, std::size_t block, RoundingOf rounding, std::uint8_t* scales,
                   std::uint8_t* q) {
  typename Real<T>::Bits peaks[kTile / kMinBlock];
  T stored[kTile / kMinBlock], inverse[kTile / kMinBlock];
  const std::size_t blocks = blocks_of(m, block);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t len = smaller(block, m - b * block);
    peaks[b] =
        len == kUsualBlock ? peak_of<T, kUsualBlock>(x + b * block, len) : peak_of<T, 0>(x + b * block, len);
  }
  for (std::size_t b = 0; b < blocks; ++b) {
    const BlockScale<T> scale = block_scale<T>(peaks[b], T(limit_of<Bits>()));
    stored[b] = scale.stored;
    inverse[b] = scale.inverse;
  }
  std::memcpy(scales, stored, blocks * sizeof(T));
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::size_t len = smaller(block, m - b * block);
    const std::size_t bytes = bytes_of<Bits>(len);
    // The next tile is fetched from memory while this one is computed, and not while its peaks are read.
    if (len == kUsualBlock) prefetch_ahead(x + b * block, kUsualBlock * sizeof(T), m * sizeof(T));
    if (inverse[b] == T(0))  // zero or not finite
      std::memset(q, 0, bytes);
    else if (len == kUsualBlock)
      quantize_values<T, Bits, kUsualBlock>(x + b * block, len, rounding(inverse[b], b * block), q);
    else
      quantize_values<T, Bits, 0>(x + b * block, len, rounding(inverse[b], b * block), q);
    q += bytes;
  }
}

// Quantize n elements in blocks of at most a tile; `rounding` as above.
template <DTypeCode D, int Bits, typename RoundingOf>
void quantize_all(const std::uint8_t* src, std::size_t n, std::size_t block, RoundingOf rounding,
                  std::uint8_t* scales, std::uint8_t* q) {
  using T = ComputeOf<D>;
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  alignas(64) T buffer[kTile];
  const std::size_t step = kTile / block * block;
  for (std::size_t at = 0; at < n; at += step) {
    const std::size_t m = smaller(step, n - at);
    const auto here = [&](T inverse, std::size_t i) { return rounding(inverse, at + i); };
    quantize_tile<T, Bits>(view<D>(src + at * kSize, m, buffer), m, block, here, scales, q);
    scales += blocks_of(m, block) * sizeof(T);
    q += packed_bytes(m, static_cast<std::uint32_t>(block), Bits);
  }
}

template <int Bits>
void quantize_bits(const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::uint64_t first,
                   const BlockFormat& format, bool stochastic, std::uint8_t* scales, std::uint8_t* packed) {
  const bool plain = format.symmetric && !format.hadamard && format.block <= kTile;
  const bool one_key = n <= (std::uint64_t(1) << 32) - (first & 0xFFFFFFFFu);
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    if (plain && !stochastic) {
      const auto rounding = [](T inverse, std::size_t) { return ToNearest<T>{inverse}; };
      quantize_all<D, Bits>(src, n, format.block, rounding, scales, packed);
    } else if (plain && one_key) {
      const RandomKey key = rounding_key(format.seed, static_cast<std::uint32_t>(first >> 32));
      const auto rounding = [&](T inverse, std::size_t i) {
        return AtRandom<T, Bits>{inverse, key, static_cast<std::uint32_t>(first + i)};
      };
      quantize_all<D, Bits>(src, n, format.block, rounding, scales, packed);
    } else {
      GeneralEncoder<D, Bits>{format, stochastic}.run(src, n, first, scales, packed);
    }
  });
}

void quantize(const void* src, DTypeCode dtype, std::size_t n, std::uint64_t first, const BlockFormat& format,
              bool stochastic, std::uint8_t* scales, std::uint8_t* packed) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (format.bits == 8)
    quantize_bits<8>(from, dtype, n, first, format, stochastic, scales, packed);
  else if (format.bits == 4)
    quantize_bits<4>(from, dtype, n, first, format, stochastic, scales, packed);
  else
    quantize_bits<2>(from, dtype, n, first, format, stochastic, scales, packed);
}

// Decode values first .. first + len of a block of m into `out`.
template <typename T, int Bits, std::size_t N, bool Add>
void dequantize_values(const std::uint8_t* __restrict q, std::size_t m, T scale, std::size_t first,
                       std::size_t len, T* __restrict out) {
  if constexpr (Bits == 8) {
    const std::size_t n = N ? N : len;
    for (std::size_t i = 0; i < n; ++i)
      put<T, Add>(out + i, static_cast<T>(static_cast<std::int8_t>(q[first + i])) * scale);
  } else if constexpr (Bits == 2) {
    const std::size_t quarter = N ? N / 4 : (m + 3) / 4;
    for (int part = 0; part < 4; ++part) {
      const std::size_t start = static_cast<std::size_t>(part) * quarter;
      const std::size_t from = N ? start : (first > start ? first : start);
      const std::size_t to = N ? start + quarter : smaller(first + len, start + quarter);
      const std::uint8_t* fields = q + (from - start);
      T* __restrict to_here = out + (from - (N ? 0 : first));
      for (std::size_t i = 0; i < (N ? N / 4 : (to > from ? to - from : 0)); ++i)
        put<T, Add>(to_here + i, static_cast<T>(signed_field<2>(fields[i], part)) * scale);
    }
  } else {
    const std::size_t half = (m + 1) / 2;
    const std::size_t end = first + len;
    const std::size_t low_end = N ? N / 2 : smaller(end, half);
    const std::size_t start = N ? 0 : first;
    for (std::size_t i = start; i < low_end; ++i)
      put<T, Add>(out + (i - start), static_cast<T>(low_nibble(q[i])) * scale);
    const std::size_t high_start = N ? N / 2 : (first > half ? first : half);
    const std::size_t high_end = N ? N : end;
    for (std::size_t i = high_start; i < high_end; ++i)
      put<T, Add>(out + (i - start), static_cast<T>(high_nibble(q[i - (N ? N / 2 : half)])) * scale);
  }
}

template <typename T, int Bits, bool Add>
void dequantize_direct(const std::uint8_t* scales, const std::uint8_t* q, std::size_t n, std::size_t block,
                       T* out) {
  for (std::size_t at = 0; at < n; at += block, scales += sizeof(T)) {
    const std::size_t m = smaller(block, n - at);
    T scale;
    std::memcpy(&scale, scales, sizeof(T));
    if (m == kUsualBlock) {
      if constexpr (Add) prefetch_ahead(out + at, kUsualBlock * sizeof(T));
      dequantize_values<T, Bits, kUsualBlock, Add>(q, m, scale, 0, m, out + at);
    } else {
      dequantize_values<T, Bits, 0, Add>(q, m, scale, 0, m, out + at);
    }
    q += bytes_of<Bits>(m);
  }
}

// Decode to another type than the message's own, or to unaligned memory: through a buffer, tile by tile.
template <typename T, int Bits, DTypeCode D>
void dequantize_buffered(const std::uint8_t* scales, const std::uint8_t* q, std::size_t n, std::size_t block,
                         std::uint8_t* out, bool add) {
  alignas(64) T buffer[kTile];
  for (std::size_t at = 0; at < n; at += block, scales += sizeof(T)) {
    const std::size_t m = smaller(block, n - at);
    T scale;
    std::memcpy(&scale, scales, sizeof(T));
    for (std::size_t first = 0; first < m; first += kTile) {
      const std::size_t len = smaller(kTile, m - first);
      if (m == kUsualBlock)
        dequantize_values<T, Bits, kUsualBlock, false>(q, m, scale, first, len, buffer);
      else
        dequantize_values<T, Bits, 0, false>(q, m, scale, first, len, buffer);
      std::uint8_t* to = out + (at + first) * sizeof(StorageOf<D>);
      if constexpr (D == kFloat32 || D == kFloat64) {
        if (add) {
          store_add<D>(buffer, to, len);
          continue;
        }
      }
      store<D>(buffer, to, len);
    }
    q += bytes_of<Bits>(m);
  }
}

template <typename T, int Bits>
void dequantize_all(const std::uint8_t* scales, const std::uint8_t* q, std::size_t n, std::size_t block,
                    void* out, DTypeCode out_dtype, bool add) {
  constexpr DTypeCode kOwn = sizeof(T) == 8 ? kFloat64 : kFloat32;
  if (out_dtype == kOwn && aligned<T>(out)) {
    if (add)
      dequantize_direct<T, Bits, true>(scales, q, n, block, static_cast<T*>(out));
    else
      dequantize_direct<T, Bits, false>(scales, q, n, block, static_cast<T*>(out));
    return;
  }
  with_dtype(out_dtype, [&]<DTypeCode D>() {
    dequantize_buffered<T, Bits, D>(scales, q, n, block, static_cast<std::uint8_t*>(out), add);
  });
}

template <typename T, int Bits>
void dequantize_bits(const std::uint8_t* scales, const std::uint8_t* packed, std::size_t n,
                     std::uint64_t first, const BlockFormat& format, void* out, DTypeCode out_dtype,
                     bool add) {
  if (format.symmetric && !format.hadamard)
    dequantize_all<T, Bits>(scales, packed, n, format.block, out, out_dtype, add);
  else
    GeneralDecoder<T, Bits>{format}.run(scales, packed, n, first, static_cast<std::uint8_t*>(out), out_dtype,
                                        add);
}

template <typename T>
void dequantize_type(const std::uint8_t* scales, const std::uint8_t* packed, std::size_t n,
                     std::uint64_t first, const BlockFormat& format, void* out, DTypeCode out_dtype,
                     bool add) {
  if (format.bits == 8)
    dequantize_bits<T, 8>(scales, packed, n, first, format, out, out_dtype, add);
  else if (format.bits == 4)
    dequantize_bits<T, 4>(scales, packed, n, first, format, out, out_dtype, add);
  else
    dequantize_bits<T, 2>(scales, packed, n, first, format, out, out_dtype, add);
}

void dequantize(const std::uint8_t* scales, const std::uint8_t* packed, bool wide, std::size_t n,
                std::uint64_t first, const BlockFormat& format, void* out, DTypeCode out_dtype, bool add) {
  if (wide)
    dequantize_type<double>(scales, packed, n, first, format, out, out_dtype, add);
  else
    dequantize_type<float>(scales, packed, n, first, format, out, out_dtype, add);
}

// -- several messages at once ------------------------------------------------------------------------------

// Add K messages' fields of one part of a byte: each sum is loaded and stored once, not K times.
template <typename T, int Bits, int K, int Part>
void add_fields(const std::uint8_t* const* q, const T* scales, std::size_t n, const T* own, T* sums) {
  const std::uint8_t* from[K];
  T scale[K];
  for (int k = 0; k < K; ++k) {
    from[k] = q[k];
    scale[k] = scales[k];
  }
#pragma GCC ivdep  // `own` is `sums`, or apart from it
  for (std::size_t i = 0; i < n; ++i) {
    T sum = own[i];
    for (int k = 0; k < K; ++k) {
      if constexpr (Bits == 8)
        sum += static_cast<T>(static_cast<std::int8_t>(from[k][i])) * scale[k];
      else
        sum += static_cast<T>(signed_field<Bits>(from[k][i], Part)) * scale[k];
    }
    sums[i] = quieted(sum);
  }
}

template <typename T, int Bits, int K>
void add_group(const BlockPart* messages, std::size_t n, std::size_t block, const T* own, T* sums) {
  constexpr std::size_t kParts = 8 / Bits;
  const std::uint8_t* q[K];
  for (int k = 0; k < K; ++k) q[k] = messages[k].packed;
  for (std::size_t at = 0, b = 0; at < n; at += block, ++b) {
    const std::size_t m = smaller(block, n - at), bytes = bytes_of<Bits>(m);
    T scales[K];
    for (int k = 0; k < K; ++k) std::memcpy(&scales[k], messages[k].scales + b * sizeof(T), sizeof(T));
    const auto fields = [&]<int Part>() {
      constexpr std::size_t kUsual = kUsualBlock / kParts;
      const std::size_t start = Part * (m == kUsualBlock ? kUsual : bytes);
      if (m == kUsualBlock)  // the usual length, as a constant
        add_fields<T, Bits, K, Part>(q, scales, kUsual, own + at + start, sums + at + start);
      else if (start < m)
        add_fields<T, Bits, K, Part>(q, scales, smaller(bytes, m - start), own + at + start,
                                     sums + at + start);
    };
    if (m == kUsualBlock) prefetch_ahead(own + at, kUsualBlock * sizeof(T));
    fields.template operator()<0>();
    if constexpr (Bits < 8) fields.template operator()<1>();
    if constexpr (Bits < 4) {
      fields.template operator()<2>();
      fields.template operator()<3>();
    }
    for (int k = 0; k < K; ++k) q[k] += bytes;
  }
}

template <typename T, int Bits>
void add_all(const BlockPart* messages, std::size_t count, std::size_t n, std::size_t block, const T* own,
             T* sums) {
  for (; count >= 4; count -= 4, messages += 4, own = sums)
    add_group<T, Bits, 4>(messages, n, block, own, sums);
  if (count == 3) add_group<T, Bits, 3>(messages, n, block, own, sums);
  if (count == 2) add_group<T, Bits, 2>(messages, n, block, own, sums);
  if (count == 1) add_group<T, Bits, 1>(messages, n, block, own, sums);
}

template <typename T>
void add_type(const BlockPart* messages, std::size_t count, std::size_t n, const BlockFormat& format,
              const T* own, T* sums) {
  if (format.bits == 8)
    add_all<T, 8>(messages, count, n, format.block, own, sums);
  else if (format.bits == 4)
    add_all<T, 4>(messages, count, n, format.block, own, sums);
  else
    add_all<T, 2>(messages, count, n, format.block, own, sums);
}

void add(const BlockPart* messages, std::size_t count, bool wide, std::size_t n, const BlockFormat& format,
         const void* own, void* sums) {
  if (wide)
    add_type(messages, count, n, format, static_cast<const double*>(own), static_cast<double*>(sums));
  else
    add_type(messages, count, n, format, static_cast<const float*>(own), static_cast<float*>(sums));
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {quantize, dequantize, add};

}  // namespace hybridcomp::HC_ISA
