// The passes of error feedback; compiled once per instruction set.
#include "feedback.hpp"
#include "hybridcomp/feedback.hpp"
#include "tile.hpp"

// No iteration reads what another writes: where an output is an input, it is so element by element.
#if defined(__clang__)
#define HC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HC_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace hybridcomp::HC_ISA {
namespace {

// Whether the largest of some magnitudes is one of a number: signed maxima are cheaper on old CPUs.
template <typename T>
bool is_finite(typename Real<T>::Signed peak) {
  return static_cast<typename Real<T>::Bits>(peak) < Real<T>::kInfinity;
}

template <typename T>
typename Real<T>::Signed larger(typename Real<T>::Signed peak, T x) {
  const auto a = static_cast<typename Real<T>::Signed>(magnitude(x));
  return a > peak ? a : peak;
}

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

bool add(const void* x, DTypeCode dtype, const void* e, void* out, std::size_t n, bool subtract) {
  bool finite = true;
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    alignas(64) T buffer[kTile];
    const auto* from = static_cast<const std::uint8_t*>(x);
    for (std::size_t at = 0; at < n; at += kTile) {
      const std::size_t m = smaller(kTile, n - at);
      const T* values = view<D>(from + at * sizeof(StorageOf<D>), m, buffer);
      finite &= add_tile<T>(values, static_cast<const T*>(e) + at, static_cast<T*>(out) + at, m, subtract);
    }
  });
  return finite;
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

void stream(const void* from, void* to, std::size_t bytes) {
  const auto* src = static_cast<const std::uint8_t*>(from);
  auto* dst = static_cast<std::uint8_t*>(to);
#if defined(__AVX512F__)
  const std::size_t head = smaller(bytes, (64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
  std::memcpy(dst + i, src + i, bytes - i);
#elif defined(__AVX2__)
  const std::size_t head = smaller(bytes, (32 - reinterpret_cast<std::uintptr_t>(dst) % 32) % 32);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 32 <= bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
  std::memcpy(dst + i, src + i, bytes - i);
#else
  if (bytes) std::memcpy(dst, src, bytes);
#endif
}

}  // namespace

extern const FeedbackKernels feedback_kernels;
const FeedbackKernels feedback_kernels = {add, lose, average, move, mask, stream};

}  // namespace hybridcomp::HC_ISA
