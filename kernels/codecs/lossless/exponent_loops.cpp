// Blocks of codec `exponent` to bytes and back; compiled once per instruction set.
#include "codecs/common/tile.hpp"
#include "codecs/lossless/exponent.hpp"
#include "codecs/lossless/exponent_words.hpp"

namespace hybridcomp::HC_ISA {
namespace {

template <int Bits>
constexpr std::uint8_t kEscape = (1 << Bits) - 1;

#if defined(__AVX2__)
// Vectors have 32 bytes with AVX-512 too: their stores would not be forwarded to loads of 64 bytes.
inline __m256i all_bytes(std::uint8_t value) { return _mm256_set1_epi8(static_cast<char>(value)); }
#endif

// -- encode ----------------------------------------------------------------------------------------------

// Make the fields of a block in one form: distances below `largest`, the zeros, and escapes.
template <DTypeCode D, int Bits, bool Zero>
void make_fields(const ExponentOf<D>* exponents, ExponentOf<D> largest, std::uint8_t* __restrict fields) {
  using E = ExponentOf<D>;
  constexpr E kFirst = kEscape<Bits> - Zero;  // distance that has no field
#if defined(__AVX2__)
  if constexpr (sizeof(E) == 1) {
    const __m256i top = all_bytes(largest), escape = all_bytes(kEscape<Bits>);
    for (std::size_t i = 0; i < kB; i += 32) {
      const __m256i exponent = load256(exponents + i), distance = _mm256_sub_epi8(top, exponent);
      __m256i field = _mm256_min_epu8(distance, escape);
      if constexpr (Zero) {
        const __m256i none = all_bytes(kFirst);
        const __m256i is_far = _mm256_cmpeq_epi8(_mm256_max_epu8(distance, none), distance);
        const __m256i is_zero = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
        field = _mm256_blendv_epi8(_mm256_blendv_epi8(field, escape, is_far), none, is_zero);
      }
      store256(fields + i, field);
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < kB; ++i) {
    const E distance = static_cast<E>(largest - exponents[i]);
    E field = distance < kFirst ? distance : E(kEscape<Bits>);
    if constexpr (Zero) field = exponents[i] ? field : kFirst;
    fields[i] = static_cast<std::uint8_t>(field);
  }
}

template <DTypeCode D>
ExponentOf<D> largest_of(const ExponentOf<D>* exponents) {
  using E = ExponentOf<D>;
#if defined(__AVX2__)
  if constexpr (sizeof(E) == 1) {
    __m256i most = load256(exponents);
    for (std::size_t i = 32; i < kB; i += 32) most = _mm256_max_epu8(most, load256(exponents + i));
    __m128i half = _mm_max_epu8(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    half = _mm_max_epu8(half, _mm_srli_si128(half, 8));
    half = _mm_max_epu8(half, _mm_srli_si128(half, 4));
    half = _mm_max_epu8(half, _mm_srli_si128(half, 2));
    half = _mm_max_epu8(half, _mm_srli_si128(half, 1));
    return static_cast<E>(_mm_cvtsi128_si32(half));
  }
#endif
  E largest = 0;
  for (std::size_t i = 0; i < kB; ++i) largest = exponents[i] > largest ? exponents[i] : largest;
  return largest;
}

template <DTypeCode D, int Bits>
void put_block(const ExponentOf<D>* exponents, ExponentOf<D> largest, const std::uint8_t* fields,
               const Places& escapes, std::uint8_t* data) {
  using E = ExponentOf<D>;
  std::uint8_t* const rows = data + exponent_fields_at(D);
  std::uint8_t* const list = rows + Bits * kExponentRow + sizeof(E);
  // The list of escapes is written before the fields, since copies of its first entry go to the bytes before
  // it.
  PlaceList(escapes).each([&](std::ptrdiff_t i, std::size_t place) {
    std::memcpy(list + i * static_cast<std::ptrdiff_t>(sizeof(E)), exponents + place, sizeof(E));
  });
  std::memcpy(list - sizeof(E), &largest, sizeof(E));
  pack_fields<Bits>(fields, rows);
}

bool all_zero(const std::uint8_t* bytes, std::size_t n) {
  return n == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, n - 1) == 0);
}

std::uint8_t keep_block(const std::uint8_t* src, std::size_t bytes, std::uint8_t* data) {
  if (all_zero(src, bytes)) return kExponentZeros;
  std::memcpy(data, src, bytes);
  return kExponentRaw;
}

// Encode a block of 256 elements and return its code; writes no more than the elements' bytes.
template <DTypeCode D>
std::uint8_t encode_block(const std::uint8_t* src, std::uint8_t* data) {
  using E = ExponentOf<D>;
  constexpr std::size_t kBytes = kB * exponent_width(D);
  alignas(64) E exponents[kB];
  split_block<D>(src, exponents, data);
  const E largest = largest_of<D>(exponents);
  if (!largest && all_zero(src, kBytes)) return kExponentZeros;

  alignas(64) std::uint8_t three[kB];
  make_fields<D, 3, false>(exponents, largest, three);
  const Places escapes(three, kEscape<3>);
  const std::size_t count = escapes.count();
  if (count <= kExponentFew) {
    put_block<D, 3>(exponents, largest, three, escapes, data);
    return static_cast<std::uint8_t>(exponent_form_at(0).first + count);
  }
  alignas(64) std::uint8_t three_zero[kB], four_zero[kB];
  make_fields<D, 3, true>(exponents, largest, three_zero);
  make_fields<D, 4, true>(exponents, largest, four_zero);
  const Places escapes_three(three_zero, kEscape<3>), escapes_four(four_zero, kEscape<4>);
  const std::size_t counts[] = {count, escapes_three.count(), escapes_four.count()};
  std::size_t best = kBytes;
  int chosen = kExponentForms;
  for (int f = 0; f < kExponentForms; ++f) {
    const ExponentForm form = exponent_form_at(f);
    const std::size_t bytes = exponent_form_bytes(form, counts[f], D);
    if (counts[f] > form.most || bytes >= best) continue;
    best = bytes;
    chosen = f;
  }
  if (chosen == kExponentForms) {
    std::memcpy(data, src, kBytes);
    return kExponentRaw;
  }
  if (chosen == 0)
    put_block<D, 3>(exponents, largest, three, escapes, data);
  else if (chosen == 1)
    put_block<D, 3>(exponents, largest, three_zero, escapes_three, data);
  else
    put_block<D, 4>(exponents, largest, four_zero, escapes_four, data);
  return static_cast<std::uint8_t>(exponent_form_at(chosen).first + counts[chosen]);
}

template <DTypeCode D>
std::size_t encode_all(const std::uint8_t* src, std::size_t n, std::uint8_t* codes, std::uint8_t* data) {
  constexpr std::size_t kWidth = exponent_width(D);
  std::size_t used = 0;
  for (std::size_t at = 0; at < n; at += kB) {
    const std::size_t m = smaller(kB, n - at);
    const std::uint8_t* from = src + at * kWidth;
    prefetch_ahead(from, m * kWidth);
    const std::uint8_t code =
        m == kB ? encode_block<D>(from, data + used) : keep_block(from, m * kWidth, data + used);
    codes[at / kB] = code;
    used += exponent_block_bytes(code, m, D);
  }
  return used;
}

std::size_t encode(const std::uint8_t* src, DTypeCode dtype, std::size_t n, std::uint8_t* codes,
                   std::uint8_t* data) {
  std::size_t bytes = 0;
  with_dtype(dtype, [&]<DTypeCode D>() { bytes = encode_all<D>(src, n, codes, data); });
  return bytes;
}

// -- decode ----------------------------------------------------------------------------------------------

// Turn a block's fields into exponents; those of escapes may be anything.
template <DTypeCode D, int Bits, bool Zero>
void exponents_of(const std::uint8_t* fields, ExponentOf<D> largest, ExponentOf<D>* __restrict exponents) {
  using E = ExponentOf<D>;
#if defined(__AVX2__)
  if constexpr (sizeof(E) == 1) {
    const __m256i top = all_bytes(largest);
    for (std::size_t i = 0; i < kB; i += 32) {
      const __m256i field = load256(fields + i);
      __m256i exponent = _mm256_sub_epi8(top, field);
      if constexpr (Zero)
        exponent = _mm256_andnot_si256(_mm256_cmpeq_epi8(field, all_bytes(kEscape<Bits> - 1)), exponent);
      store256(exponents + i, exponent);
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < kB; ++i) {
    E exponent = static_cast<E>(largest - fields[i]);
    if constexpr (Zero) exponent = fields[i] == kEscape<Bits> - 1 ? E(0) : exponent;
    exponents[i] = exponent;
  }
}

// Decode a block of 256 elements in one form; false if it has another number of escapes.
template <DTypeCode D, int Bits, bool Zero>
bool decode_form(std::size_t count, const std::uint8_t* data, std::uint8_t* out) {
  using E = ExponentOf<D>;
  alignas(64) std::uint8_t fields[kB];
  alignas(64) E exponents[kB];
  const std::uint8_t* const rows = data + exponent_fields_at(D);
  const std::uint8_t* const list = rows + Bits * kExponentRow + sizeof(E);
  unpack_fields<Bits>(rows, fields);
  const Places escapes(fields, kEscape<Bits>);
  if (escapes.count() != count) return false;
  E largest;
  std::memcpy(&largest, list - sizeof(E), sizeof(E));
  exponents_of<D, Bits, Zero>(fields, largest, exponents);
  PlaceList(escapes).each([&](std::ptrdiff_t i, std::size_t place) {
    std::memcpy(exponents + place, list + i * static_cast<std::ptrdiff_t>(sizeof(E)), sizeof(E));
  });
  join_block<D>(exponents, data, out);
  return true;
}

template <DTypeCode D>
bool decode_block(std::uint8_t code, const std::uint8_t* data, std::uint8_t* out) {
  const ExponentForm form = exponent_form(code);
  const std::size_t count = static_cast<std::size_t>(code - form.first);
  if (form.bits == 4) return decode_form<D, 4, true>(count, data, out);
  return form.zero ? decode_form<D, 3, true>(count, data, out) : decode_form<D, 3, false>(count, data, out);
}

template <DTypeCode D>
int decode_all(const std::uint8_t* codes, const std::uint8_t* data, std::size_t n, std::uint8_t* out) {
  constexpr std::size_t kWidth = exponent_width(D);
  for (std::size_t at = 0; at < n; at += kB) {
    const std::size_t m = smaller(kB, n - at);
    const std::uint8_t code = codes[at / kB];
    const std::size_t own = exponent_block_bytes(code, m, D);
    std::uint8_t* const to = out + at * kWidth;
    prefetch_ahead(data, own);
    if (code == kExponentZeros)
      std::memset(to, 0, m * kWidth);
    else if (code == kExponentRaw)
      std::memcpy(to, data, m * kWidth);
    else if (!decode_block<D>(code, data, to))
      return kBadEscapes;
    data += own;
  }
  return kOk;
}

int decode(const std::uint8_t* codes, const std::uint8_t* data, DTypeCode dtype, std::size_t n,
           std::uint8_t* out) {
  int status = kOk;
  with_dtype(dtype, [&]<DTypeCode D>() { status = decode_all<D>(codes, data, n, out); });
  return status;
}

}  // namespace

extern const ExponentKernels exponent_kernels;
const ExponentKernels exponent_kernels = {encode, decode};

}  // namespace hybridcomp::HC_ISA
