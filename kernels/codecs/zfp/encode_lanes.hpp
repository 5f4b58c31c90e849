// Encoding a vector's blocks at a time. The planes' codes are those of zfp_plane_code, looked up in
// registers.
#pragma once

#include "codecs/zfp/lanes.hpp"

#if defined(__AVX2__)

namespace hybridcomp::HC_ISA {
namespace {

// Codes, indexed by 16 >> known | the bits of the unknown values: 1 to 31.
struct LaneCodes {
  LaneEntry code[32] = {}, length[32] = {}, known[32] = {};
  constexpr LaneCodes() {
    for (unsigned n = 0; n <= 4; ++n) {
      for (unsigned rest = 0; rest < 16u >> n; ++rest) {
        const ZfpPlane c = zfp_plane_code(rest << n, n);
        code[(16 >> n) | rest] = c.bits;
        length[(16 >> n) | rest] = c.length;
        known[(16 >> n) | rest] = c.known;
      }
    }
  }
};
alignas(64) constexpr LaneCodes kLaneCodes;

// Return how many values are known after a plane: as many as reach its highest bit, unless more were before.
inline Lanes known_after([[maybe_unused]] Lanes plane, [[maybe_unused]] Lanes rest,
                         [[maybe_unused]] Lanes known) {
#if defined(__AVX512BW__)
  return pick32(rest, kLaneCodes.known);
#else
  return _mm256_max_epi32(known, shuffled(kHighestBit.of, plane));
#endif
}

// State of a vector's blocks on their way through the planes.
template <int Words>
struct LaneWriter {
  Lanes word[Words];
  Lanes at, known;
  Lanes planes;  // eight, the next one highest

  void step() {
    const Lanes plane = next_plane(planes);
    const Lanes rest = right(plane, known);
    // the code of the rest, and the known values' bits: those of `plane` that `rest` lacks
    const Lanes code = or_exclusive(pick32(rest, kLaneCodes.code), plane, left(rest, known));
    word[0] = either(word[0], left(code, at));
    for (int w = 1; w < Words; ++w)
      word[w] = either(word[w], left(code, minus(at, all(32 * w))), right(code, minus(all(32 * w), at)));
    at = plus(at, pick32(rest, kLaneCodes.length));
    known = known_after(plane, rest, known);
  }
};

// Encode groups of kLanes blocks at `x` to their bits, word w of block b of group g at words[g][w][b]; `rare`
// gets, for each group, a mask of the lanes that it cannot do.
template <typename T, int Words, int Groups>
inline void encode_lanes(const T* x, unsigned bits, std::uint32_t words[Groups][kLaneWords][kLanes],
                         std::uint32_t rare[Groups]) {
  LaneWriter<Words> writer[Groups];
  Lanes parts[Groups][kParts<T>][4];
  Mask some[Groups];
  const Lanes end = all(bits);
  for (int g = 0; g < Groups; ++g) {
    Lanes exponent;
    Mask other;
    LaneValues<T>::read(x + kLaneValues * g, parts[g], exponent, some[g], other);
    rare[g] = bits_of_mask(other);
    writer[g].word[0] = plus(plus(exponent, exponent), all(1));
    for (int w = 1; w < Words; ++w) writer[g].word[w] = all(0);
    // A block of zeros starts at its end.
    writer[g].at = chosen(some[g], all(kZfpHeaderBits<T>), end);
    writer[g].known = all(0);
  }
  bool full = false;
  for (int byte = 0; byte < 4 * kParts<T> && !full; ++byte) {
    for (int g = 0; g < Groups; ++g) {
      Lanes* u = parts[g][byte / 4];
      writer[g].planes = nibbles_of(u);
      for (int i = 0; i < 4; ++i) u[i] = left<8>(u[i]);
    }
    for (int k = 0; k < 8 && !full; k += 2) {
      Mask open = none_of_lanes();
      for (auto& w : writer) {
        w.step();
        w.step();
        open = either_mask(open, less(w.at, end));
      }
      full = !any(open);
    }
  }
  for (int g = 0; g < Groups; ++g) {
    Lanes* word = writer[g].word;
    if (bits % 32) word[Words - 1] = both(word[Words - 1], all((1u << (bits % 32)) - 1));
    for (int w = 0; w < Words; ++w) store(words[g][w], LaneValues<T>::to_blocks(kept(some[g], word[w])));
  }
}

template <int Words, int Groups, typename T>
void encode_group(const T* x, unsigned bits, BitWriter& writer) {
  alignas(64) std::uint32_t words[Groups][kLaneWords][kLanes];
  std::uint32_t rare[Groups];
  encode_lanes<T, Words, Groups>(x, bits, words, rare);
  std::uint64_t block[kBlockWords];
  for (int g = 0; g < Groups; ++g) {
    for (; rare[g]; rare[g] &= rare[g] - 1) {
      const std::size_t b = LaneValues<T>::block_of(__builtin_ctz(rare[g]));
      encode_block(x + kLaneValues * g + 4 * b, bits, block);
      for (int w = 0; w < Words; ++w)
        words[g][w][b] = static_cast<std::uint32_t>(block[w / 2] >> (w % 2 * 32));
    }
    if (bits == 32) {
      writer.put_words(words[g], kLanes / 2);
      continue;
    }
    for (std::size_t b = 0; b < kLanes; ++b)
      for (int w = 0; w < Words; ++w)
        writer.put(words[g][w][b], w < Words - 1 ? 32 : bits - 32 * (Words - 1));
  }
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
#endif
