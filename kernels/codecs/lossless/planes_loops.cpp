// Words split into planes of bytes, and joined again; compiled once per instruction set.
#include "codecs/lossless/planes.hpp"

#include <cstring>

#include "codecs/lossless/split_bytes.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <int Width>
struct Unsigned;
template <>
struct Unsigned<2> {
  using Word = std::uint16_t;
};
template <>
struct Unsigned<4> {
  using Word = std::uint32_t;
};
template <>
struct Unsigned<8> {
  using Word = std::uint64_t;
};

#if defined(__AVX512F__) && defined(__AVX512BW__)

template <int Width>
__m512i rotate_words(__m512i x, bool back) {
  if constexpr (Width == 2) {
    return back ? _mm512_or_si512(_mm512_srli_epi16(x, 1), _mm512_slli_epi16(x, 15))
                : _mm512_or_si512(_mm512_slli_epi16(x, 1), _mm512_srli_epi16(x, 15));
  } else if constexpr (Width == 4) {
    return back ? _mm512_maskz_ror_epi32(0xFFFF, x, 1) : _mm512_maskz_rol_epi32(0xFFFF, x, 1);
  } else {
    return back ? _mm512_maskz_ror_epi64(0xFF, x, 1) : _mm512_maskz_rol_epi64(0xFF, x, 1);
  }
}

template <int Width, bool Rotate>
std::size_t split_vectors(const std::uint8_t* src, std::size_t m, std::uint8_t* const* planes) {
  std::size_t at = 0;
  for (; at + 64 <= m; at += 64) {
    __m512i w[Width], p[Width];
    for (int k = 0; k < Width; ++k) {
      w[k] = _mm512_loadu_si512(src + at * Width + k * 64);
      if constexpr (Rotate) w[k] = rotate_words<Width>(w[k], false);
    }
    split_bytes<Width>(w, p);
    for (int k = 0; k < Width; ++k) _mm512_storeu_si512(planes[k] + at, p[k]);
  }
  return at;
}

template <int Width, bool Rotate>
std::size_t join_vectors(const std::uint8_t* const* planes, std::size_t m, std::uint8_t* out) {
  std::size_t at = 0;
  for (; at + 64 <= m; at += 64) {
    __m512i w[Width], p[Width];
    for (int k = 0; k < Width; ++k) p[k] = _mm512_loadu_si512(planes[k] + at);
    join_bytes<Width>(p, w);
    for (int k = 0; k < Width; ++k) {
      if constexpr (Rotate) w[k] = rotate_words<Width>(w[k], true);
      _mm512_storeu_si512(out + at * Width + k * 64, w[k]);
    }
  }
  return at;
}

#else

template <int Width, bool Rotate>
std::size_t split_vectors(const std::uint8_t*, std::size_t, std::uint8_t* const*) {
  return 0;
}
template <int Width, bool Rotate>
std::size_t join_vectors(const std::uint8_t* const*, std::size_t, std::uint8_t*) {
  return 0;
}

#endif

constexpr std::size_t kGroupWords = 512;  // words loaded at a time: each plane's loop is then simple

template <int Width, bool Rotate>
void split_words(const std::uint8_t* src, std::size_t m, std::uint8_t* const* planes) {
  using Word = typename Unsigned<Width>::Word;
  Word words[kGroupWords];
  for (std::size_t at = split_vectors<Width, Rotate>(src, m, planes); at < m; at += kGroupWords) {
    const std::size_t n = m - at < kGroupWords ? m - at : kGroupWords;
    std::memcpy(words, src + at * Width, n * Width);
    if constexpr (Rotate)
      for (std::size_t i = 0; i < n; ++i) words[i] = rotated(words[i]);
    for (int k = 0; k < Width; ++k) {
      std::uint8_t* plane = planes[k] + at;
      for (std::size_t i = 0; i < n; ++i) plane[i] = static_cast<std::uint8_t>(words[i] >> (8 * k));
    }
  }
}

template <int Width, bool Rotate>
void join_words(const std::uint8_t* const* planes, std::size_t m, std::uint8_t* out) {
  using Word = typename Unsigned<Width>::Word;
  Word words[kGroupWords];
  for (std::size_t at = join_vectors<Width, Rotate>(planes, m, out); at < m; at += kGroupWords) {
    const std::size_t n = m - at < kGroupWords ? m - at : kGroupWords;
    for (std::size_t i = 0; i < n; ++i) words[i] = planes[0][at + i];
    for (int k = 1; k < Width; ++k) {
      const std::uint8_t* plane = planes[k] + at;
      for (std::size_t i = 0; i < n; ++i)
        words[i] = static_cast<Word>(words[i] | static_cast<Word>(Word(plane[i]) << (8 * k)));
    }
    if constexpr (Rotate)
      for (std::size_t i = 0; i < n; ++i) words[i] = rotated_back(words[i]);
    std::memcpy(out + at * Width, words, n * Width);
  }
}

void split(const std::uint8_t* src, std::size_t m, int width, bool rotate, std::uint8_t* const* planes) {
  if (width == 1)
    std::memcpy(planes[0], src, m);
  else if (width == 2)
    rotate ? split_words<2, true>(src, m, planes) : split_words<2, false>(src, m, planes);
  else if (width == 4)
    rotate ? split_words<4, true>(src, m, planes) : split_words<4, false>(src, m, planes);
  else
    rotate ? split_words<8, true>(src, m, planes) : split_words<8, false>(src, m, planes);
}

void join(const std::uint8_t* const* planes, std::size_t m, int width, bool rotate, std::uint8_t* out) {
  if (width == 1)
    std::memcpy(out, planes[0], m);
  else if (width == 2)
    rotate ? join_words<2, true>(planes, m, out) : join_words<2, false>(planes, m, out);
  else if (width == 4)
    rotate ? join_words<4, true>(planes, m, out) : join_words<4, false>(planes, m, out);
  else
    rotate ? join_words<8, true>(planes, m, out) : join_words<8, false>(planes, m, out);
}

}  // namespace

extern const PlanesKernels planes_kernels;
const PlanesKernels planes_kernels = {split, join};

}  // namespace hybridcomp::HC_ISA
