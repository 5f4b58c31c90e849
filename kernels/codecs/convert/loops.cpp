// Conversions between the four floating-point types; compiled once per instruction set.
#include "codecs/common/tile.hpp"
#include "codecs/convert/convert.hpp"

namespace hybridcomp::HC_ISA {
namespace {

// From this many bytes of output on, which no cache holds, stores go past the caches: they need not first
// read the memory that they overwrite.
constexpr std::size_t kStream = std::size_t(16) << 20;

// Copy bytes past the caches: the head and tail outside whole lines as usual.
void stream(const std::uint8_t* src, std::uint8_t* dst, std::size_t bytes) {
#if defined(__AVX512F__) || defined(__AVX2__)
  const std::size_t head = smaller((64 - reinterpret_cast<std::uintptr_t>(dst) % 64) % 64, bytes);
  std::memcpy(dst, src, head);
  std::size_t i = head;
  for (; i + 64 <= bytes; i += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#else
    for (std::size_t j = i; j < i + 64; j += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + j)));
#endif
  }
  std::memcpy(dst + i, src + i, bytes - i);
#else
  std::memcpy(dst, src, bytes);
#endif
}

// Make streamed stores visible to other threads in order.
inline void stream_end() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <DTypeCode S>
void widen_all(const std::uint8_t* src, float* dst, std::size_t n) {
  alignas(64) float buffer[kTile];
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    stream(reinterpret_cast<const std::uint8_t*>(view<S>(src + at * sizeof(StorageOf<S>), m, buffer)),
           reinterpret_cast<std::uint8_t*>(dst + at), m * sizeof(float));
  }
  stream_end();
}

// Compute dst[i] += src[i], widened: in registers, without a buffer between.
template <DTypeCode S>
void add_widened(const std::uint16_t* src, float* dst, std::size_t n) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    prefetch_ahead(dst + i);
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i));
    __m512 x;
    if constexpr (S == kFloat16)
      x = _mm512_maskz_cvtph_ps(0xFFFF, h);
    else
      x = _mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xFFFF, _mm512_maskz_cvtepu16_epi32(0xFFFF, h), 16));
    _mm512_storeu_ps(dst + i, quieted(_mm512_add_ps(_mm512_loadu_ps(dst + i), x)));
  }
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    prefetch_ahead(dst + i);
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i));
    __m256 x;
    if constexpr (S == kFloat16)
      x = _mm256_cvtph_ps(h);
    else
      x = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    _mm256_storeu_ps(dst + i, quieted(_mm256_add_ps(_mm256_loadu_ps(dst + i), x)));
  }
#endif
  for (; i < n; ++i)
    dst[i] =
        quieted(dst[i] + float_of(S == kFloat16 ? half_to_float_bits(src[i]) : bfloat_to_float_bits(src[i])));
}

template <DTypeCode S, DTypeCode D>
void convert_all(const std::uint8_t* src, std::uint8_t* dst, std::size_t n, bool add) {
  if constexpr (D == kFloat32 && sizeof(StorageOf<S>) == 2) {
    if (!add && n >= kStream / sizeof(float) && aligned<float>(dst))
      return widen_all<S>(src, reinterpret_cast<float*>(dst), n);
    if (add && aligned<float>(dst) && aligned<std::uint16_t>(src))
      return add_widened<S>(reinterpret_cast<const std::uint16_t*>(src), reinterpret_cast<float*>(dst), n);
  }
  alignas(64) ComputeOf<S> buffer[kTile];
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    const ComputeOf<S>* values = view<S>(src + at * sizeof(StorageOf<S>), m, buffer);
    std::uint8_t* out = dst + at * sizeof(StorageOf<D>);
    if constexpr (D == kFloat32 || D == kFloat64) {
      if (add) {
        store_add<D>(values, out, m);
        continue;
      }
    }
    store<D>(values, out, m);
  }
}

void convert(const void* src, DTypeCode src_dtype, void* dst, DTypeCode dst_dtype, std::size_t n, bool add) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  auto* to = static_cast<std::uint8_t*>(dst);
  if (src_dtype == dst_dtype && !add) {  // bit for bit, NaN payloads too
    const std::size_t size = src_dtype == kFloat64 ? 8 : src_dtype == kFloat32 ? 4 : 2;
    if (n) std::memcpy(to, from, n * size);
    return;
  }
  with_dtype(src_dtype, [&]<DTypeCode S>() {
    with_dtype(dst_dtype, [&]<DTypeCode D>() { convert_all<S, D>(from, to, n, add); });
  });
}

bool infinite(const std::uint8_t* halfs, std::size_t n, std::size_t each) {
  typedef std::uint16_t Loose __attribute__((aligned(1), may_alias));
  const auto* h = reinterpret_cast<const Loose*>(halfs);
  std::uint16_t any = 0;
  std::size_t at = 0;
  for (; at + kLooked <= n; at += each)
    for (std::size_t i = at; i < at + kLooked; ++i)
      any = static_cast<std::uint16_t>(any | ((h[i] & 0x7FFF) == 0x7C00 ? 1 : 0));
  for (; at < n; ++at) any = static_cast<std::uint16_t>(any | ((h[at] & 0x7FFF) == 0x7C00 ? 1 : 0));
  return any;
}

template <typename T>
void divide_all(T* values, std::size_t n, int by) {
  if ((by & (by - 1)) == 0) {  // multiplying gives the same bits, several times as fast
    const T inverse = T(1) / static_cast<T>(by);
    for (std::size_t i = 0; i < n; ++i) values[i] *= inverse;
    return;
  }
  const T divisor = static_cast<T>(by);
  for (std::size_t i = 0; i < n; ++i) values[i] /= divisor;
}

void divide(void* values, bool wide, std::size_t n, int by) {
  if (wide)
    divide_all(static_cast<double*>(values), n, by);
  else
    divide_all(static_cast<float*>(values), n, by);
}

}  // namespace

extern const ConvertKernels convert_kernels;
const ConvertKernels convert_kernels = {convert, stream, infinite, divide};

}  // namespace hybridcomp::HC_ISA
