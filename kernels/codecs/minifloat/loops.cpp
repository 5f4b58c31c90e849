// 8-bit and 4-bit floating-point formats; compiled once per instruction set. Loops over tiles of whole
// blocks; vector.hpp turns values into codes and back.
#include "codecs/minifloat/minifloat.hpp"

#include <type_traits>

#include "codecs/common/tile.hpp"
#include "codecs/minifloat/vector.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kUsualBlock = 128;

// Return m <= kTile elements as floats: the memory itself where it can be used as it is, else `buffer`.
template <DTypeCode D>
const float* floats(const std::uint8_t* src, std::size_t m, float* buffer) {
  if constexpr (D == kFloat64) {
    alignas(64) double copy[kTile];
    const double* x = view<D>(src, m, copy);
    for (std::size_t i = 0; i < m; ++i) buffer[i] = static_cast<float>(x[i]);
    return buffer;
  } else {
    return view<D>(src, m, buffer);
  }
}

// Length of the blocks whose loops have a constant length; other blocks take loops with a variable one.
template <bool Mx>
constexpr std::size_t kConstant = Mx ? kMxBlock : kUsualBlock;

// A scale as it is stored, and its inverse.
template <bool Mx>
using ScaleOf = std::conditional_t<Mx, MxScale, BlockScale<float>>;

template <MinifloatFormat F, bool Mx>
ScaleOf<Mx> scale_of(std::uint32_t peak) {
  if constexpr (Mx)
    return mx_scale<F>(peak);
  else
    return minifloat_scale<F>(peak);
}

template <bool Mx>
float read_scale(const std::uint8_t* from) {
  if constexpr (Mx) {
    return mx_scale_value(*from);
  } else {
    float scale;
    std::memcpy(&scale, from, sizeof(float));
    return scale;
  }
}

template <bool Mx>
constexpr std::size_t kScaleBytes = Mx ? 1 : 4;

template <MinifloatFormat F>
constexpr std::size_t bytes_of(std::size_t n) {
  return MinifloatKind{F, false}.code_bytes(n);
}

// Encode m <= kTile values: whole blocks, the last of which may be short. All peaks are found first, then all
// scales, then all codes: one block after another would wait for each block's maximum and division in turn.
template <MinifloatFormat F, bool Mx>
void encode_tile(const float* x, std::size_t m, std::size_t block, std::uint8_t* scales,
                 std::uint8_t* codes) {
  constexpr std::size_t N = kConstant<Mx>;
  std::uint32_t peaks[kTile / kMinBlock];
  float inverse[kTile / kMinBlock];
  decltype(ScaleOf<Mx>::stored) stored[kTile / kMinBlock];
  const std::size_t blocks = blocks_of(m, block);
  std::size_t b = 0;
  if constexpr (Mx) b = peaks_mx(x, m / N, peaks);
  for (; b < blocks; ++b) {
    const std::size_t len = smaller(block, m - b * block);
    if (len == N) prefetch_ahead(x + b * block, N * sizeof(float));
    peaks[b] = len == N ? peak_of<float, N>(x + b * block, len) : peak_of<float, 0>(x + b * block, len);
  }
  for (b = 0; b < blocks; ++b) {
    const ScaleOf<Mx> scale = scale_of<F, Mx>(peaks[b]);
    stored[b] = scale.stored;
    inverse[b] = scale.inverse;
  }
  std::memcpy(scales, stored, blocks * kScaleBytes<Mx>);
  b = 0;
  if constexpr (Mx) b = encode_mx<F>(x, inverse, m / N, codes);
  codes += bytes_of<F>(b * N);
  for (; b < blocks; ++b) {
    const std::size_t len = smaller(block, m - b * block);
    const std::size_t bytes = bytes_of<F>(len);
    if (inverse[b] == 0.0f)  // zero or not finite
      std::memset(codes, 0, bytes);
    else if (len == N)
      encode_values<F, Mx, N>(x + b * block, len, inverse[b], codes);
    else
      encode_values<F, Mx, 0>(x + b * block, len, inverse[b], codes);
    codes += bytes;
  }
}

// Encode a block longer than a tile.
template <MinifloatFormat F, bool Mx, DTypeCode D>
void encode_long(const std::uint8_t* src, std::size_t m, std::uint8_t* scale, std::uint8_t* codes) {
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  alignas(64) float buffer[kTile];
  std::uint32_t peak = 0;
  for (std::size_t at = 0; at < m; at += kTile) {
    const std::size_t len = smaller(kTile, m - at);
    const std::uint32_t p = peak_of<float, 0>(floats<D>(src + at * kSize, len, buffer), len);
    peak = p > peak ? p : peak;
  }
  const ScaleOf<Mx> both = scale_of<F, Mx>(peak);
  std::memcpy(scale, &both.stored, kScaleBytes<Mx>);
  if (both.inverse == 0.0f) {
    std::memset(codes, 0, bytes_of<F>(m));
    return;
  }
  for (std::size_t at = 0; at < m; at += kTile) {
    const std::size_t len = smaller(kTile, m - at);
    encode_values<F, Mx, 0>(floats<D>(src + at * kSize, len, buffer), len, both.inverse,
                            codes + bytes_of<F>(at));
  }
}

template <MinifloatFormat F, bool Mx, DTypeCode D>
void encode_all(const std::uint8_t* src, std::size_t n, std::size_t block, std::uint8_t* scales,
                std::uint8_t* codes) {
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  alignas(64) float buffer[kTile];
  const std::size_t step = block <= kTile ? kTile / block * block : block;
  for (std::size_t at = 0; at < n; at += step) {
    const std::size_t m = smaller(step, n - at);
    std::uint8_t* const to = scales + at / block * kScaleBytes<Mx>;
    if (m <= kTile)
      encode_tile<F, Mx>(floats<D>(src + at * kSize, m, buffer), m, block, to, codes + bytes_of<F>(at));
    else
      encode_long<F, Mx, D>(src + at * kSize, m, to, codes + bytes_of<F>(at));
  }
}

// Decode m values from the start of a block: whole blocks (the last may be short), or a part of one.
template <MinifloatFormat F, bool Mx, bool Add>
void decode_run(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t m, std::size_t block,
                float* out) {
  constexpr std::size_t N = kConstant<Mx>;
  for (std::size_t at = 0; at < m; at += block, scales += kScaleBytes<Mx>) {
    const std::size_t len = smaller(block, m - at);
    const float scale = read_scale<Mx>(scales);
    if (len == N) {
      if constexpr (Add) prefetch_ahead(out + at, N * sizeof(float));
      decode_values<F, N, Add>(codes + bytes_of<F>(at), len, scale, out + at);
    } else {
      decode_values<F, 0, Add>(codes + bytes_of<F>(at), len, scale, out + at);
    }
  }
}

// Decode to another type than float, or to unaligned memory: through a buffer, tile by tile.
template <MinifloatFormat F, bool Mx, DTypeCode D>
void decode_buffered(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::size_t block,
                     std::uint8_t* out, bool add) {
  alignas(64) float buffer[kTile];
  const std::size_t step = block <= kTile ? kTile / block * block : block;
  for (std::size_t at = 0; at < n; at += step) {
    const std::size_t m = smaller(step, n - at);
    for (std::size_t first = 0; first < m; first += kTile) {  // once, but in a block longer than a tile
      const std::size_t len = smaller(kTile, m - first);
      decode_run<F, Mx, false>(scales + at / block * kScaleBytes<Mx>, codes + bytes_of<F>(at + first), len,
                               block, buffer);
      std::uint8_t* to = out + (at + first) * sizeof(StorageOf<D>);
      if constexpr (D == kFloat32 || D == kFloat64) {
        if (add) {
          store_add<D>(buffer, to, len);
          continue;
        }
      }
      store<D>(buffer, to, len);
    }
  }
}

// Calls f.template operator()<F, Mx>() for a kind.
template <typename Function>
void with_kind(MinifloatKind kind, Function f) {
  switch (kind.format) {
    case kE4M3:
      return kind.mx ? f.template operator()<kE4M3, true>() : f.template operator()<kE4M3, false>();
    case kE5M2:
      return kind.mx ? f.template operator()<kE5M2, true>() : f.template operator()<kE5M2, false>();
    case kE2M1:
      return f.template operator()<kE2M1, true>();
  }
}

void encode(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, MinifloatKind kind,
            std::uint8_t* scales, std::uint8_t* codes) {
  with_kind(kind, [&]<MinifloatFormat F, bool Mx>() {
    with_dtype(dtype, [&]<DTypeCode D>() {
      encode_all<F, Mx, D>(static_cast<const std::uint8_t*>(src), n, block, scales, codes);
    });
  });
}

void decode(const std::uint8_t* scales, const std::uint8_t* codes, std::size_t n, std::uint32_t block,
            MinifloatKind kind, void* out, DTypeCode out_dtype, bool add) {
  with_kind(kind, [&]<MinifloatFormat F, bool Mx>() {
    if (out_dtype == kFloat32 && aligned<float>(out)) {
      if (add)
        decode_run<F, Mx, true>(scales, codes, n, block, static_cast<float*>(out));
      else
        decode_run<F, Mx, false>(scales, codes, n, block, static_cast<float*>(out));
      return;
    }
    with_dtype(out_dtype, [&]<DTypeCode D>() {
      decode_buffered<F, Mx, D>(scales, codes, n, block, static_cast<std::uint8_t*>(out), add);
    });
  });
}

}  // namespace

extern const MinifloatKernels minifloat_kernels;
const MinifloatKernels minifloat_kernels = {encode, decode};

}  // namespace hybridcomp::HC_ISA
