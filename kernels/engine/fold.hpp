// Folding of uncompressed elements, in the engine and in MPI.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/fold/fold.hpp"

namespace hybridcomp::engine {

// Return the bytes of an element that messages carry, but for bool; 0 if no such type has that code.
constexpr std::size_t bytes_of(int dtype) {
  const bool is = dtype >= kFloat32 && dtype <= kLastDType && dtype != 10;  // 10 is bool
  return is ? element_bytes(static_cast<DTypeCode>(dtype)) : 0;
}

// Whether elements of a type can be folded so.
bool folds(Fold fold, int dtype);

// Return the address of MPI's user function of a fold of a type, with a count of type MPI_Count if `large`; 0
// if there is none.
std::uintptr_t mpi_function(Fold fold, int dtype, bool large);

}  // namespace hybridcomp::engine
