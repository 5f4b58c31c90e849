// Operations that make one element of two, on uncompressed arrays: of integers of any size, of floats, of
// complex numbers, and of a float with an index.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"

namespace hybridcomp {

// The two with an index take the value's, or of equal values the lower index: as MPI's MAXLOC and MINLOC.
enum class Fold : std::uint8_t { kNone, kSum, kMax, kOr, kMin, kProduct, kMaxAt, kMinAt, kFolds };

// Types beside the floats, by their codes in hybridcomp.arrays.DType.
enum Other : std::uint8_t {
  kUint8 = 5,
  kInt8 = 6,
  kInt16 = 7,
  kInt32 = 8,
  kInt64 = 9,
  kUint16 = 11,
  kUint32 = 12,
  kUint64 = 13
};

// Types that MPI alone carries: structures of C of a float or double and an int, and long double.
constexpr std::uint8_t kFloatAt = 32, kDoubleAt = 33, kLongDouble = 34;

struct FoldKernels {
  // Fold n elements of a type into others; returns whether the type is folded so. Neither need be aligned.
  //
  // Sums of integers are modulo 2^bits. The larger and the "or" are of integers without a sign; the larger,
  // the smaller and the product of floats are those of include/hybridcomp/fold.hpp, and so is every NaN.
  bool (*into)(Fold fold, int dtype, const void* from, void* into, std::size_t n);
};

}  // namespace hybridcomp
