// The passes of error feedback; compiled once per instruction set.
#include "codecs/feedback/tile.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <typename T>
bool add_tile(const T* x, const T* e, T* out, std::size_t n, bool subtract) {
  typename Real<T>::Signed peak = 0;
  if (subtract) {
    HC_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) peak = larger<T>(peak, out[i] = x[i] - e[i]);
  } else {
    HC_INDEPENDENT
    for (std::size_t i = 0; i < n; ++i) peak = larger<T>(peak, out[i] = x[i] + e[i]);
  }
  return is_finite<T>(peak);
}

void blend(const Source& x, void* out, std::size_t n) {
  with_dtype(x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    for (std::size_t at = 0; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      T* const to = static_cast<T*>(out) + at;
      const T* values = values_of<D>(x, at, m, to);
      if (values != to) std::memcpy(to, values, m * sizeof(T));
    }
  });
}

bool add(const Source& x, const void* e, void* out, std::size_t n, bool subtract) {
  bool finite = true;
  with_dtype(x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    for (std::size_t at = 0; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      const T* values = values_of<D>(x, at, m, buffer);
      finite &= add_tile<T>(values, static_cast<const T*>(e) + at, static_cast<T*>(out) + at, m, subtract);
    }
  });
  return finite;
}

template <typename T>
bool modest_tile(const T* x, const T* e, std::size_t n) {
  typename Real<T>::Signed peak = 0;
  HC_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) peak = larger<T>(peak, x[i] + e[i]);
  return is_modest<T>(peak);
}

bool modest(const Source& x, const void* e, std::size_t n) {
  bool all = true;
  with_dtype(x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    for (std::size_t at = 0; at < n && all; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      const T* values = values_of<D>(x, at, m, buffer);
      all = modest_tile<T>(values, static_cast<const T*>(e) + at, m);
    }
  });
  return all;
}

template <typename T>
void divide_all(T* x, std::size_t n, T by) {
  for (std::size_t i = 0; i < n; ++i) x[i] /= by;
}

void divide(void* x, bool wide, std::size_t n, double by) {
  if (wide)
    divide_all(static_cast<double*>(x), n, by);
  else
    divide_all(static_cast<float*>(x), n, static_cast<float>(by));
}

template <typename T>
bool lose_all(const T* corrected, const T* decoded, T* out, std::size_t n, T weight) {
  typename Real<T>::Signed peak = 0;
  HC_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i)
    peak = larger<T>(peak, out[i] = lost_of(corrected[i], decoded[i], weight));
  return is_finite<T>(peak);
}

bool lose(const void* corrected, const void* decoded, void* out, bool wide, std::size_t n, double weight) {
  if (wide)
    return lose_all(static_cast<const double*>(corrected), static_cast<const double*>(decoded),
                    static_cast<double*>(out), n, weight);
  return lose_all(static_cast<const float*>(corrected), static_cast<const float*>(decoded),
                  static_cast<float*>(out), n, static_cast<float>(weight));
}

template <typename T>
bool average_all(const T* corrected, const T* decoded, T* e, std::size_t n, T weight, T beta, T rest) {
  typename Real<T>::Signed peak = 0;
  HC_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i)
    peak = larger<T>(peak, e[i] = averaged(e[i], lost_of(corrected[i], decoded[i], weight), beta, rest));
  return is_finite<T>(peak);
}

bool average(const void* corrected, const void* decoded, void* e, bool wide, std::size_t n, double weight,
             double beta) {
  if (wide)
    return average_all(static_cast<const double*>(corrected), static_cast<const double*>(decoded),
                       static_cast<double*>(e), n, weight, beta, 1 - beta);
  return average_all(static_cast<const float*>(corrected), static_cast<const float*>(decoded),
                     static_cast<float*>(e), n, static_cast<float>(weight), static_cast<float>(beta),
                     static_cast<float>(1 - beta));
}

void move(const void* x, DTypeCode dtype, const void* velocity, const void* sum, void* moved_out, void* out,
          std::size_t n, double momentum) {
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    const auto* from = static_cast<const std::uint8_t*>(x);
    const T factor = static_cast<T>(momentum);
    for (std::size_t at = 0; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      const T* values = view<D>(from + at * sizeof(StorageOf<D>), m, buffer);
      const T* u = static_cast<const T*>(velocity) + at;
      const T* v = static_cast<const T*>(sum) + at;
      T* to = static_cast<T*>(moved_out) + at;
      T* corrected = static_cast<T*>(out) + at;
      HC_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) {
        const T next = moved(u[i], values[i], factor);
        to[i] = next;
        corrected[i] = v[i] + next;
      }
    }
  });
}

bool accelerate(const void* x, DTypeCode dtype, const void* velocity, void* moved_out, void* out,
                std::size_t n, double momentum) {
  bool finite = true;
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    const auto* from = static_cast<const std::uint8_t*>(x);
    const T factor = static_cast<T>(momentum);
    typename Real<T>::Signed peak = 0;
    for (std::size_t at = 0; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      const T* values = view<D>(from + at * sizeof(StorageOf<D>), m, buffer);
      const T* u = static_cast<const T*>(velocity) + at;
      T* to = static_cast<T*>(moved_out) + at;
      T* steps = static_cast<T*>(out) + at;
      HC_INDEPENDENT
      for (std::size_t i = 0; i < m; ++i) {
        const T value = values[i], next = moved(u[i], value, factor);
        to[i] = next;
        peak = larger<T>(peak, steps[i] = ahead(next, value, factor));
      }
    }
    finite = is_finite<T>(peak);
  });
  return finite;
}

template <typename T>
bool mask_all(const T* corrected, T* decoded, T* moved_out, std::size_t n) {
  typename Real<T>::Signed peak = 0;
  HC_INDEPENDENT
  for (std::size_t i = 0; i < n; ++i) {
    const T sent = decoded[i];
    const T kept = sent == T(0) ? moved_out[i] : T(0);
    const T lost = corrected[i] - sent;
    moved_out[i] = kept;
    decoded[i] = lost;
    peak = larger<T>(larger<T>(peak, kept), lost);
  }
  return is_finite<T>(peak);
}

bool mask(const void* corrected, void* decoded, void* moved_out, bool wide, std::size_t n) {
  if (wide)
    return mask_all(static_cast<const double*>(corrected), static_cast<double*>(decoded),
                    static_cast<double*>(moved_out), n);
  return mask_all(static_cast<const float*>(corrected), static_cast<float*>(decoded),
                  static_cast<float*>(moved_out), n);
}

// Compute c = x + e; returns the largest magnitude.
template <typename T, std::size_t N>
typename Real<T>::Bits add_peak(const T* __restrict x, const T* __restrict e, T* __restrict c,
                                std::size_t m) {
  const std::size_t n = N ? N : m;
  typename Real<T>::Signed peak = 0;
  for (std::size_t i = 0; i < n; ++i) peak = larger<T>(peak, c[i] = x[i] + e[i]);
  return static_cast<typename Real<T>::Bits>(peak);
}

// Quantize c to q and write the error; returns the error's largest magnitude.
template <typename T, std::size_t N>
typename Real<T>::Signed quantize_lost(const T* __restrict c, std::size_t m, BlockScale<T> scale,
                                       std::uint8_t* __restrict q, T* __restrict lost) {
  const std::size_t n = N ? N : m;
  typename Real<T>::Signed peak = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto k = static_cast<std::int8_t>(quantized(c[i], scale.inverse));
    q[i] = static_cast<std::uint8_t>(k);
    peak = larger<T>(peak, lost[i] = c[i] - static_cast<T>(k) * scale.stored);
  }
  return peak;
}

// The same for a block whose integers are all zero: it is tiny, or not finite, as its scale tells.
template <typename T>
typename Real<T>::Signed zeros_lost(const T* c, std::size_t m, BlockScale<T> scale, std::uint8_t* q,
                                    T* lost) {
  typename Real<T>::Signed peak = 0;
  for (std::size_t i = 0; i < m; ++i) {
    q[i] = 0;
    peak = larger<T>(peak, lost[i] = c[i] - T(0) * scale.stored);
  }
  return peak;
}

bool quantize8(const Source& x, const void* e, void* lost, std::size_t n, std::uint32_t block,
               std::uint8_t* scales, std::uint8_t* q, bool streams) {
  constexpr std::size_t kUsual = 128;
  bool finite = true;
  with_dtype(x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile], c[kLongestTile], out[kLongestTile];
    BlockScale<T> scale[kLongestTile / kMinBlock];
    typename Real<T>::Bits peaks[kLongestTile / kMinBlock];
    typename Real<T>::Signed largest = 0;
    const std::size_t tile = fused_tile(block);
    for (std::size_t at = 0; at < n; at += tile) {
      const std::size_t m = smaller(tile, n - at), blocks = blocks_of(m, block);
      const T* values = values_of<D>(x, at, m, buffer);
      const T* error = static_cast<const T*>(e) + at;
      for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t i = b * block, len = smaller(block, m - i);
        peaks[b] = len == kUsual ? add_peak<T, kUsual>(values + i, error + i, c + i, len)
                                 : add_peak<T, 0>(values + i, error + i, c + i, len);
      }
      for (std::size_t b = 0; b < blocks; ++b) {
        scale[b] = block_scale<T>(peaks[b], T(127));
        std::memcpy(scales + b * sizeof(T), &scale[b].stored, sizeof(T));
      }
      T* const to = streams ? out : static_cast<T*>(lost) + at;
      for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t i = b * block, len = smaller(block, m - i);
        const auto peak = scale[b].inverse == T(0) ? zeros_lost<T>(c + i, len, scale[b], q + i, to + i)
                          : len == kUsual ? quantize_lost<T, kUsual>(c + i, len, scale[b], q + i, to + i)
                                          : quantize_lost<T, 0>(c + i, len, scale[b], q + i, to + i);
        largest = peak > largest ? peak : largest;
      }
      if (streams) stream(out, static_cast<T*>(lost) + at, m * sizeof(T));
      scales += blocks * sizeof(T);
      q += m;
    }
    finite = is_finite<T>(largest);
  });
  return finite;
}

}  // namespace

extern const FeedbackKernels feedback_kernels;
const FeedbackKernels feedback_kernels = {blend, add,        modest, divide,    lose,  average,
                                          move,  accelerate, mask,   quantize8, stream};

}  // namespace hybridcomp::HC_ISA
