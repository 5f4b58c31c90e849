// Sums of uncompressed integers of any size, and other operations that make one integer of two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"

namespace hybridcomp::engine {

enum class Fold : std::uint8_t { kNone, kSum, kMax, kOr, kFolds };

// Integers by their codes in hybridcomp.arrays.DType.
enum Integer : std::uint8_t {
  kUint8 = 5,
  kInt8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
  kUint16 = 11,
  kUint32 = 12,
  kUint64 = 13
};

// Return the bytes of an element, a float or one of those integers; 0 if no type has that code.
constexpr std::size_t bytes_of(int dtype) {
  const bool is = dtype >= kFloat32 && dtype <= kUint64 && dtype != 10;  // 10 is bool
  return is ? element_bytes(static_cast<DTypeCode>(dtype)) : 0;
}

// Whether integers of a type can be folded so: the larger of two and the "or" of two for types without a
// sign, the sum for all, modulo 2^bits.
bool folds(Fold fold, int dtype);

// Fold n integers of so many bytes each into others. Both are aligned.
void fold_into(Fold fold, std::size_t size, const std::uint8_t* from, std::uint8_t* into, std::size_t n);

}  // namespace hybridcomp::engine
