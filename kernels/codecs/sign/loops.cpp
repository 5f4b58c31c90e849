// The sign quantizer; compiled once per instruction set.
#include "hybridcomp/sign.hpp"

#include "codecs/feedback/tile.hpp"
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

// Write the mean of a block of m values; return it.
template <typename T>
T put_mean(const Sums<T>& sums, std::size_t m, std::uint8_t* means) {
  T lanes[kLanes];
  std::memcpy(lanes, &sums, sizeof(lanes));
  for (std::size_t width = kLanes / 2; width; width /= 2)
    for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  const T mean = sign_mean(lanes[0], static_cast<std::uint32_t>(m));
  std::memcpy(means, &mean, sizeof(T));
  return mean;
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
    put_mean(sums, m, means);
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

// -- with error feedback -----------------------------------------------------------------------------------

// Values of a tile, in their computing type; momentum is null where there is none.
template <typename T>
struct Tile {
  const T *x, *momentum, *e;
  T beta, rest, ranks;
};

// Return elements at .. at + m of a source, m <= kTile. x is read as it is, or converted to `buffer`.
template <DTypeCode D>
Tile<ComputeOf<D>> tile_of(const CorrectedSource& source, std::size_t at, std::size_t m,
                           ComputeOf<D>* buffer) {
  using T = ComputeOf<D>;
  const Source& from = source.x;
  const T* const momentum = reinterpret_cast<const T*>(from.momentum);
  return {view<D>(from.x + at * sizeof(StorageOf<D>), m, buffer),
          momentum ? momentum + at : nullptr,
          static_cast<const T*>(source.e) + at,
          static_cast<T>(from.beta),
          static_cast<T>(1 - from.beta),
          static_cast<T>(source.ranks)};
}

template <typename T>
typename Vector<T>::Type load(const T* x) {
  typename Vector<T>::Type v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

// Correct sixteen values from element i on, write them to c, and add their terms.
template <bool Blends, bool Divides, typename T>
inline void correct_lanes(const Tile<T> tile, std::size_t i, T* c, Sums<T>& sums,
                          typename Vector<T>::Bits& peak) {
  for (std::size_t r = 0; r < Sums<T>::kRegisters; ++r) {
    const std::size_t at = i + r * (kRegister / sizeof(T));
    typename Vector<T>::Type v = load(tile.x + at);
    if constexpr (Blends) v = tile.beta * load(tile.momentum + at) + tile.rest * v;
    v = v + load(tile.e + at);
    auto bits = reinterpret_cast<typename Vector<T>::Bits>(v);
    const auto whole = bits & static_cast<typename Real<T>::Signed>(Real<T>::kMagnitude);
    peak = whole > peak ? whole : peak;
    if constexpr (Divides) v = v / tile.ranks;
    std::memcpy(c + at, &v, sizeof(v));
  }
  add_terms(c + i, sums);
}

// Encode m corrected values, which are written to c; m is a multiple of 16 unless the block ends.
template <bool Blends, bool Divides, typename T>
void correct_part(const Tile<T> tile, std::size_t m, T* c, Sums<T>& lanes, std::uint8_t* bits,
                  typename Vector<T>::Bits& largest) {
  Sums<T> sums = lanes;
  auto peak = largest;
  std::size_t i = 0;
  for (; i + kLanes <= m; i += kLanes) {
    correct_lanes<Blends, Divides>(tile, i, c, sums, peak);
    const std::uint16_t word = static_cast<std::uint16_t>(signs_of(c + i));
    std::memcpy(bits + i / 8, &word, 2);
  }
  if (i < m) {
    T x[kLanes] = {}, e[kLanes] = {}, momentum[kLanes] = {}, rest[kLanes];
    const std::size_t bytes = (m - i) * sizeof(T);
    std::memcpy(x, tile.x + i, bytes);
    std::memcpy(e, tile.e + i, bytes);
    if constexpr (Blends) std::memcpy(momentum, tile.momentum + i, bytes);
    correct_lanes<Blends, Divides>(Tile<T>{x, momentum, e, tile.beta, tile.rest, tile.ranks}, 0, rest, sums,
                                   peak);
    std::memcpy(c + i, rest, bytes);
    const std::uint16_t word = static_cast<std::uint16_t>(signs_of(rest));
    std::memcpy(bits + i / 8, &word, (m - i + 7) / 8);
  }
  lanes = sums;
  largest = peak;
}

// The sums of a block's terms, and the largest magnitude of all blocks.
template <typename T>
struct Found {
  Sums<T> sums;
  typename Vector<T>::Bits peak = {};

  bool modest() const {
    typename Real<T>::Signed of[kRegister / sizeof(T)], most = 0;
    std::memcpy(of, &peak, sizeof(of));
    for (const auto one : of) most = one > most ? one : most;
    return is_modest<T>(most);
  }
};

// Encode elements at .. at + m of a source, m <= kTile, and write the corrected values to c.
template <DTypeCode D>
void correct_tile(const CorrectedSource& source, std::size_t at, std::size_t m, ComputeOf<D>* c,
                  Found<ComputeOf<D>>& found, std::uint8_t* bits) {
  using T = ComputeOf<D>;
  alignas(64) T buffer[kTile];
  const Tile<T> tile = tile_of<D>(source, at, m, buffer);
  const auto run = [&]<bool Blends, bool Divides>() {
    correct_part<Blends, Divides>(tile, m, c, found.sums, bits, found.peak);
  };
  if (tile.ranks == T(1))
    tile.momentum ? run.template operator()<true, false>() : run.template operator()<false, false>();
  else
    tile.momentum ? run.template operator()<true, true>() : run.template operator()<false, true>();
}

// Write past the caches, to memory that is aligned to a register.
template <typename V>
inline void stream_register(void* to, V v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(to), reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(to), reinterpret_cast<__m256i>(v));
#else
  std::memcpy(to, &v, sizeof(v));
#endif
}

// out = (c - decoded) * ranks; returns the largest magnitude. The decoded value has the sign of c.
template <bool Streams, typename T>
typename Real<T>::Signed lose_part(const T* c, T mean, T ranks, std::size_t m, T* out) {
  using Bits = typename Vector<T>::Bits;
  using Signed = typename Real<T>::Signed;
  constexpr std::size_t kMany = kRegister / sizeof(T);
  const auto positive = static_cast<Signed>(bits_of(mean));
  const auto sign = static_cast<Signed>(~Real<T>::kMagnitude),
             magnitudes = static_cast<Signed>(Real<T>::kMagnitude);
  Bits peaks = {};
  const auto lost = [&](typename Vector<T>::Type v) {
    const auto decoded = (reinterpret_cast<Bits>(v) & sign) ^ positive;
    v = (v - reinterpret_cast<typename Vector<T>::Type>(decoded)) * ranks;
    const auto whole = reinterpret_cast<Bits>(v) & magnitudes;
    peaks = whole > peaks ? whole : peaks;
    return v;
  };
  std::size_t i = 0;
  for (; i + kMany <= m; i += kMany) {
    const auto v = lost(load(c + i));
    if constexpr (Streams)
      stream_register(out + i, v);
    else
      std::memcpy(out + i, &v, sizeof(v));
  }
  if (i < m) {
    T rest[kMany];
    for (std::size_t j = 0; j < kMany; ++j) rest[j] = i + j < m ? c[i + j] : mean;  // which loses nothing
    const auto v = lost(load(rest));
    std::memcpy(out + i, &v, (m - i) * sizeof(T));
  }
  Signed of[kMany], most = 0;
  std::memcpy(of, &peaks, sizeof(of));
  for (const auto one : of) most = one > most ? one : most;
  return most;
}

bool correct(const CorrectedSource& source, std::size_t n, std::uint32_t block, void* corrected,
             std::uint8_t* means, std::uint8_t* bits) {
  bool modest = true;
  with_dtype(source.x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    Found<T> found;
    for (std::size_t at = 0; at < n; at += block, means += sizeof(T)) {
      const std::size_t m = smaller(block, n - at);
      found.sums = {};
      for (std::size_t i = 0; i < m; i += kTile)
        correct_tile<D>(source, at + i, smaller(kTile, m - i), static_cast<T*>(corrected) + at + i, found,
                        bits + i / 8);
      put_mean(found.sums, m, means);
      bits += (m + 7) / 8;
    }
    modest = found.modest();
  });
  return modest;
}

template <typename T>
bool lose_all(const T* corrected, const std::uint8_t* means, std::size_t n, std::size_t block, T ranks,
              T* lost) {
  typename Real<T>::Signed peak = 0;
  for (std::size_t at = 0; at < n; at += block, means += sizeof(T)) {
    T mean;
    std::memcpy(&mean, means, sizeof(T));
    const auto most = lose_part<false>(corrected + at, mean, ranks, smaller(block, n - at), lost + at);
    peak = most > peak ? most : peak;
  }
  return is_finite<T>(peak);
}

bool lose(const void* corrected, const std::uint8_t* means, bool wide, std::size_t n, std::uint32_t block,
          double ranks, void* lost) {
  if (wide)
    return lose_all(static_cast<const double*>(corrected), means, n, block, ranks,
                    static_cast<double*>(lost));
  return lose_all(static_cast<const float*>(corrected), means, n, block, static_cast<float>(ranks),
                  static_cast<float*>(lost));
}

// While a block is read and corrected, the error of the one before it is written: memory is read and written
// all the while.
template <DTypeCode D>
bool residual_of(const CorrectedSource& source, std::size_t n, std::size_t block, ComputeOf<D>* room,
                 ComputeOf<D>* lost, std::uint8_t* means, std::uint8_t* bits) {
  using T = ComputeOf<D>;
  const bool streams =
      block * sizeof(T) % kRegister == 0 && reinterpret_cast<std::uintptr_t>(lost) % kRegister == 0;
  typename Real<T>::Signed peak = 0;
  T mean = 0;
  std::size_t before = 0;  // elements of the block before
  Found<T> found;
  for (std::size_t at = 0; at < n || before; at += block) {
    const std::size_t m = at < n ? smaller(block, n - at) : 0, most = m > before ? m : before;
    T* const now = room + at / block % 2 * block;
    T* const last = room + (at / block + 1) % 2 * block;
    found.sums = {};
    for (std::size_t i = 0; i < most; i += kTile) {
      if (i < m) correct_tile<D>(source, at + i, smaller(kTile, m - i), now + i, found, bits + i / 8);
      if (i < before) {
        const std::size_t len = smaller(kTile, before - i);
        T* const to = lost + at - block + i;
        const T ranks = static_cast<T>(source.ranks);
        const auto largest = streams ? lose_part<true>(last + i, mean, ranks, len, to)
                                     : lose_part<false>(last + i, mean, ranks, len, to);
        peak = largest > peak ? largest : peak;
      }
    }
    if (m) {
      mean = put_mean(found.sums, m, means);
      means += sizeof(T);
      bits += (m + 7) / 8;
    }
    before = m;
  }
  return is_finite<T>(peak);
}

bool residual(const CorrectedSource& source, std::size_t n, std::uint32_t block, void* room, void* lost,
              std::uint8_t* means, std::uint8_t* bits) {
  bool finite = true;
  with_dtype(source.x.dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    finite = residual_of<D>(source, n, block, static_cast<T*>(room), static_cast<T*>(lost), means, bits);
  });
  return finite;
}

}  // namespace

extern const SignKernels sign_kernels;
const SignKernels sign_kernels = {encode, decode, correct, lose, residual};

}  // namespace hybridcomp::HC_ISA
