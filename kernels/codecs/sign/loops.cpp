// The sign quantizer; compiled once per instruction set.
#include "hybridcomp/sign.hpp"

#include "codecs/common/tile.hpp"
#include "codecs/sign/sign.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kLanes = kSignLanes;

// Return the signs of sixteen values, the first in bit 0.
inline std::uint32_t signs_of(const float* x) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(x)));
#elif defined(__AVX2__)
  return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(x))) |
         static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_loadu_ps(x + 8))) << 8;
#else
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < kLanes; ++i) bits |= (bits_of(x[i]) >> 31) << i;
  return bits;
#endif
}
inline std::uint32_t signs_of(const double* x) {
  std::uint32_t bits = 0;
#if defined(__AVX2__)
  for (std::size_t i = 0; i < kLanes; i += 4)
    bits |= static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_loadu_pd(x + i))) << i;
#else
  for (std::size_t i = 0; i < kLanes; ++i) bits |= static_cast<std::uint32_t>(bits_of(x[i]) >> 63) << i;
#endif
  return bits;
}

// Write or add `mean` with the signs in `bits` to sixteen values.
template <bool Add>
void spread(std::uint32_t bits, float mean, float* out) {
#if defined(__AVX512F__)
  const __m512i m = _mm512_castps_si512(_mm512_set1_ps(mean));
  const __m512 v = _mm512_castsi512_ps(_mm512_mask_xor_epi32(
      m, static_cast<__mmask16>(bits), m, _mm512_set1_epi32(static_cast<int>(0x80000000u))));
  _mm512_storeu_ps(out, Add ? quieted(_mm512_add_ps(_mm512_loadu_ps(out), v)) : v);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  for (int half = 0; half < 2; ++half, bits >>= 8, out += 8) {
    const __m256i set =
        _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
    const __m256 v = _mm256_xor_ps(
        _mm256_set1_ps(mean),
        _mm256_castsi256_ps(_mm256_and_si256(set, _mm256_set1_epi32(static_cast<int>(0x80000000u)))));
    _mm256_storeu_ps(out, Add ? quieted(_mm256_add_ps(_mm256_loadu_ps(out), v)) : v);
  }
#else
  for (std::size_t i = 0; i < kLanes; ++i) {
    const float v = float_of(bits_of(mean) ^ ((bits >> i & 1u) << 31));
    out[i] = Add ? quieted(out[i] + v) : v;
  }
#endif
}
template <bool Add>
void spread(std::uint32_t bits, double mean, double* out) {
  for (std::size_t i = 0; i < kLanes; ++i) {
    const double v = float_of(bits_of(mean) ^ (static_cast<std::uint64_t>(bits >> i & 1u) << 63));
    out[i] = Add ? quieted(out[i] + v) : v;
  }
}

// GCC's vectors of one register, since it lowers longer ones badly, to memory.
#if defined(__AVX512F__)
constexpr std::size_t kRegister = 64;
#elif defined(__AVX2__)
constexpr std::size_t kRegister = 32;
#else
constexpr std::size_t kRegister = 16;
#endif
template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float Type __attribute__((vector_size(kRegister)));
  typedef std::int32_t Bits __attribute__((vector_size(kRegister)));
};
template <>
struct Vector<double> {
  typedef double Type __attribute__((vector_size(kRegister)));
  typedef std::int64_t Bits __attribute__((vector_size(kRegister)));
};

// The sixteen sums of a block.
template <typename T>
struct Sums {
  static constexpr std::size_t kRegisters = kLanes * sizeof(T) / kRegister;
  typename Vector<T>::Type part[kRegisters];
};

// sums[j] += sign_term(x[j])
template <typename T>
inline void add_terms(const T* x, Sums<T>& sums) {
  for (std::size_t r = 0; r < Sums<T>::kRegisters; ++r) {
    typename Vector<T>::Bits a;
    std::memcpy(&a, x + r * (kRegister / sizeof(T)), sizeof(a));
    a &= static_cast<typename Real<T>::Signed>(Real<T>::kMagnitude);
    a &= a >= static_cast<typename Real<T>::Signed>(Real<T>::kSmallest);
    sums.part[r] += reinterpret_cast<typename Vector<T>::Type>(a) * T(0x1p-17);
  }
}

// Add the terms of m values to the lanes and write their signs; m is a multiple of 16 unless the block ends.
template <typename T>
void encode_part(const T* x, std::size_t m, Sums<T>& lanes, std::uint8_t* bits) {
  Sums<T> sums = lanes;
  std::size_t i = 0;
  for (; i + kLanes <= m; i += kLanes) {
    prefetch_ahead(x + i);
    add_terms(x + i, sums);
    const std::uint16_t word = static_cast<std::uint16_t>(signs_of(x + i));
    std::memcpy(bits + i / 8, &word, 2);
  }
  if (i < m) {
    T rest[kLanes] = {};
    std::memcpy(rest, x + i, (m - i) * sizeof(T));
    add_terms(rest, sums);
    const std::uint16_t word = static_cast<std::uint16_t>(signs_of(rest));
    std::memcpy(bits + i / 8, &word, (m - i + 7) / 8);
  }
  lanes = sums;
}

template <DTypeCode D>
void encode_all(const std::uint8_t* src, std::size_t n, std::size_t block, std::uint8_t* means,
                std::uint8_t* bits) {
  using T = ComputeOf<D>;
  alignas(64) T buffer[kTile];
  for (std::size_t at = 0; at < n; at += block, means += sizeof(T)) {
    const std::size_t m = smaller(block, n - at);
    Sums<T> sums = {};
    for (std::size_t i = 0; i < m; i += kTile) {
      const std::size_t len = smaller(kTile, m - i);
      encode_part(view<D>(src + (at + i) * sizeof(StorageOf<D>), len, buffer), len, sums, bits + i / 8);
    }
    T lanes[kLanes];
    std::memcpy(lanes, &sums, sizeof(lanes));
    for (std::size_t width = kLanes / 2; width; width /= 2)
      for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
    const T mean = sign_mean(lanes[0], static_cast<std::uint32_t>(m));
    std::memcpy(means, &mean, sizeof(T));
    bits += (m + 7) / 8;
  }
}

void encode(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, std::uint8_t* means,
            std::uint8_t* bits) {
  with_dtype(dtype, [&]<DTypeCode D>() {
    encode_all<D>(static_cast<const std::uint8_t*>(src), n, block, means, bits);
  });
}

template <typename T, bool Add>
void decode_part(const std::uint8_t* bits, T mean, std::size_t m, T* out) {
  std::size_t i = 0;
  for (; i + kLanes <= m; i += kLanes) {
    std::uint16_t word;
    std::memcpy(&word, bits + i / 8, 2);
    if constexpr (Add) prefetch_ahead(out + i);
    spread<Add>(word, mean, out + i);
  }
  if (i < m) {
    std::uint16_t word = 0;
    std::memcpy(&word, bits + i / 8, (m - i + 7) / 8);
    T rest[kLanes] = {};
    std::memcpy(rest, out + i, (m - i) * sizeof(T));
    spread<Add>(word, mean, rest);
    std::memcpy(out + i, rest, (m - i) * sizeof(T));
  }
}

template <typename T>
void decode_all(const std::uint8_t* means, const std::uint8_t* bits, std::size_t n, std::size_t block,
                std::uint8_t* out, DTypeCode out_dtype, bool add) {
  constexpr DTypeCode kOwn = sizeof(T) == 8 ? kFloat64 : kFloat32;
  const bool direct = out_dtype == kOwn && aligned<T>(out);
  alignas(64) T buffer[kTile];
  for (std::size_t at = 0; at < n; at += block, means += sizeof(T)) {
    const std::size_t m = smaller(block, n - at);
    T mean;
    std::memcpy(&mean, means, sizeof(T));
    if (direct) {
      T* to = reinterpret_cast<T*>(out) + at;
      if (add)
        decode_part<T, true>(bits, mean, m, to);
      else
        decode_part<T, false>(bits, mean, m, to);
    } else {
      for (std::size_t i = 0; i < m; i += kTile) {
        const std::size_t len = smaller(kTile, m - i);
        decode_part<T, false>(bits + i / 8, mean, len, buffer);
        put_tile(buffer, len, out, at + i, out_dtype, add);
      }
    }
    bits += (m + 7) / 8;
  }
}

void decode(const std::uint8_t* means, const std::uint8_t* bits, bool wide, std::size_t n,
            std::uint32_t block, void* out, DTypeCode out_dtype, bool add) {
  auto* to = static_cast<std::uint8_t*>(out);
  if (wide)
    decode_all<double>(means, bits, n, block, to, out_dtype, add);
  else
    decode_all<float>(means, bits, n, block, to, out_dtype, add);
}

}  // namespace

extern const SignKernels sign_kernels;
const SignKernels sign_kernels = {encode, decode};

}  // namespace hybridcomp::HC_ISA
