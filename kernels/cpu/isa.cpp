// One instruction set's table of kernels; compiled once for each with HC_ISA as the namespace. Nothing of the
// loops may have external linkage outside that namespace (see arithmetic.hpp).
#include "kernels.hpp"

#define HC_STRING(x) HC_STRING_(x)
#define HC_STRING_(x) #x

namespace hybridcomp::HC_ISA {

extern const BlockKernels block_kernels;
extern const ConvertKernels convert_kernels;
extern const LowrankKernels lowrank_kernels;
extern const TopkKernels topk_kernels;

extern const Kernels table;
const Kernels table = {
    HC_STRING(HC_ISA),
    nullptr,  // the CRC is chosen apart
    &block_kernels,    &convert_kernels, &lowrank_kernels, &topk_kernels,
};

}  // namespace hybridcomp::HC_ISA
