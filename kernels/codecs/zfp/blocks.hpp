// zfp's blocks one after another, by tables, and their bits in a stream of 64-bit words.
#pragma once

#include <cstring>

#include "codecs/common/kernels.hpp"
#include "hybridcomp/zfp.hpp"

namespace hybridcomp::HC_ISA {
namespace {

// Both directions of a plane's code, by the number of known values.
struct ZfpTables {
  ZfpPlane code[5][16] = {};
  ZfpPlane plane[5][1 << kZfpCodeBits] = {};
  constexpr ZfpTables() {
    for (unsigned known = 0; known <= 4; ++known) {
      for (unsigned x = 0; x < 16; ++x) code[known][x] = zfp_plane_code(x, known);
      for (unsigned x = 0; x < 1 << kZfpCodeBits; ++x) plane[known][x] = zfp_plane_bits(x, known);
    }
  }
};
constexpr ZfpTables kZfpTables;

// Words of a block's bits: those of the longest, and one for the end of a code that was cut off.
constexpr std::size_t kBlockWords = 256 / 64 + 1;

// Writer of bits, least significant first, to whole words.
class BitWriter {
 public:
  explicit BitWriter(std::uint8_t* out) : out_(out) {}

  // Append the low `count` (at most 64) bits of `value`; its other bits are zero.
  void put(std::uint64_t value, unsigned count) {
    word_ |= value << fill_;
    fill_ += count;
    if (fill_ < 64) return;
    write();
    fill_ -= 64;
    word_ = fill_ ? value >> (count - fill_) : 0;
  }

  // Append whole words, when those before are whole too.
  void put_words(const void* words, std::size_t count) {
    std::memcpy(out_, words, count * 8);
    out_ += count * 8;
  }

  void flush() {
    if (fill_) write();
  }

 private:
  void write() {
    std::memcpy(out_, &word_, 8);
    out_ += 8;
  }
  std::uint64_t word_ = 0;
  unsigned fill_ = 0;  // bits of word_, below 64
  std::uint8_t* out_;
};

// Reader of bits from whole words; a word is read when its first bit is asked for.
class BitReader {
 public:
  explicit BitReader(const std::uint8_t* in) : in_(in) {}

  std::uint64_t get(unsigned count) {  // 1 to 64
    std::uint64_t value = word_;
    if (left_ < count) {
      std::uint64_t next;
      std::memcpy(&next, in_, 8);
      in_ += 8;
      value |= next << left_;
      const unsigned taken = count - left_;  // bits of the new word
      word_ = taken < 64 ? next >> taken : 0;
      left_ = 64 - taken;
    } else {
      word_ = count < 64 ? word_ >> count : 0;
      left_ -= count;
    }
    return count < 64 ? value & ((std::uint64_t(1) << count) - 1) : value;
  }

  // Take whole words, when those before are used up.
  void get_words(void* words, std::size_t count) {
    std::memcpy(words, in_, count * 8);
    in_ += count * 8;
  }

 private:
  std::uint64_t word_ = 0;
  unsigned left_ = 0;  // bits of word_
  const std::uint8_t* in_;
};

// Encode a block of four values to `bits` bits in `words`; the rest of the last word is zero.
template <typename T>
void encode_block(const T* v, unsigned bits, std::uint64_t* words) {
  using Bits = typename Real<T>::Bits;
  Bits peak = magnitude(v[0]);
  for (int i = 1; i < 4; ++i) peak = magnitude(v[i]) > peak ? magnitude(v[i]) : peak;
  const unsigned last = (bits - 1) / 64;
  for (unsigned i = 0; i <= last; ++i) words[i] = 0;
  int e = zfp_exponent<T>(peak);
  if (e == 0) return;
  Bits u[4];
  if (peak >= Real<T>::kInfinity) {
    e = kZfpMaxExponent<T>;
    zfp_non_finite(u);
    for (Bits& c : u) c = (c + Zfp<T>::kNegabinary) ^ Zfp<T>::kNegabinary;
  } else {
    for (int i = 0; i < 4; ++i) u[i] = static_cast<Bits>(zfp_fixed(v[i], e));
    zfp_forward(u, Zfp<T>::kNegabinary);
  }
  std::uint64_t word = 2 * static_cast<std::uint64_t>(e) + 1;
  unsigned fill = kZfpHeaderBits<T>, at = 0, known = 0;
  const int end = Zfp<T>::kPlanes - zfp_planes<T>(e);
  for (int k = Zfp<T>::kPlanes; at * 64 + fill < bits && k-- > end;) {
    const unsigned plane =
        static_cast<unsigned>((u[0] >> k) & 1) | static_cast<unsigned>((u[1] >> k) & 1) << 1 |
        static_cast<unsigned>((u[2] >> k) & 1) << 2 | static_cast<unsigned>((u[3] >> k) & 1) << 3;
    const ZfpPlane c = kZfpTables.code[known][plane];
    known = c.known;
    word |= static_cast<std::uint64_t>(c.bits) << fill;
    fill += c.length;
    if (fill >= 64) {
      fill -= 64;
      words[at++] = word;
      word = c.bits >> (c.length - fill);
    }
  }
  words[at] = word;  // at most one past `last`
  if (bits % 64) words[last] &= (std::uint64_t(1) << (bits % 64)) - 1;
}

// Decode the values of a block's bits; `words` has zeros after them, a whole word at least.
template <typename T>
void decode_block(const std::uint64_t* words, unsigned bits, T* v) {
  using Bits = typename Real<T>::Bits;
  if ((words[0] & 1) == 0) {
    for (int i = 0; i < 4; ++i) v[i] = T(0);
    return;
  }
  const int e = static_cast<int>(words[0] >> 1) & kZfpMaxExponent<T>;
  Bits u[4] = {0, 0, 0, 0};
  unsigned known = 0;
  const int end = Zfp<T>::kPlanes - zfp_planes<T>(e);
  unsigned at = kZfpHeaderBits<T>;
  for (int k = Zfp<T>::kPlanes; at < bits && k-- > end;) {
    const std::uint64_t* word = words + at / 64;
    const std::uint64_t window = (word[0] >> (at % 64)) | (word[1] << 1 << (63 - at % 64));
    const ZfpPlane c = kZfpTables.plane[known][window & ((1u << kZfpCodeBits) - 1)];
    at += c.length;
    const unsigned plane = zfp_cut_run(c.bits, known, static_cast<int>(at) - static_cast<int>(bits));
    known = c.known;
    for (int i = 0; i < 4; ++i) u[i] |= static_cast<Bits>((plane >> i) & 1) << k;
  }
  zfp_inverse(u, Zfp<T>::kNegabinary);
  for (int i = 0; i < 4; ++i) v[i] = zfp_float<T>(static_cast<typename Real<T>::Signed>(u[i]), e);
}

// Copy a block's bits to a stream, or from it.
inline void put_block(BitWriter& writer, const std::uint64_t* words, unsigned bits) {
  for (; bits > 64; bits -= 64) writer.put(*words++, 64);
  writer.put(*words, bits);
}

inline void get_block(BitReader& reader, std::uint64_t* words, unsigned bits) {
  for (; bits > 64; bits -= 64) *words++ = reader.get(64);
  *words = reader.get(bits);
}

}  // namespace
}  // namespace hybridcomp::HC_ISA
