// Sums of integers as they are, of any size, and what else makes one of two.
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

// Bytes of an element, a float or one of those; 0 if there is none of that code.
constexpr std::size_t bytes_of(int dtype) {
  const bool is = dtype >= kFloat32 && dtype <= kUint64 && dtype != 10;  // that is bool
  return is ? element_bytes(static_cast<DTypeCode>(dtype)) : 0;
}

// Whether integers of a type are folded so: the larger one of two without a sign, the sum of any, modulo what
// they hold.
bool folds(Fold fold, int dtype);

// Fold n integers of so many bytes each into others. Both are aligned.
void fold_into(Fold fold, std::size_t size, const std::uint8_t* from, std::uint8_t* into, std::size_t n);

}  // namespace hybridcomp::engine
