// Block quantization; compiled once per instruction set. The loops are plain so that the compiler vectorizes
// them for each instruction set; blocks of 128 get a copy with a constant length, which decodes up to a
// quarter faster.
#include "block.hpp"
#include "tile.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kUsualBlock = 128;

template <typename T, std::size_t N>
typename Real<T>::Bits peak_of(const T* x, std::size_t m) {
  using Signed = typename Real<T>::Signed;  // magnitudes are positive; signed maxima are cheaper on old CPUs
  const std::size_t n = N ? N : m;
  Signed peak = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Signed a = static_cast<Signed>(magnitude(x[i]));
    peak = a > peak ? a : peak;
  }
  return static_cast<typename Real<T>::Bits>(peak);
}

template <typename T, std::size_t N>
void quantize8(const T* __restrict x, std::size_t m, T inverse, std::uint8_t* __restrict q) {
  const std::size_t n = N ? N : m;
  for (std::size_t i = 0; i < n; ++i) q[i] = static_cast<std::uint8_t>(quantized(x[i], inverse));
}

// `low` and `high` hold the values of the low and the high nibbles of m bytes.
template <typename T, std::size_t N>
void quantize4(const T* __restrict low, const T* __restrict high, std::size_t m, T inverse,
               std::uint8_t* __restrict q) {
  const std::size_t n = N ? N : m;
  for (std::size_t i = 0; i < n; ++i)
    q[i] = pack_nibbles(static_cast<std::int32_t>(quantized(low[i], inverse)),
                        static_cast<std::int32_t>(quantized(high[i], inverse)));
}

template <int Bits>
constexpr int limit_of() {
  return Bits == 8 ? 127 : 7;
}

// Quantize values of a block that is already in its computing type.
template <typename T, int Bits, std::size_t N>
void quantize_values(const T* x, std::size_t m, T inverse, std::uint8_t* q) {
  if constexpr (Bits == 8) {
    quantize8<T, N>(x, m, inverse, q);
  } else {
    const std::size_t half = (m + 1) / 2;
    quantize4<T, N / 2>(x, x + half, m / 2, inverse, q);
    if (m % 2) q[half - 1] = pack_nibbles(static_cast<std::int32_t>(quantized(x[half - 1], inverse)), 0);
  }
}

// A block longer than a tile, tile by tile.
template <DTypeCode D, int Bits>
void quantize_long(const std::uint8_t* src, std::size_t m, ComputeOf<D> inverse, std::uint8_t* q) {
  using T = ComputeOf<D>;
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  alignas(64) T low[kTile];
  alignas(64) T high[kTile];
  if constexpr (Bits == 8) {
    for (std::size_t at = 0; at < m; at += kTile) {
      const std::size_t len = smaller(kTile, m - at);
      quantize8<T, 0>(view<D>(src + at * kSize, len, low), len, inverse, q + at);
    }
  } else {
    const std::size_t half = (m + 1) / 2;
    for (std::size_t at = 0; at < m / 2; at += kTile) {
      const std::size_t len = smaller(kTile, m / 2 - at);
      quantize4<T, 0>(view<D>(src + at * kSize, len, low), view<D>(src + (half + at) * kSize, len, high), len,
                      inverse, q + at);
    }
    if (m % 2) {
      const T last = *view<D>(src + (half - 1) * kSize, 1, low);
      q[half - 1] = pack_nibbles(static_cast<std::int32_t>(quantized(last, inverse)), 0);
    }
  }
}

// Quantize m <= kTile values: whole blocks, the last of which may be short. All peaks first, then all scales,
// then all integers: one block after another would wait for each block's maximum and divisions in turn.
template <typename T, int Bits>
void quantize_tile(const T* x, std::size_t m, std::size_t block, std::uint8_t* scales, std::uint8_t* q) {
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
    const std::size_t bytes = Bits == 8 ? len : (len + 1) / 2;
    if (inverse[b] == T(0))  // zero or not finite
      std::memset(q, 0, bytes);
    else if (len == kUsualBlock)
      quantize_values<T, Bits, kUsualBlock>(x + b * block, len, inverse[b], q);
    else
      quantize_values<T, Bits, 0>(x + b * block, len, inverse[b], q);
    q += bytes;
  }
}

template <DTypeCode D, int Bits>
void quantize_all(const std::uint8_t* src, std::size_t n, std::size_t block, std::uint8_t* scales,
                  std::uint8_t* q) {
  using T = ComputeOf<D>;
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  alignas(64) T buffer[kTile];
  const std::size_t step = block <= kTile ? kTile / block * block : block;
  for (std::size_t at = 0; at < n; at += step) {
    const std::size_t m = smaller(step, n - at);
    if (m <= kTile) {
      quantize_tile<T, Bits>(view<D>(src + at * kSize, m, buffer), m, block, scales, q);
    } else {
      typename Real<T>::Bits peak = 0;
      for (std::size_t i = 0; i < m; i += kTile) {
        const std::size_t len = smaller(kTile, m - i);
        const auto p = peak_of<T, 0>(view<D>(src + (at + i) * kSize, len, buffer), len);
        peak = p > peak ? p : peak;
      }
      const BlockScale<T> scale = block_scale<T>(peak, T(limit_of<Bits>()));
      std::memcpy(scales, &scale.stored, sizeof(T));
      if (scale.inverse == T(0))
        std::memset(q, 0, Bits == 8 ? m : (m + 1) / 2);
      else
        quantize_long<D, Bits>(src + at * kSize, m, scale.inverse, q);
    }
    scales += blocks_of(m, block) * sizeof(T);
    q += Bits == 8 ? m : m / block * (block / 2) + (m % block + 1) / 2;
  }
}

void quantize(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, int bits,
              std::uint8_t* scales, std::uint8_t* packed) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  with_dtype(dtype, [&]<DTypeCode D>() {
    if (bits == 8)
      quantize_all<D, 8>(from, n, block, scales, packed);
    else
      quantize_all<D, 4>(from, n, block, scales, packed);
  });
}

template <typename T, bool Add>
void put(T* out, T value) {
  if constexpr (Add)
    *out += value;
  else
    *out = value;
}

// Values first .. first + len of a block of m into `out`.
template <typename T, int Bits, std::size_t N, bool Add>
void dequantize_values(const std::uint8_t* __restrict q, std::size_t m, T scale, std::size_t first,
                       std::size_t len, T* __restrict out) {
  if constexpr (Bits == 8) {
    const std::size_t n = N ? N : len;
    for (std::size_t i = 0; i < n; ++i)
      put<T, Add>(out + i, static_cast<T>(static_cast<std::int8_t>(q[first + i])) * scale);
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
    if (m == kUsualBlock)
      dequantize_values<T, Bits, kUsualBlock, Add>(q, m, scale, 0, m, out + at);
    else
      dequantize_values<T, Bits, 0, Add>(q, m, scale, 0, m, out + at);
    q += Bits == 8 ? m : (m + 1) / 2;
  }
}

// Into another type than the message's own, or unaligned memory: through a buffer, tile by tile.
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
    q += Bits == 8 ? m : (m + 1) / 2;
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

void dequantize(const std::uint8_t* scales, const std::uint8_t* packed, bool wide, std::size_t n,
                std::uint32_t block, int bits, void* out, DTypeCode out_dtype, bool add) {
  if (wide && bits == 8)
    dequantize_all<double, 8>(scales, packed, n, block, out, out_dtype, add);
  else if (wide)
    dequantize_all<double, 4>(scales, packed, n, block, out, out_dtype, add);
  else if (bits == 8)
    dequantize_all<float, 8>(scales, packed, n, block, out, out_dtype, add);
  else
    dequantize_all<float, 4>(scales, packed, n, block, out, out_dtype, add);
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {quantize, dequantize};

}  // namespace hybridcomp::HC_ISA
