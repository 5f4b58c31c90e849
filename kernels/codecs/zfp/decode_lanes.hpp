// Decoding sixteen blocks at a time. The planes are those of zfp_plane_bits, looked up in registers.
#pragma once

#include "codecs/zfp/lanes.hpp"

#if defined(__AVX512BW__)

namespace hybridcomp::HC_ISA {
namespace {

// What follows the known values' bits, by base[known] | the bits below base[known]: for 1, 2, 3 and 4 known
// values 32 + 5 bits, 8 + 3, 2 + 1 and 1. No known value is first made one or more by LaneRuns.
struct LanePlanes {
  std::uint16_t plane[64] = {}, length[64] = {}, known[64] = {};
  std::uint32_t base[16] = {};
  constexpr LanePlanes() {
    for (unsigned n = 1; n <= 4; ++n) {
      base[n] = n == 4 ? 1 : 1u << (2 * (4 - n) - 1);
      for (unsigned bits = 0; bits < base[n]; ++bits) {
        const ZfpPlane p = zfp_plane_bits(bits << n, n);
        plane[base[n] | bits] = p.bits;
        length[base[n] | bits] = static_cast<std::uint16_t>(p.length - n);
        known[base[n] | bits] = p.known;
      }
    }
  }
};
alignas(64) constexpr LanePlanes kLanePlanes;
constexpr std::uint32_t kNothing = 4;  // a base whose entries are zero

// The first run of a plane without known values, by its four bits at most: what it sets, its length, and the
// base of what follows (nothing if the first bit is zero, which ends the plane).
struct LaneRuns {
  std::uint32_t plane[16] = {}, length[16] = {}, base[16] = {};
  constexpr LaneRuns() {
    for (unsigned bits = 0; bits < 16; ++bits) {
      length[bits] = 1;
      base[bits] = kNothing;
      if (bits % 2 == 0) continue;
      unsigned value = 0;
      while (value < 3 && ((bits >> length[bits]++) & 1) == 0) ++value;
      plane[bits] = 1u << value;
      base[bits] = kLanePlanes.base[value + 1];
    }
  }
};
alignas(64) constexpr LaneRuns kLaneRuns;

inline Lanes pick64(Lanes index, const std::uint16_t* table) {
  return _mm512_permutex2var_epi16(load(table), index, load(table + 32));
}

inline Lanes pick_if(Lanes otherwise, __mmask16 which, Lanes index, const std::uint32_t* table) {
  return _mm512_mask_permutexvar_epi32(otherwise, which, index, load(table));
}

// The state of sixteen blocks on their way through the planes.
template <int Words>
struct LaneReader {
  Lanes word[Words];
  Lanes at, known;
  Lanes planes;  // eight at most, the last lowest

  // The bits from `at`.
  Lanes window() const {
    Lanes bits = right(word[0], at);
    for (int w = 1; w < Words; ++w)
      bits = either(bits, right(word[w], minus(at, all(32 * w))), left(word[w], minus(all(32 * w), at)));
    return bits;
  }

  // Decode a plane; whether every block has come to its end.
  bool step(Lanes end) {
    const Lanes bits = window();
    Lanes skip = known, given = both(bits, minus(left(all(1), known), all(1)));
    Lanes base = pick(known, load(kLanePlanes.base));
    const __mmask16 fresh = _mm512_testn_epi32_mask(known, known);
    if (fresh) {
      skip = pick_if(skip, fresh, bits, kLaneRuns.length);
      given = pick_if(given, fresh, bits, kLaneRuns.plane);
      base = pick_if(base, fresh, bits, kLaneRuns.base);
    }
    const Lanes index = both_or(right(bits, skip), minus(base, all(1)), base);
    planes = either(_mm512_slli_epi32(planes, 4), given, pick64(index, kLanePlanes.plane));
    at = plus(plus(at, skip), pick64(index, kLanePlanes.length));
    const __mmask16 over = _mm512_cmpge_epu32_mask(at, end);
    if (over) {  // zfp_cut_run
      __mmask16 cut = _mm512_mask_cmpgt_epu32_mask(over, at, end);
      cut = _mm512_mask_cmplt_epu32_mask(cut, known, all(4));
      cut = _mm512_mask_test_epi32_mask(cut, planes, all(8));
      planes = _mm512_mask_xor_epi32(planes, cut, planes, exclusive(right(all(8), minus(at, end)), all(8)));
    }
    known = pick64(index, kLanePlanes.known);
    return over == 0xFFFF;
  }
};

// Groups of sixteen blocks' bits, as encode_lanes leaves them, to values; a mask of the lanes that it cannot
// do for each.
template <typename T, int Words, int Groups>
inline void decode_lanes(const std::uint32_t words[Groups][kLaneWords][kLanes], unsigned bits, T* out,
                         std::uint32_t rare[Groups]) {
  LaneReader<Words> reader[Groups];
  Lanes parts[Groups][kParts<T>][4] = {}, exponent[Groups];
  __mmask16 some[Groups];
  const Lanes end = all(bits);
  for (int g = 0; g < Groups; ++g) {
    for (int w = 0; w < Words; ++w) reader[g].word[w] = LaneValues<T>::reorder(load(words[g][w]));
    const Lanes head = reader[g].word[0];
    some[g] = _mm512_test_epi32_mask(head, all(1));
    exponent[g] = both(_mm512_srli_epi32(head, 1), all(kZfpMaxExponent<T>));
    rare[g] = _mm512_mask_cmplt_epu32_mask(some[g], exponent[g], all(kLeastExponent<T>));
    // A block of zeros is at its end.
    reader[g].at = _mm512_mask_mov_epi32(end, some[g], all(kZfpHeaderBits<T>));
    reader[g].known = _mm512_setzero_si512();
  }
  bool full = false;
  for (int byte = 0; byte < 4 * kParts<T> && !full; ++byte) {
    for (auto& r : reader) r.planes = _mm512_setzero_si512();
    int k = 0;
    while (k < 8 && !full) {
      full = true;
      for (auto& r : reader) full &= r.step(end);
      ++k;
    }
    const __m128i missing = _mm_cvtsi32_si128(4 * (8 - k)), down = _mm_cvtsi32_si128(byte % 4 * 8);
    for (int g = 0; g < Groups; ++g) {
      const Lanes b = bytes_of(_mm512_sll_epi32(reader[g].planes, missing));
      Lanes* u = parts[g][byte / 4];
      u[0] = either(u[0], _mm512_srl_epi32(_mm512_slli_epi32(b, 24), down));
      u[1] = either(u[1], _mm512_srl_epi32(_mm512_slli_epi32(both(b, all(0x00FF0000u)), 8), down));
      u[2] = either(u[2], _mm512_srl_epi32(_mm512_slli_epi32(both(b, all(0x0000FF00u)), 16), down));
      u[3] = either(u[3], _mm512_srl_epi32(both(b, all(0xFF000000u)), down));
    }
  }
  for (int g = 0; g < Groups; ++g)
    LaneValues<T>::write(parts[g], exponent[g], some[g], out + kLaneValues * g);
}

template <int Words, int Groups, typename T>
void decode_group(BitReader& reader, unsigned bits, T* out) {
  alignas(64) std::uint32_t words[Groups][kLaneWords][kLanes];
  for (int g = 0; g < Groups; ++g) {
    if (bits == 32) {
      reader.get_words(words[g], kLanes / 2);
      continue;
    }
    for (std::size_t b = 0; b < kLanes; ++b)
      for (int w = 0; w < Words; ++w)
        words[g][w][b] = static_cast<std::uint32_t>(reader.get(w < Words - 1 ? 32 : bits - 32 * (Words - 1)));
  }
  std::uint32_t rare[Groups];
  decode_lanes<T, Words, Groups>(words, bits, out, rare);
  std::uint64_t block[kBlockWords] = {};
  for (int g = 0; g < Groups; ++g) {
    for (; rare[g]; rare[g] &= rare[g] - 1) {
      const std::size_t b = LaneValues<T>::block_of(__builtin_ctz(rare[g]));
      for (int w = 0; w < Words; w += 2)
        block[w / 2] =
            words[g][w][b] | (w + 1 < Words ? static_cast<std::uint64_t>(words[g][w + 1][b]) << 32 : 0);
      decode_block(block, bits, out + kLaneValues * g + 4 * b);
    }
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
