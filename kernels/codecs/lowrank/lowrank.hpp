// Kernels of PowerSGD's products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/wire.hpp"

namespace hybridcomp {

struct LowrankKernels {
  // p[i][k] = sum over j of m[i][j] * q[k][j]: m is row-major [rows][cols] of which the first n elements
  // exist and the rest count as zero; q is [rank][cols], p is [rows][rank]. Aligned to 4 bytes, as are those
  // below.
  void (*project)(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
                  const float* q, float* p);

  // q[k][j] += sum over i of m[i][j] * p[i][k], the terms one after another.
  void (*project_back)(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
                       const float* p, float* q);

  // m[i][j] = (or with `add` +=) sum over k of p[i][k] * q[k][j], the first n elements.
  void (*reconstruct)(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
                      std::size_t rank, float* m, bool add);

  // Replace the first n elements of m by the same products, and write m less the products to `lost`. Returns
  // whether all of `lost` is finite.
  bool (*replace)(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
                  std::size_t rank, float* m, float* lost);

  // Orthonormalize `rank` vectors of `rows` elements, one after another: v is [rank][rows]. A vector that
  // depends on those before it becomes zero; non-finite values spread to the vectors after them.
  void (*orthogonalize)(float* v, std::size_t rows, std::size_t rank);
};

}  // namespace hybridcomp
