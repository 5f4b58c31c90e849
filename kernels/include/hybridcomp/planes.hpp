// Byte planes, for host and device: the bytes of a word that make a plane, and the planes worth compressing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/arithmetic.hpp"

namespace hybridcomp {

constexpr int kMaxPlanes = 8;

// Words of a chunk whose bytes are counted: runs of words, evenly spread.
constexpr std::size_t kSampleRuns = 16;
constexpr std::size_t kSampleRun = 64;
constexpr std::size_t kLeastSample = 64;  // with fewer no plane is worth a frame's overhead

// Rotate a float's word left by one bit: then the highest byte holds only exponent bits (float32, bfloat16:
// all of them), and the sign lies with the mantissa's lowest bits.
template <typename Word>
HC_HD Word rotated(Word x) {
  return static_cast<Word>((x << 1) | (x >> (sizeof(Word) * 8 - 1)));
}
template <typename Word>
HC_HD Word rotated_back(Word x) {
  return static_cast<Word>((x >> 1) | (x << (sizeof(Word) * 8 - 1)));
}

// Whether a plane is worth compressing: `pairs` is the sum of count * (count - 1) over the byte values
// counted in a sample. pairs / (sample * (sample - 1)) estimates the chance that two bytes are equal: 1/256
// for noise. Above 1/160 the entropy is at most about log2(160) = 7.3 bits. This is computed in integers, so
// that all machines agree.
HC_HD bool compressible(std::uint64_t pairs, std::uint64_t sample) {
  return sample >= kLeastSample && pairs * 160 > sample * (sample - 1);
}

}  // namespace hybridcomp
