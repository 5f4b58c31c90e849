// MPC on one chunk: LNVs, BIT, LNV1s, ZE, and back; compiled once per instruction set.
#include <cstring>

#include "codecs/lossless/mpc.hpp"
#include "codecs/lossless/mpc256.hpp"
#include "codecs/lossless/split_bytes.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <int Width>
using Word = typename MpcWord<Width>::Word;
template <int Width>
using Lane = typename MpcWord<Width>::Lane;

// Rows of a chunk, lanes of a row, words of a tile.
template <int Width>
constexpr std::size_t kRows = Width * 8;
template <int Width>
constexpr std::size_t kLanes = kMpcRowBytes / sizeof(Lane<Width>);
template <int Width>
constexpr std::size_t kTileWords = sizeof(Lane<Width>) * 8;

constexpr std::size_t kSlack = 64;  // bytes that a vector may write past the output

// -- LNVs ------------------------------------------------------------------------------------------------

// Compute the chunk's residuals, with zeros for the words that a short chunk lacks.
template <int Width>
void subtract_lag(const std::uint8_t* src, std::size_t m, std::uint32_t lag, Word<Width>* residuals) {
  typedef Word<Width> Loose __attribute__((aligned(1), may_alias));
  const auto* values = reinterpret_cast<const Loose*>(src);
  const std::size_t head = lag < m ? lag : m;
  std::memcpy(residuals, src, head * Width);
  for (std::size_t i = head; i < m; ++i) residuals[i] = mpc_residual<Word<Width>>(values[i], values[i - lag]);
  if (m < kMpcChunk) std::memset(residuals + m, 0, (kMpcChunk - m) * Width);
}

// Add up residuals, `lag` words at a time: the sums stay in a register of Bytes bytes, at least lag * Width.
// Each store's upper words, past the lag, are overwritten by the next.
template <int Width, int Bytes>
std::size_t add_lag_vectors(const Word<Width>* residuals, std::size_t m, std::uint32_t lag,
                            std::uint8_t* out) {
  typedef Word<Width> Vector __attribute__((vector_size(Bytes)));
  Vector sum = {};
  std::size_t i = 0;
  for (; i + Bytes / Width <= m; i += lag) {
    Vector r;
    std::memcpy(&r, residuals + i, Bytes);
    sum += r;
    std::memcpy(out + i * Width, &sum, Bytes);
  }
  return i;
}

template <int Width>
void add_lag(const Word<Width>* residuals, std::size_t m, std::uint32_t lag, std::uint8_t* out) {
  typedef Word<Width> Loose __attribute__((aligned(1), may_alias));
  auto* values = reinterpret_cast<Loose*>(out);
  std::size_t i = 0;
  if (lag * Width <= 16)
    i = add_lag_vectors<Width, 16>(residuals, m, lag, out);
  else if (lag * Width <= 32)
    i = add_lag_vectors<Width, 32>(residuals, m, lag, out);
  else if (lag * Width <= 64)
    i = add_lag_vectors<Width, 64>(residuals, m, lag, out);
  for (; i < m && i < lag; ++i) values[i] = residuals[i];
  for (; i < m; ++i) values[i] = mpc_value<Word<Width>>(residuals[i], values[i - lag]);
}

// -- BIT -------------------------------------------------------------------------------------------------

#if defined(__AVX512F__) && defined(__AVX512BW__)

// Turn words into rows of planes: the top bits of 64 bytes are a mask, two tiles' lanes, or one of 64 bits.
template <int Width>
void to_planes(const Word<Width>* words, Lane<Width>* rows) {
  auto* bytes = reinterpret_cast<std::uint8_t*>(rows);
  for (std::size_t at = 0; at < kMpcChunk; at += 64) {
    __m512i w[Width], planes[Width];
    for (int k = 0; k < Width; ++k) w[k] = _mm512_loadu_si512(words + at + k * (64 / Width));
    split_bytes<Width>(w, planes);
    std::uint8_t* row = bytes + at / 8;
    for (int k = Width - 1; k >= 0; --k) {
      __m512i x = planes[k];
      for (int bit = 0; bit < 8; ++bit, row += kMpcRowBytes) {
        const std::uint64_t mask = _cvtmask64_u64(_mm512_movepi8_mask(x));
        std::memcpy(row, &mask, 8);
        x = _mm512_add_epi8(x, x);
      }
    }
  }
}

template <int Width>
void to_words(Lane<Width>* rows, Word<Width>* words) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(rows);
  for (std::size_t at = 0; at < kMpcChunk; at += 64) {
    __m512i w[Width], planes[Width];
    const std::uint8_t* row = bytes + at / 8;
    for (int k = Width - 1; k >= 0; --k) {
      __m512i x = _mm512_setzero_si512();
      for (int bit = 7; bit >= 0; --bit, row += kMpcRowBytes) {
        std::uint64_t mask;
        std::memcpy(&mask, row, 8);
        x = _mm512_mask_add_epi8(x, _cvtu64_mask64(mask), x, _mm512_set1_epi8(static_cast<char>(1 << bit)));
      }
      planes[k] = x;
    }
    join_bytes<Width>(planes, w);
    for (int k = 0; k < Width; ++k) _mm512_storeu_si512(words + at + k * (64 / Width), w[k]);
  }
}

#else

// Swap bits between rows, all tiles side by side: words become planes or planes words, rows in the order of
// the bits, the lowest first.
template <int Width>
void swap_bits(Lane<Width>* rows) {
  for (int shift = static_cast<int>(kRows<Width>) / 2; shift; shift /= 2) {
    const Lane<Width> mask = mpc_swap_mask<Lane<Width>>(shift);
    for (std::size_t k = 0; k < kRows<Width>; ++k) {
      if (k & static_cast<std::size_t>(shift)) continue;
      Lane<Width>* __restrict low = rows + k * kLanes<Width>;
      Lane<Width>* __restrict high = low + static_cast<std::size_t>(shift) * kLanes<Width>;
      for (std::size_t t = 0; t < kLanes<Width>; ++t) mpc_swap(low[t], high[t], shift, mask);
    }
  }
}

template <int Width>
void reverse_rows(Lane<Width>* rows) {
  Lane<Width> row[kLanes<Width>];
  for (std::size_t k = 0; k < kRows<Width> / 2; ++k) {
    Lane<Width>* a = rows + k * kLanes<Width>;
    Lane<Width>* b = rows + (kRows<Width> - 1 - k) * kLanes<Width>;
    std::memcpy(row, a, kMpcRowBytes);
    std::memcpy(a, b, kMpcRowBytes);
    std::memcpy(b, row, kMpcRowBytes);
  }
}

// Turn words into rows of planes. Row k begins as word k of each tile; where lanes are wider than words, word
// k + the word's bits lies above it.
template <int Width>
void to_planes(const Word<Width>* words, Lane<Width>* rows) {
#if defined(__AVX2__)
  if constexpr (Width == 4) return words_to_planes(words, rows);
#endif
  for (std::size_t t = 0; t < kLanes<Width>; ++t) {
    const Word<Width>* tile = words + t * kTileWords<Width>;
    for (std::size_t k = 0; k < kRows<Width>; ++k) {
      Lane<Width> lane = tile[k];
      if constexpr (Width == 2) lane |= static_cast<Lane<Width>>(tile[k + 16]) << 16;
      rows[k * kLanes<Width> + t] = lane;
    }
  }
  swap_bits<Width>(rows);
  reverse_rows<Width>(rows);
}

template <int Width>
void to_words(Lane<Width>* rows, Word<Width>* words) {
#if defined(__AVX2__)
  if constexpr (Width == 4) return planes_to_words(rows, words);
#endif
  reverse_rows<Width>(rows);
  swap_bits<Width>(rows);
  for (std::size_t t = 0; t < kLanes<Width>; ++t) {
    Word<Width>* tile = words + t * kTileWords<Width>;
    for (std::size_t k = 0; k < kRows<Width>; ++k) {
      const Lane<Width> lane = rows[k * kLanes<Width> + t];
      tile[k] = static_cast<Word<Width>>(lane);
      if constexpr (Width == 2) tile[k + 16] = static_cast<Word<Width>>(lane >> 16);
    }
  }
}

#endif

// -- LNV1s and ZE ----------------------------------------------------------------------------------------

// Write the bitmap and the lanes that are not zero of each row less the row before; return the bytes. `out`
// has kSlack bytes to spare.
template <int Width>
std::size_t drop_zeros(const Lane<Width>* rows, std::uint8_t* out) {
  using L = Lane<Width>;
  std::uint8_t* bitmap = out;
  std::uint8_t* kept = out + mpc_bitmap_bytes(Width);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512i before[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::size_t k = 0; k < kRows<Width>; ++k) {
    for (int half = 0; half < 2; ++half) {
      const __m512i row = _mm512_loadu_si512(rows + k * kLanes<Width> + half * (kLanes<Width> / 2));
      if constexpr (sizeof(L) == 4) {
        const __m512i d = _mm512_sub_epi32(row, before[half]);
        const __mmask16 mask = _mm512_test_epi32_mask(d, d);
        const std::uint16_t bits = static_cast<std::uint16_t>(mask);
        std::memcpy(bitmap, &bits, 2);
        bitmap += 2;
        _mm512_storeu_si512(kept, _mm512_maskz_compress_epi32(mask, d));
        kept += 4 * __builtin_popcount(bits);
      } else {
        const __m512i d = _mm512_sub_epi64(row, before[half]);
        const __mmask8 mask = _mm512_test_epi64_mask(d, d);
        *bitmap++ = static_cast<std::uint8_t>(mask);
        _mm512_storeu_si512(kept, _mm512_maskz_compress_epi64(mask, d));
        kept += 8 * __builtin_popcount(static_cast<unsigned>(mask));
      }
      before[half] = row;
    }
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(L) == 4)
    return static_cast<std::size_t>(drop_zero_lanes(rows, kRows<Width>, bitmap, kept) - out);
#endif
  for (std::size_t k = 0; k < kRows<Width>; ++k) {
    for (std::size_t t = 0; t < kLanes<Width>; t += 8) {
      std::uint32_t bits = 0;
      for (std::size_t i = 0; i < 8; ++i) {
        const L* lane = rows + k * kLanes<Width> + t + i;
        const L d = mpc_residual<L>(*lane, k ? lane[-static_cast<std::ptrdiff_t>(kLanes<Width>)] : L(0));
        std::memcpy(kept, &d, sizeof(L));
        kept += d ? sizeof(L) : 0;
        bits |= static_cast<std::uint32_t>(d != 0) << i;
      }
      *bitmap++ = static_cast<std::uint8_t>(bits);
    }
  }
#endif
  return static_cast<std::size_t>(kept - out);
}

std::size_t lanes_kept(const std::uint8_t* bitmap, int width) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < mpc_bitmap_bytes(width); i += 8) {
    std::uint64_t bits;
    std::memcpy(&bits, bitmap + i, 8);
    count += static_cast<std::size_t>(__builtin_popcountll(bits));
  }
  return count;
}

// The inverse; the caller has checked that the lanes are as many as the bitmap says.
template <int Width>
void restore_zeros(const std::uint8_t* src, Lane<Width>* rows) {
  using L = Lane<Width>;
  const std::uint8_t* bitmap = src;
  const std::uint8_t* kept = src + mpc_bitmap_bytes(Width);
#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512i sum[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::size_t k = 0; k < kRows<Width>; ++k) {
    for (int half = 0; half < 2; ++half) {
      if constexpr (sizeof(L) == 4) {
        std::uint16_t bits;
        std::memcpy(&bits, bitmap, 2);
        bitmap += 2;
        const int count = __builtin_popcount(bits);
        const auto present = static_cast<__mmask16>((1u << count) - 1);  // read no further than the lanes
        const __m512i lanes = _mm512_maskz_loadu_epi32(present, kept);
        sum[half] = _mm512_add_epi32(sum[half], _mm512_maskz_expand_epi32(bits, lanes));
        kept += 4 * count;
      } else {
        const std::uint8_t bits = *bitmap++;
        const int count = __builtin_popcount(bits);
        const auto present = static_cast<__mmask8>((1u << count) - 1);
        const __m512i lanes = _mm512_maskz_loadu_epi64(present, kept);
        sum[half] = _mm512_add_epi64(sum[half], _mm512_maskz_expand_epi64(bits, lanes));
        kept += 8 * count;
      }
      _mm512_storeu_si512(rows + k * kLanes<Width> + half * (kLanes<Width> / 2), sum[half]);
    }
  }
#else
#if defined(__AVX2__)
  if constexpr (sizeof(L) == 4) return restore_zero_lanes(bitmap, kept, kRows<Width>, rows);
#endif
  for (std::size_t k = 0; k < kRows<Width>; ++k) {
    for (std::size_t t = 0; t < kLanes<Width>; ++t) {
      L* lane = rows + k * kLanes<Width> + t;
      L d = 0;
      if (bitmap[(k * kLanes<Width> + t) / 8] >> (t % 8) & 1) {
        std::memcpy(&d, kept, sizeof(L));
        kept += sizeof(L);
      }
      *lane = mpc_value<L>(d, k ? lane[-static_cast<std::ptrdiff_t>(kLanes<Width>)] : L(0));
    }
  }
#endif
}

// -- chunks ----------------------------------------------------------------------------------------------

template <int Width>
std::size_t encode_chunk(const std::uint8_t* src, std::size_t m, std::uint32_t lag, std::uint8_t* out,
                         std::size_t room) {
  constexpr std::size_t kMost = kMpcChunk * Width + 128 + kSlack;  // bytes that drop_zeros writes
  alignas(64) Word<Width> residuals[kMpcChunk];
  alignas(64) Lane<Width> rows[kRows<Width> * kLanes<Width>];
  alignas(64) std::uint8_t buffer[kMost];
  std::uint8_t* const encoded = room >= kMost ? out : buffer;
  subtract_lag<Width>(src, m, lag, residuals);
  to_planes<Width>(residuals, rows);
  const std::size_t bytes = drop_zeros<Width>(rows, encoded);
  const std::size_t raw = m * Width;
  if (bytes >= raw) {
    std::memcpy(out, src, raw);
    return raw;
  }
  if (encoded != out) std::memcpy(out, encoded, bytes);
  return bytes;
}

template <int Width>
int decode_chunk(const std::uint8_t* src, std::size_t bytes, std::size_t m, std::uint32_t lag,
                 std::uint8_t* out) {
  const std::size_t raw = m * Width;
  if (bytes == raw) {
    std::memcpy(out, src, raw);
    return kOk;
  }
  const std::size_t bitmap = mpc_bitmap_bytes(Width);
  if (bytes > raw || bytes < bitmap) return kBadLength;
  if (bytes != bitmap + lanes_kept(src, Width) * sizeof(Lane<Width>)) return kBadZeros;
  alignas(64) Word<Width> residuals[kMpcChunk];
  alignas(64) Lane<Width> rows[kRows<Width> * kLanes<Width>];
  restore_zeros<Width>(src, rows);
  to_words<Width>(rows, residuals);
  add_lag<Width>(residuals, m, lag, out);
  return kOk;
}

std::size_t encode(const std::uint8_t* src, std::size_t m, int width, std::uint32_t lag, std::uint8_t* out,
                   std::size_t room) {
  if (width == 2) return encode_chunk<2>(src, m, lag, out, room);
  if (width == 4) return encode_chunk<4>(src, m, lag, out, room);
  return encode_chunk<8>(src, m, lag, out, room);
}

int decode(const std::uint8_t* src, std::size_t bytes, std::size_t m, int width, std::uint32_t lag,
           std::uint8_t* out) {
  if (width == 2) return decode_chunk<2>(src, bytes, m, lag, out);
  if (width == 4) return decode_chunk<4>(src, bytes, m, lag, out);
  return decode_chunk<8>(src, bytes, m, lag, out);
}

}  // namespace

extern const MpcKernels mpc_kernels;
const MpcKernels mpc_kernels = {encode, decode};

}  // namespace hybridcomp::HC_ISA
