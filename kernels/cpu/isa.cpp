// All loops, compiled once per instruction set with HC_ISA as the namespace. Nothing here may have external
// linkage outside that namespace (see arithmetic.hpp).
#include "kernels.hpp"
#include "loops_block.hpp"
#include "loops_convert.hpp"
#include "loops_lowrank.hpp"
#include "loops_topk.hpp"

#define HC_STRING(x) HC_STRING_(x)
#define HC_STRING_(x) #x

namespace hybridcomp::HC_ISA {

extern const Kernels table;
const Kernels table = {
    HC_STRING(HC_ISA), nullptr,      quantize, dequantize,   convert,     topk_threshold,
    topk_candidates,   topk_collect, project,  project_back, reconstruct, orthogonalize,
};

}  // namespace hybridcomp::HC_ISA
