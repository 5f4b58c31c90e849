#include "engine/fold.hpp"

#include <utility>

namespace hybridcomp::engine {
namespace {

// A user function of MPI is told the datatype by a handle, which is of another size in each MPI: so there is
// one for each type.
template <Fold F, int D, typename Count>
void reduce(void* from, void* into, Count* n, void*) {
  kernels().fold->into(F, D, from, into, static_cast<std::size_t>(*n));
}

template <typename Count, int D, int... F>
std::uintptr_t function_of(Fold fold, std::integer_sequence<int, F...>) {
  std::uintptr_t found = 0;
  ((static_cast<int>(fold) == F
        ? void(found = reinterpret_cast<std::uintptr_t>(&reduce<static_cast<Fold>(F), D, Count>))
        : void()),
   ...);
  return found;
}

template <int... D>
std::uintptr_t found(Fold fold, int dtype, bool large, std::integer_sequence<int, D...>) {
  constexpr std::make_integer_sequence<int, static_cast<int>(Fold::kFolds)> every;
  std::uintptr_t address = 0;
  ((dtype == D
        ? void(address = large ? function_of<std::int64_t, D>(fold, every) : function_of<int, D>(fold, every))
        : void()),
   ...);
  return address;
}

}  // namespace

bool folds(Fold fold, int dtype) { return kernels().fold->into(fold, dtype, nullptr, nullptr, 0); }

std::uintptr_t mpi_function(Fold fold, int dtype, bool large) {
  if (!folds(fold, dtype)) return 0;
  return found(fold, dtype, large,
               std::integer_sequence<int, kFloat32, kFloat64, kComplex64, kComplex128, kFloatAt, kDoubleAt,
                                     kLongDouble>());
}

}  // namespace hybridcomp::engine
