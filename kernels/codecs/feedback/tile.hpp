// Helpers of the loops that correct values by error feedback, tile by tile.
#pragma once

#include "codecs/common/tile.hpp"
#include "codecs/feedback/feedback.hpp"
#include "hybridcomp/feedback.hpp"

// No iteration reads a value that another writes: where an output is an input, it is so element by element.
#if defined(__clang__)
#define HC_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HC_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace hybridcomp::HC_ISA {
namespace {

// Whether a largest magnitude is a finite number's: signed maxima are cheaper on old CPUs.
template <typename T>
bool is_finite(typename Real<T>::Signed peak) {
  return static_cast<typename Real<T>::Bits>(peak) < Real<T>::kInfinity;
}

template <typename T>
typename Real<T>::Signed larger(typename Real<T>::Signed peak, T x) {
  const auto a = static_cast<typename Real<T>::Signed>(magnitude(x));
  return a > peak ? a : peak;
}

// Whether a message of values of this largest magnitude has a finite error.
template <typename T>
bool is_modest(typename Real<T>::Signed peak) {
  constexpr T kMost = sizeof(T) == 8 ? T(0x1p1021) : T(0x1p125);
  return static_cast<typename Real<T>::Bits>(peak) < magnitude(kMost);
}

// Return elements at .. at + m of a source in their computing type, m <= kTile: memory that can be used as it
// is, else `buffer`.
template <DTypeCode D>
const ComputeOf<D>* values_of(const Source& source, std::size_t at, std::size_t m, ComputeOf<D>* buffer) {
  using T = ComputeOf<D>;
  const T* const x = view<D>(source.x + at * sizeof(StorageOf<D>), m, buffer);
  if (!source.momentum) return x;
  const T* const momentum = reinterpret_cast<const T*>(source.momentum) + at;
  const T beta = static_cast<T>(source.beta), rest = static_cast<T>(1 - source.beta);
  HC_INDEPENDENT
  for (std::size_t i = 0; i < m; ++i) buffer[i] = averaged(momentum[i], x[i], beta, rest);
  return buffer;
}

inline void stream(const void* from, void* to, std::size_t bytes) {
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
}  // namespace hybridcomp::HC_ISA
