// The shared-scale quantizer; compiled once per instruction set.
#include "hybridcomp/lattice.hpp"

#include "codecs/common/tile.hpp"
#include "codecs/lattice/lattice.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <int Bits>
struct Integer;
template <>
struct Integer<8> {
  using Type = std::int8_t;
};
template <>
struct Integer<16> {
  using Type = std::int16_t;
};
template <>
struct Integer<32> {
  using Type = std::int32_t;
};

// Calls f.template operator()<Bits>().
template <typename F>
void with_bits(int bits, F f) {
  if (bits == 8)
    f.template operator()<8>();
  else if (bits == 16)
    f.template operator()<16>();
  else
    f.template operator()<32>();
}

template <typename T>
typename Real<T>::Bits peak_of(const T* x, std::size_t n) {
  using Signed = typename Real<T>::Signed;  // magnitudes are positive; signed maxima are cheaper on old CPUs
  Signed peak = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const Signed a = static_cast<Signed>(magnitude(x[i]));
    peak = a > peak ? a : peak;
  }
  return static_cast<typename Real<T>::Bits>(peak);
}

constexpr std::size_t kStretch = std::size_t(1) << 20;

std::uint64_t peak(const void* src, DTypeCode dtype, std::size_t n) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  std::uint64_t most = 0;
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    // Long stretches are read from the last to the first, so that the caches then hold the data where
    // quantizing begins; each is read forward, as the hardware prefetches.
    for (std::size_t end = n; end > 0;) {
      const std::size_t begin = end > kStretch ? end - kStretch : 0;
      for (std::size_t at = begin; at < end; at += kTile) {
        const std::size_t m = smaller(kTile, end - at);
        const std::uint64_t p = peak_of<T>(view<D>(from + at * sizeof(StorageOf<D>), m, buffer), m);
        most = p > most ? p : most;
      }
      end = begin;
    }
  });
  return most;
}

template <typename C, typename T, typename Q>
void round_nearest(const T* __restrict x, std::size_t m, C inverse, Q* __restrict q) {
  for (std::size_t i = 0; i < m; ++i)
    q[i] = static_cast<Q>(lattice_nearest<C>(static_cast<C>(x[i]), inverse));
}

template <typename C, typename T, typename Q>
void round_randomly(const T* __restrict x, std::size_t m, C inverse, std::int32_t limit, std::uint64_t seed,
                    std::uint64_t first, Q* __restrict q) {
  // The high half of the index is the same for all but the tile that crosses a border of 2^32 elements.
  const RandomKey key = random_key(seed, static_cast<std::uint32_t>(first >> 32));
  const RandomKey next = random_key(seed, static_cast<std::uint32_t>(first >> 32) + 1);
  const std::uint32_t low = static_cast<std::uint32_t>(first);
  const std::uint64_t until = (std::uint64_t(1) << 32) - low;  // elements before the border
  const std::size_t here = until < m ? static_cast<std::size_t>(until) : m;
  for (std::size_t i = 0; i < here; ++i)
    q[i] = static_cast<Q>(lattice_stochastic<C>(static_cast<C>(x[i]), inverse, limit,
                                                random_bits(key, low + static_cast<std::uint32_t>(i))));
  for (std::size_t i = here; i < m; ++i)
    q[i] = static_cast<Q>(lattice_stochastic<C>(static_cast<C>(x[i]), inverse, limit,
                                                random_bits(next, low + static_cast<std::uint32_t>(i))));
}

void quantize(const void* src, DTypeCode dtype, std::size_t n, int bits, const LatticeRounding& rounding,
              std::uint64_t first, std::uint8_t* out) {
  if (rounding.inverse == 0) {  // zero or not finite
    if (n) std::memset(out, 0, n * static_cast<std::size_t>(bits / 8));
    return;
  }
  const auto* from = static_cast<const std::uint8_t*>(src);
  with_dtype(dtype, [&]<DTypeCode D>() {
    with_bits(bits, [&]<int Bits>() {
      using T = ComputeOf<D>;
      using C = typename LatticeCompute<T, Bits>::Type;
      using Q = typename Integer<Bits>::Type;
      alignas(64) T buffer[kTile];
      alignas(64) Q integers[kTile];
      const C inverse = static_cast<C>(rounding.inverse);
      const bool direct = aligned<Q>(out);
      for (std::size_t at = 0; at < n; at += kTile) {
        const std::size_t m = smaller(kTile, n - at);
        const T* x = view<D>(from + at * sizeof(StorageOf<D>), m, buffer);
        Q* q = direct ? reinterpret_cast<Q*>(out) + at : integers;
        if (rounding.stochastic)
          round_randomly<C>(x, m, inverse, rounding.limit, rounding.seed, first + at, q);
        else
          round_nearest<C>(x, m, inverse, q);
        if (!direct) std::memcpy(out + at * sizeof(Q), integers, m * sizeof(Q));
      }
    });
  });
}

template <typename T, int Bits, bool Add>
void values(const typename Integer<Bits>::Type* __restrict q, std::size_t m,
            typename LatticeCompute<T, Bits>::Type scale, T* __restrict out) {
  for (std::size_t i = 0; i < m; ++i) {
    const T value = lattice_value<T, Bits>(q[i], scale);
    out[i] = Add ? quieted(out[i] + value) : value;
  }
}

template <typename T, int Bits>
void dequantize_all(const std::uint8_t* from, std::size_t n, double wide_scale, void* out,
                    DTypeCode out_dtype, bool add) {
  using Q = typename Integer<Bits>::Type;
  using C = typename LatticeCompute<T, Bits>::Type;
  constexpr DTypeCode kOwn = sizeof(T) == 8 ? kFloat64 : kFloat32;
  const C scale = static_cast<C>(wide_scale);
  alignas(64) T buffer[kTile];
  alignas(64) Q integers[kTile];
  const bool direct = out_dtype == kOwn && aligned<T>(out);
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    const Q* q = reinterpret_cast<const Q*>(from) + at;
    if (!aligned<Q>(from)) {
      std::memcpy(integers, from + at * sizeof(Q), m * sizeof(Q));
      q = integers;
    }
    if (direct && add) {
      values<T, Bits, true>(q, m, scale, static_cast<T*>(out) + at);
    } else if (direct) {
      values<T, Bits, false>(q, m, scale, static_cast<T*>(out) + at);
    } else {
      values<T, Bits, false>(q, m, scale, buffer);
      with_dtype(out_dtype, [&]<DTypeCode D>() {
        std::uint8_t* to = static_cast<std::uint8_t*>(out) + at * sizeof(StorageOf<D>);
        if constexpr (D == kFloat32 || D == kFloat64) {
          if (add) return store_add<D>(buffer, to, m);
        }
        store<D>(buffer, to, m);
      });
    }
  }
}

void dequantize(const std::uint8_t* q, DTypeCode dtype, std::size_t n, int bits, double scale, void* out,
                DTypeCode out_dtype, bool add) {
  with_bits(bits, [&]<int Bits>() {
    if (dtype == kFloat64)
      dequantize_all<double, Bits>(q, n, scale, out, out_dtype, add);
    else
      dequantize_all<float, Bits>(q, n, scale, out, out_dtype, add);
  });
}

}  // namespace

extern const LatticeKernels lattice_kernels;
const LatticeKernels lattice_kernels = {peak, quantize, dequantize};

}  // namespace hybridcomp::HC_ISA
