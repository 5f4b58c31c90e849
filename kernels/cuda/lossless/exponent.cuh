// Codec `exponent` on one block of 256 elements, by a warp. Lane l has elements l, l + 32, ..., l + 224:
// their fields are those of byte l of each row.
#pragma once

#include "common/bytes.cuh"
#include "common/elements.cuh"
#include "hybridcomp/exponent.hpp"

namespace hybridcomp {

constexpr int kExponentThreads = 128;
constexpr int kExponentEach = 8;  // elements of a lane

template <int Width>
struct ExponentWord;
template <>
struct ExponentWord<2> {
  using Word = uint16_t;
};
template <>
struct ExponentWord<4> {
  using Word = uint32_t;
};
template <>
struct ExponentWord<8> {
  using Word = uint64_t;
};
template <DTypeCode D>
using ExponentWordOf = typename ExponentWord<static_cast<int>(exponent_width(D))>::Word;

HC_DEVICE uint32_t exponent_lane() { return threadIdx.x & 31u; }

// -- fields ----------------------------------------------------------------------------------------------

HC_DEVICE void put_fields(const uint32_t* f, int bits, uint8_t* rows) {
  uint8_t* const out = rows + exponent_lane();
  if (bits == 1) {
    uint32_t row = 0;
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) row |= f[k] << k;
    out[0] = static_cast<uint8_t>(row);
  } else if (bits == 3) {
    out[0] = static_cast<uint8_t>(f[0] | f[1] << 3 | (f[6] & 3u) << 6);
    out[32] = static_cast<uint8_t>(f[2] | f[3] << 3 | (f[7] & 3u) << 6);
    out[64] = static_cast<uint8_t>(f[4] | f[5] << 3 | (f[6] & 4u) << 4 | (f[7] & 4u) << 5);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) out[32 * k] = static_cast<uint8_t>(f[2 * k] | f[2 * k + 1] << 4);
  }
}

HC_DEVICE void get_fields(const uint8_t* rows, int bits, uint32_t* f) {
  const uint8_t* const in = rows + exponent_lane();
  if (bits == 1) {
    const uint32_t row = in[0];
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) f[k] = row >> k & 1u;
  } else if (bits == 3) {
    const uint32_t r0 = in[0], r1 = in[32], r2 = in[64];
    f[0] = r0 & 7u;
    f[1] = r0 >> 3 & 7u;
    f[2] = r1 & 7u;
    f[3] = r1 >> 3 & 7u;
    f[4] = r2 & 7u;
    f[5] = r2 >> 3 & 7u;
    f[6] = r0 >> 6 | (r2 >> 4 & 4u);
    f[7] = r1 >> 6 | (r2 >> 5 & 4u);
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t row = in[32 * k];
      f[2 * k] = row & 15u;
      f[2 * k + 1] = row >> 4;
    }
  }
}

// Count the escapes of the whole block; `field` gives this lane's fields.
template <typename Field>
HC_DEVICE uint32_t count_escapes(uint32_t escape, Field field) {
  uint32_t count = 0;
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k)
    count += static_cast<uint32_t>(__popc(__ballot_sync(kFullWarp, field(k) == escape)));
  return count;
}

// Call f(k, index) for each of this lane's escapes: it is the block's escape of that index.
template <typename Field, typename F>
HC_DEVICE void each_escape(uint32_t escape, Field field, F f) {
  uint32_t before = 0;
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k) {
    const bool mine = field(k) == escape;
    const uint32_t mask = __ballot_sync(kFullWarp, mine);
    if (mine) f(k, before + static_cast<uint32_t>(__popc(mask & ((1u << exponent_lane()) - 1))));
    before += static_cast<uint32_t>(__popc(mask));
  }
}

// -- encode ----------------------------------------------------------------------------------------------

// Write all but fields and exponents. `data` is aligned to 32 bytes.
template <DTypeCode D>
HC_DEVICE void put_rest(const ExponentWordOf<D>* words, const uint32_t* turned, uint8_t* data) {
  constexpr int kRest = exponent_rest_bits(D);
  const uint32_t lane = exponent_lane();
  uint32_t part[kExponentEach];
  if constexpr (kRest >= 8) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) data[32 * k + lane] = static_cast<uint8_t>(turned[k]);
    if constexpr (kRest > 8) {
#pragma unroll
      for (int k = 0; k < kExponentEach; ++k) part[k] = turned[k] >> 8 & 7u;
      put_fields(part, 3, data + kExponentBlock);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) part[k] = turned[k] & 15u;
    put_fields(part, 4, data);
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) part[k] = turned[k] >> 4 & 1u;
    put_fields(part, 1, data + kExponentBlock / 2);
  }
  uint8_t* const low = data + kExponentRow * kRest;
  if constexpr (D == kFloat32) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k)
      reinterpret_cast<uint16_t*>(low)[32 * k + lane] = static_cast<uint16_t>(words[k]);
  } else if constexpr (D == kFloat64) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) {
      reinterpret_cast<uint32_t*>(low)[32 * k + lane] = static_cast<uint32_t>(words[k]);
      reinterpret_cast<uint16_t*>(low + 4 * kExponentBlock)[32 * k + lane] =
          static_cast<uint16_t>(words[k] >> 32);
    }
  }
}

// Encode m elements (256, unless they are the last) to `data`; return the code.
template <DTypeCode D>
HC_DEVICE uint8_t encode_block(const ExponentWordOf<D>* src, uint32_t m, uint8_t* data) {
  using Word = ExponentWordOf<D>;
  constexpr int kRest = exponent_rest_bits(D), kWidth = static_cast<int>(exponent_width(D));
  const uint32_t lane = exponent_lane();
  Word words[kExponentEach], any = 0;
  uint32_t turned[kExponentEach], largest = 0;
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k) {
    words[k] = 32 * k + lane < m ? src[32 * k + lane] : Word(0);
    any |= words[k];
    turned[k] = exponent_rotated(static_cast<uint16_t>(words[k] >> (8 * kWidth - 16)));
    const uint32_t exponent = turned[k] >> kRest;
    largest = exponent > largest ? exponent : largest;
  }
  if (!__any_sync(kFullWarp, any != 0)) return kExponentZeros;
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, largest, distance);
    largest = other > largest ? other : largest;
  }
  int chosen = kExponentForms;
  uint32_t escapes = 0;
  if (m == kExponentBlock) {
    size_t best = kExponentBlock * kWidth;
    for (int i = 0; i < kExponentForms; ++i) {
      const ExponentForm form = exponent_form_at(i);
      const uint32_t count = count_escapes(
          exponent_escape(form), [&](int k) { return exponent_field(turned[k] >> kRest, largest, form); });
      const size_t bytes = exponent_form_bytes(form, count, D);
      if (count <= form.most && bytes < best) {
        best = bytes;
        chosen = i;
        escapes = count;
      }
      if (i == 0 && count <= kExponentFew) break;
    }
  }
  if (chosen == kExponentForms) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k)
      if (32 * k + lane < m) reinterpret_cast<Word*>(data)[32 * k + lane] = words[k];
    return kExponentRaw;
  }
  put_rest<D>(words, turned, data);
  const ExponentForm form = exponent_form_at(chosen);
  uint32_t fields[kExponentEach];
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k) fields[k] = exponent_field(turned[k] >> kRest, largest, form);
  uint8_t* const rows = data + exponent_fields_at(D);
  put_fields(fields, form.bits, rows);
  uint8_t* const list = rows + kExponentRow * form.bits;
  const auto put = [&](uint32_t index, uint32_t exponent) {
    list[index * exponent_bytes(D)] = static_cast<uint8_t>(exponent);
    if constexpr (D == kFloat64) list[index * 2 + 1] = static_cast<uint8_t>(exponent >> 8);
  };
  if (lane == 0) put(0, largest);
  each_escape(
      exponent_escape(form), [&](int k) { return fields[k]; },
      [&](int k, uint32_t index) { put(1 + index, turned[k] >> kRest); });
  return static_cast<uint8_t>(form.first + escapes);
}

// -- decode ----------------------------------------------------------------------------------------------

// Load bytes at any address, the lowest first.
template <typename T>
HC_DEVICE T load_bytes(const uint8_t* p) {
  T x = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i)
    x = static_cast<T>(x | static_cast<T>(p[i]) << (8 * i));
  return x;
}

// Read what put_rest wrote: the rest of the top halves, and the words without these.
template <DTypeCode D>
HC_DEVICE void get_rest(const uint8_t* data, uint32_t* rest, ExponentWordOf<D>* words) {
  constexpr int kRest = exponent_rest_bits(D);
  const uint32_t lane = exponent_lane();
  uint32_t part[kExponentEach];
  if constexpr (kRest >= 8) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) rest[k] = data[32 * k + lane];
    if constexpr (kRest > 8) {
      get_fields(data + kExponentBlock, 3, part);
#pragma unroll
      for (int k = 0; k < kExponentEach; ++k) rest[k] |= part[k] << 8;
    }
  } else {
    get_fields(data, 4, rest);
    get_fields(data + kExponentBlock / 2, 1, part);
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) rest[k] |= part[k] << 4;
  }
  const uint8_t* const low = data + kExponentRow * kRest;
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k) {
    const uint32_t at = 32 * k + lane;
    words[k] = 0;
    if constexpr (D == kFloat32)
      words[k] = load_bytes<uint16_t>(low + 2 * at);
    else if constexpr (D == kFloat64)
      words[k] = load_bytes<uint32_t>(low + 4 * at) |
                 static_cast<uint64_t>(load_bytes<uint16_t>(low + 4 * kExponentBlock + 2 * at)) << 32;
  }
}

// Decode a block of m elements to this lane's words; false if it has another number of escapes than its code
// tells. The data have the length that the code tells.
template <DTypeCode D>
HC_DEVICE bool decode_block(uint8_t code, const uint8_t* data, uint32_t m, ExponentWordOf<D>* words) {
  using Word = ExponentWordOf<D>;
  constexpr int kRest = exponent_rest_bits(D), kWidth = static_cast<int>(exponent_width(D));
  const uint32_t lane = exponent_lane();
  if (code >= kExponentZeros) {
#pragma unroll
    for (int k = 0; k < kExponentEach; ++k) {
      const uint32_t at = 32 * k + lane;
      words[k] = code == kExponentRaw && at < m ? load_bytes<Word>(data + kWidth * at) : Word(0);
    }
    return true;
  }
  const ExponentForm form = exponent_form(code);
  const uint32_t escape = exponent_escape(form);
  uint32_t fields[kExponentEach], exponents[kExponentEach], rest[kExponentEach];
  const uint8_t* const rows = data + exponent_fields_at(D);
  const uint8_t* const list = rows + kExponentRow * form.bits;
  const auto get = [&](uint32_t index) -> uint32_t {
    if constexpr (D == kFloat64)
      return load_bytes<uint16_t>(list + 2 * index);
    else
      return list[index];
  };
  get_fields(rows, form.bits, fields);
  const auto field = [&](int k) { return fields[k]; };
  if (count_escapes(escape, field) != static_cast<uint32_t>(code - form.first)) return false;
  const uint32_t largest = get(0);
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k)
    exponents[k] = form.zero && fields[k] == escape - 1 ? 0u : largest - fields[k];
  each_escape(escape, field, [&](int k, uint32_t index) { exponents[k] = get(1 + index); });
  get_rest<D>(data, rest, words);
#pragma unroll
  for (int k = 0; k < kExponentEach; ++k) {
    const uint16_t top = exponent_rotated_back(static_cast<uint16_t>(exponents[k] << kRest | rest[k]));
    words[k] = static_cast<Word>(words[k] | static_cast<Word>(static_cast<Word>(top) << (8 * kWidth - 16)));
  }
  return true;
}

}  // namespace hybridcomp
