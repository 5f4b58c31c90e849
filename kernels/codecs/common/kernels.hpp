// The kernels that one instruction set provides: a table per family of codecs. All pointers are host memory
// of the caller, of any alignment unless said otherwise, and may not overlap. Sizes are in elements unless
// said otherwise. No kernel allocates, and none reads or writes outside the sizes it is given; values that
// come from a message are checked where they are used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/crc32c.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct BlockKernels;
struct BoundedKernels;
struct ConvertKernels;
struct ExponentKernels;
struct FeedbackKernels;
struct FoldKernels;
struct LatticeKernels;
struct FitKernels;
struct LowrankKernels;
struct MpcKernels;
struct PlanesKernels;
struct MinifloatKernels;
struct SignKernels;
struct SketchKernels;
struct SparseKernels;
struct ZfpKernels;

struct Kernels {
  const char* name;
  Crc32cFn crc32c;
  const BlockKernels* block;
  const BoundedKernels* bounded;
  const ConvertKernels* convert;
  const ExponentKernels* exponent;
  const FeedbackKernels* feedback;
  const FoldKernels* fold;
  const LatticeKernels* lattice;
  const FitKernels* fit;
  const LowrankKernels* lowrank;
  const MpcKernels* mpc;
  const PlanesKernels* planes;
  const MinifloatKernels* minifloat;
  const SignKernels* sign;
  const SketchKernels* sketch;
  const SparseKernels* sparse;
  const ZfpKernels* zfp;
};

// Return the tables of all instruction sets that this CPU has, best first.
const Kernels* const* available_kernels(std::size_t* count);

const Kernels& kernels();                // the table in use
bool use_kernels(const char* isa_name);  // false: this CPU does not have them

constexpr std::size_t blocks_of(std::size_t n, std::size_t block) { return n / block + (n % block != 0); }

constexpr std::size_t size_of(DTypeCode dtype) { return dtype == kFloat64 ? 8 : dtype == kFloat32 ? 4 : 2; }

constexpr bool is_float(DTypeCode dtype) { return dtype <= kBFloat16; }

// The same for any type that a header names, by its code in hybridcomp.arrays.DType.
constexpr std::uint8_t kLastDType = 15;
constexpr DTypeCode kComplex64{14}, kComplex128{15};
constexpr std::size_t element_bytes(DTypeCode dtype) {
  constexpr std::uint8_t kBytes[kLastDType + 1] = {0, 4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 2, 4, 8, 8, 16};
  return dtype <= kLastDType ? kBytes[dtype] : 0;
}

}  // namespace hybridcomp
