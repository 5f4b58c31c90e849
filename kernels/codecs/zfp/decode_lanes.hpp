// Decoding a vector's blocks at a time. The planes are those of zfp_plane_bits, looked up in registers.
#pragma once

#include "codecs/zfp/lanes.hpp"

#if defined(__AVX2__)

namespace hybridcomp::HC_ISA {
namespace {

// Return base[known]. The bits that follow the known values' are looked up by base[known] | the bits below
// it: for 1, 2, 3 and 4 known values 32 + 5 bits, 8 + 3, 2 + 1 and 1. A block without known values first gets
// one or more by LaneRuns.
constexpr unsigned lane_base(unsigned known) {
  return known == 0 ? 0 : known == 4 ? 1 : 1u << (2 * (4 - known) - 1);
}

// Call f(index, plane, length, known) for each index.
template <typename F>
constexpr void each_lane_plane(F f) {
  for (unsigned n = 1; n <= 4; ++n)
    for (unsigned bits = 0; bits < lane_base(n); ++bits) {
      const ZfpPlane p = zfp_plane_bits(bits << n, n);
      f(lane_base(n) | bits, unsigned(p.bits), unsigned(p.length - n), unsigned(p.known));
    }
}

struct LaneBases {
  LaneEntry base[16] = {};
  constexpr LaneBases() {
    for (unsigned n = 0; n <= 4; ++n) base[n] = static_cast<LaneEntry>(lane_base(n));
  }
};
alignas(64) constexpr LaneBases kLaneBases;

// Bits that a plane adds to the known values' bits, its length without these, and how many values are known
// after it.
struct LanePlane {
  Lanes bits, length, known;
};

#if defined(__AVX512BW__)

struct LanePlanes {
  std::uint16_t plane[64] = {}, length[64] = {}, known[64] = {};
  constexpr LanePlanes() {
    each_lane_plane([this](unsigned at, unsigned bits, unsigned bits_long, unsigned n) {
      plane[at] = static_cast<std::uint16_t>(bits);
      length[at] = static_cast<std::uint16_t>(bits_long);
      known[at] = static_cast<std::uint16_t>(n);
    });
  }
};
alignas(64) constexpr LanePlanes kLanePlanes;

inline Lanes pick64(Lanes index, const std::uint16_t* table) {
  return _mm512_permutex2var_epi16(load(table), index, load(table + 32));
}

inline LanePlane plane_at(Lanes index, Lanes, Lanes) {
  return {pick64(index, kLanePlanes.plane), pick64(index, kLanePlanes.length),
          pick64(index, kLanePlanes.known)};
}

#else

// Tables with bits and length in a byte. Indices 16 to 31 do not occur.
struct LanePlanes {
  LaneEntry low[16] = {}, high[32] = {};
  constexpr LanePlanes() {
    each_lane_plane([this](unsigned at, unsigned bits, unsigned length, unsigned) {
      (at < 16 ? low[at] : high[at - 32]) = static_cast<LaneEntry>(bits | length << 4);
    });
  }
};
alignas(64) constexpr LanePlanes kLanePlanes;

// Look a plane up. The known values reach as far as the highest bit that was ever set.
inline LanePlane plane_at(Lanes index, Lanes given, Lanes known) {
  const Lanes low = _mm256_adds_epu8(index, _mm256_set1_epi8(0x70));  // top bits from 16 up
  const Lanes high = _mm256_sub_epi8(index, _mm256_set1_epi8(0x20));  // and below 32
  const Lanes found = either(shuffled(kLanePlanes.low, low), pick32(high, kLanePlanes.high));
  const Lanes bits = both(found, all(15));
  return {bits, right<4>(found), _mm256_max_epi32(known, shuffled(kHighestBit.of, either(given, bits)))};
}

#endif

constexpr std::uint32_t kNothing = 4;  // a base whose entries are zero

// First run of a plane without known values, by its four bits at most: the bit that it sets, its length, and
// the base of the bits that follow (kNothing if the first bit is zero, which ends the plane).
struct LaneRuns {
  LaneEntry plane[16] = {}, length[16] = {}, base[16] = {};
  constexpr LaneRuns() {
    for (unsigned bits = 0; bits < 16; ++bits) {
      length[bits] = 1;
      base[bits] = kNothing;
      if (bits % 2 == 0) continue;
      unsigned value = 0;
      while (value < 3 && ((bits >> length[bits]++) & 1) == 0) ++value;
      plane[bits] = static_cast<LaneEntry>(1u << value);
      base[bits] = static_cast<LaneEntry>(lane_base(value + 1));
    }
  }
};
alignas(64) constexpr LaneRuns kLaneRuns;

// State of a vector's blocks on their way through the planes.
template <int Words>
struct LaneReader {
  Lanes word[Words];
  Lanes at, known;
  Lanes planes;  // eight at most, the last lowest

  // Return the bits from `at` on.
  Lanes window() const {
    Lanes bits = right(word[0], at);
    for (int w = 1; w < Words; ++w)
      bits = either(bits, right(word[w], minus(at, all(32 * w))), left(word[w], minus(all(32 * w), at)));
    return bits;
  }

  // Decode a plane; returns whether every block has come to its end.
  bool step(Lanes end) {
    const Lanes bits = window();
    // All three are zero where no value is known.
    Lanes skip = known, given = both(bits, minus(left(all(1), known), all(1)));
    Lanes base = pick16(known, kLaneBases.base);
    const Mask fresh = zero(known);
    if (any(fresh)) {
      skip = pick16_if(fresh, skip, bits, kLaneRuns.length);
      given = pick16_if(fresh, given, bits, kLaneRuns.plane);
      base = pick16_if(fresh, base, bits, kLaneRuns.base);
    }
    const Lanes index = both_or(right(bits, skip), minus(base, all(1)), base);
    const LanePlane plane = plane_at(index, given, known);
    planes = either(left<4>(planes), given, plane.bits);
    at = plus(plus(at, skip), plane.length);
    const Mask inside = less(at, end);
    if (!every(inside)) {  // zfp_cut_run
      const Lanes last = kept(less(known, all(4)), both(planes, all(8)));
      planes = exclusive(planes, last, right(last, larger(minus(at, end), all(0))));
    }
    known = plane.known;
    return !any(inside);
  }
};

// Decode groups of kLanes blocks' bits, as encode_lanes leaves them, to values; `rare` gets, for each group,
// a mask of the lanes that it cannot do.
template <typename T, int Words, int Groups>
inline void decode_lanes(const std::uint32_t words[Groups][kLaneWords][kLanes], unsigned bits, T* out,
                         std::uint32_t rare[Groups]) {
  LaneReader<Words> reader[Groups];
  Lanes parts[Groups][kParts<T>][4] = {}, exponent[Groups];
  Mask some[Groups];
  const Lanes end = all(bits);
  for (int g = 0; g < Groups; ++g) {
    for (int w = 0; w < Words; ++w) reader[g].word[w] = LaneValues<T>::from_blocks(load(words[g][w]));
    const Lanes head = reader[g].word[0];
    some[g] = common_bits(head, all(1));
    exponent[g] = both(right<1>(head), all(kZfpMaxExponent<T>));
    rare[g] = bits_of_mask(both_masks(some[g], less(exponent[g], all(kLeastExponent<T>))));
    // A block of zeros starts at its end.
    reader[g].at = chosen(some[g], all(kZfpHeaderBits<T>), end);
    reader[g].known = all(0);
  }
  bool full = false;
  for (int byte = 0; byte < 4 * kParts<T> && !full; ++byte) {
    for (auto& r : reader) r.planes = all(0);
    int k = 0;
    while (k < 8 && !full) {
      full = true;
      for (auto& r : reader) full &= r.step(end);
      ++k;
    }
    for (int g = 0; g < Groups; ++g) {
      const Lanes b = bytes_of(left_by(reader[g].planes, 4 * (8 - k)));
      Lanes* u = parts[g][byte / 4];
      const int down = byte % 4 * 8;
      u[0] = either(u[0], right_by(left<24>(b), down));
      u[1] = either(u[1], right_by(left<8>(both(b, all(0x00FF0000u))), down));
      u[2] = either(u[2], right_by(left<16>(both(b, all(0x0000FF00u))), down));
      u[3] = either(u[3], right_by(both(b, all(0xFF000000u)), down));
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
