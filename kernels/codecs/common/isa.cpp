// One instruction set's table of kernels; compiled once for each with HC_ISA as the namespace. Nothing of the
// loops may have external linkage outside that namespace (see arithmetic.hpp).
#include "codecs/common/kernels.hpp"

#define HC_STRING(x) HC_STRING_(x)
#define HC_STRING_(x) #x

namespace hybridcomp::HC_ISA {

extern const BlockKernels block_kernels;
extern const BoundedKernels bounded_kernels;
extern const ConvertKernels convert_kernels;
extern const ExponentKernels exponent_kernels;
extern const FeedbackKernels feedback_kernels;
extern const FoldKernels fold_kernels;
extern const LatticeKernels lattice_kernels;
extern const FitKernels fit_kernels;
extern const LowrankKernels lowrank_kernels;
extern const MpcKernels mpc_kernels;
extern const PlanesKernels planes_kernels;
extern const MinifloatKernels minifloat_kernels;
extern const SignKernels sign_kernels;
extern const SketchKernels sketch_kernels;
extern const SparseKernels sparse_kernels;
extern const ZfpKernels zfp_kernels;

extern const Kernels table;
// clang-format off
const Kernels table = {
    .name = HC_STRING(HC_ISA),
    .crc32c = nullptr,  // chosen apart
    .block = &block_kernels,
    .bounded = &bounded_kernels,
    .convert = &convert_kernels,
    .exponent = &exponent_kernels,
    .feedback = &feedback_kernels,
    .fold = &fold_kernels,
    .lattice = &lattice_kernels,
    .fit = &fit_kernels,
    .lowrank = &lowrank_kernels,
    .mpc = &mpc_kernels,
    .planes = &planes_kernels,
    .minifloat = &minifloat_kernels,
    .sign = &sign_kernels,
    .sketch = &sketch_kernels,
    .sparse = &sparse_kernels,
    .zfp = &zfp_kernels,
};
// clang-format on

}  // namespace hybridcomp::HC_ISA
