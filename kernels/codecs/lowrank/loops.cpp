// The products of PowerSGD: a large matrix times a thin one; compiled once per instruction set.
//
// The order of every sum is fixed, with sixteen partial sums whatever the instruction set, so that ranks on
// different machines get the same bits. The compiler lowers GCC's vector types to the instruction set's
// registers.
#include "codecs/common/tile.hpp"
#include "codecs/lowrank/lowrank.hpp"

namespace hybridcomp::HC_ISA {
namespace {

constexpr std::size_t kLanes = 16;

#if defined(__AVX512F__)
constexpr std::size_t kVector = 16;  // floats in a register
#elif defined(__AVX2__)
constexpr std::size_t kVector = 8;
#else
constexpr std::size_t kVector = 4;
#endif
typedef float Vector __attribute__((vector_size(kVector * sizeof(float))));
// The same in memory that is aligned for floats only.
typedef float LooseVector
    __attribute__((vector_size(kVector * sizeof(float)), aligned(alignof(float)), may_alias));

#define HC_INLINE inline __attribute__((always_inline))

// Sixteen floats, in one register or several.
struct Lanes {
  Vector v[kLanes / kVector];
};

HC_INLINE void load(Lanes& x, const float* p) {
  for (std::size_t i = 0; i < kLanes / kVector; ++i)
    x.v[i] = *reinterpret_cast<const LooseVector*>(p + i * kVector);
}
HC_INLINE void save(float* p, const Lanes& x) {
  for (std::size_t i = 0; i < kLanes / kVector; ++i)
    *reinterpret_cast<LooseVector*>(p + i * kVector) = x.v[i];
}

HC_INLINE void load_part(Lanes& x, const float* p, std::size_t m) {
  float part[kLanes] = {};
  std::memcpy(part, p, m * sizeof(float));
  load(x, part);
}

// Compute sum += x * y.
HC_INLINE void multiply_add(Lanes& sum, const Lanes& x, const Lanes& y) {
  for (std::size_t i = 0; i < kLanes / kVector; ++i) sum.v[i] += x.v[i] * y.v[i];
}
HC_INLINE void multiply_add(Lanes& sum, const Lanes& x, float y) {
  for (std::size_t i = 0; i < kLanes / kVector; ++i) sum.v[i] += x.v[i] * y;
}

HC_INLINE float sum(const Lanes& x) {
  float part[kLanes];
  save(part, x);
  for (std::size_t width = kLanes / 2; width; width /= 2)
    for (std::size_t i = 0; i < width; ++i) part[i] += part[i + width];
  return part[0];
}

// Call f.operator()<R>(k) for groups of R vectors that together are the `rank` vectors, k the first of each.
template <typename F>
void in_groups(std::size_t rank, F f) {
  std::size_t k = 0;
  for (; k + 4 <= rank; k += 4) f.template operator()<4>(k);
  for (; k + 2 <= rank; k += 2) f.template operator()<2>(k);
  for (; k < rank; ++k) f.template operator()<1>(k);
}

// Replace every NaN by one: which operand's NaN a sum keeps is up to the compiler.
void canonical_nans(float* v, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) v[i] = v[i] != v[i] ? float_of(Real<float>::kNan) : v[i];
}

// Return how many elements of row i exist when only the first n of the matrix do.
std::size_t row_length(std::size_t n, std::size_t i, std::size_t cols) {
  return n > i * cols ? smaller(cols, n - i * cols) : 0;
}

// Multiply `Rows` rows of the same length by R vectors of q: each piece of q that is loaded serves all rows.
template <std::size_t Rows, std::size_t R>
void project_rows(const float* m, std::size_t length, std::size_t cols, std::size_t rank, const float* q,
                  float* p) {
  Lanes sums[Rows][R] = {};
  Lanes x[Rows], y;
  std::size_t j = 0;
  for (; j + kLanes <= length; j += kLanes) {
    for (std::size_t s = 0; s < Rows; ++s) load(x[s], m + s * cols + j);
    for (std::size_t k = 0; k < R; ++k) {
      load(y, q + k * cols + j);
      for (std::size_t s = 0; s < Rows; ++s) multiply_add(sums[s][k], x[s], y);
    }
  }
  if (j < length) {
    for (std::size_t s = 0; s < Rows; ++s) load_part(x[s], m + s * cols + j, length - j);
    for (std::size_t k = 0; k < R; ++k) {
      load_part(y, q + k * cols + j, length - j);
      for (std::size_t s = 0; s < Rows; ++s) multiply_add(sums[s][k], x[s], y);
    }
  }
  for (std::size_t s = 0; s < Rows; ++s)
    for (std::size_t k = 0; k < R; ++k) p[s * rank + k] = sum(sums[s][k]);
}

template <std::size_t Rows>
void project_rows(const float* m, std::size_t length, std::size_t cols, std::size_t rank, const float* q,
                  float* p) {
  in_groups(rank, [&]<std::size_t R>(std::size_t k) {
    project_rows<Rows, R>(m, length, cols, rank, q + k * cols, p + k);
  });
}

void project(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
             const float* q, float* p) {
  constexpr std::size_t kRows = kVector == 16 ? 4 : 2;  // rows that registers hold; sums do not depend on it
  std::size_t i = 0;
  for (; i + kRows <= rows && (i + kRows) * cols <= n; i += kRows)
    project_rows<kRows>(m + i * cols, cols, cols, rank, q, p + i * rank);
  for (; i < rows; ++i) {
    const std::size_t length = row_length(n, i, cols);
    project_rows<1>(m + (length ? i * cols : 0), length, cols, rank, q, p + i * rank);
  }
  canonical_nans(p, rows * rank);
}

// Columns of the tile that R vectors of q and some rows of m share in L1.
constexpr std::size_t kTileColumns = 1024;

// q[k][0 .. width) += sum over the rows, in their order, of m[i][..] * p[i][k], for R vectors.
template <std::size_t R>
void project_back_tile(const float* m, std::size_t first_column, std::size_t width, std::size_t n,
                       std::size_t rows, std::size_t cols, std::size_t rank, const float* p, float* q) {
  constexpr std::size_t kRows = 4;
  std::size_t full = n / cols;  // rows that exist whole
  full = smaller(full, rows);
  std::size_t i = 0;
  for (; i + kRows <= full; i += kRows) {
    const float* row = m + i * cols + first_column;
    std::size_t j = 0;
    Lanes x[kRows], y;
    for (; j + kLanes <= width; j += kLanes) {
      for (std::size_t s = 0; s < kRows; ++s) load(x[s], row + s * cols + j);
      for (std::size_t k = 0; k < R; ++k) {
        load(y, q + k * cols + j);
        for (std::size_t s = 0; s < kRows; ++s) multiply_add(y, x[s], p[(i + s) * rank + k]);
        save(q + k * cols + j, y);
      }
    }
    for (; j < width; ++j)
      for (std::size_t k = 0; k < R; ++k)
        for (std::size_t s = 0; s < kRows; ++s) q[k * cols + j] += row[s * cols + j] * p[(i + s) * rank + k];
  }
  for (; i < rows; ++i) {
    const std::size_t length = row_length(n, i, cols);
    const std::size_t end = length > first_column ? smaller(width, length - first_column) : 0;
    for (std::size_t k = 0; k < R; ++k)
      for (std::size_t j = 0; j < end; ++j)
        q[k * cols + j] += m[i * cols + first_column + j] * p[i * rank + k];
  }
}

void project_back(const float* m, std::size_t n, std::size_t rows, std::size_t cols, std::size_t rank,
                  const float* p, float* q) {
  if (!cols || !rank) return;
  for (std::size_t first = 0; first < cols; first += kTileColumns) {
    const std::size_t width = smaller(kTileColumns, cols - first);
    in_groups(rank, [&]<std::size_t R>(std::size_t k) {
      project_back_tile<R>(m, first, width, n, rows, cols, rank, p + k, q + k * cols + first);
    });
  }
  canonical_nans(q, rank * cols);
}

// line[0 .. width) += sum over R vectors of p[k] * q[k][..]
template <std::size_t R>
void reconstruct_line(const float* p, const float* q, std::size_t width, std::size_t cols, float* line) {
  Lanes x, y;
  std::size_t j = 0;
  for (; j + kLanes <= width; j += kLanes) {
    load(x, line + j);
    for (std::size_t k = 0; k < R; ++k) {
      load(y, q + k * cols + j);
      multiply_add(x, y, p[k]);
    }
    save(line + j, x);
  }
  for (; j < width; ++j)
    for (std::size_t k = 0; k < R; ++k) line[j] += q[k * cols + j] * p[k];
}

// Calls take(at, line, width) for pieces of the rows of P Q^T, which begin at element `at`.
template <typename F>
void over_lines(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
                std::size_t rank, F take) {
  alignas(64) float line[kTileColumns];
  for (std::size_t first = 0; first < cols; first += kTileColumns) {
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t length = row_length(n, i, cols);
      if (length <= first) break;  // later rows are no longer
      const std::size_t width = smaller(kTileColumns, length - first);
      std::memset(line, 0, width * sizeof(float));
      in_groups(rank, [&]<std::size_t R>(std::size_t k) {
        reconstruct_line<R>(p + i * rank + k, q + k * cols + first, width, cols, line);
      });
      take(i * cols + first, line, width);
    }
  }
}

void reconstruct(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
                 std::size_t rank, float* m, bool add) {
  over_lines(p, q, n, rows, cols, rank, [&](std::size_t at, const float* line, std::size_t width) {
    if (add)
      for (std::size_t j = 0; j < width; ++j) m[at + j] = quieted(m[at + j] + line[j]);
    else
      std::memcpy(m + at, line, width * sizeof(float));
  });
}

bool replace(const float* p, const float* q, std::size_t n, std::size_t rows, std::size_t cols,
             std::size_t rank, float* m, float* lost) {
  std::uint32_t peak = 0;
  over_lines(p, q, n, rows, cols, rank, [&](std::size_t at, const float* line, std::size_t width) {
    float* const value = m + at;
    float* const rest = lost + at;
    for (std::size_t j = 0; j < width; ++j) {
      const float left = value[j] - line[j];
      value[j] = line[j];
      rest[j] = left;
      const std::uint32_t size = magnitude(left);
      peak = size > peak ? size : peak;
    }
  });
  return peak < Real<float>::kInfinity;
}

// Return the dot product, in eight partial sums.
double dot(const float* a, const float* b, std::size_t n) {
  double sums[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (std::size_t l = 0; l < 8; ++l)
      sums[l] += static_cast<double>(a[i + l]) * static_cast<double>(b[i + l]);
  double total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  for (; i < n; ++i) total += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return total;
}

// Modified Gram-Schmidt, each vector orthogonalized twice ("twice is enough"), in double where it matters.
void orthogonalize(float* v, std::size_t rows, std::size_t rank) {
  constexpr double kDependent = 1e-12;  // squared share left of a vector below which it is rounding noise
  for (std::size_t k = 0; k < rank; ++k) {
    float* x = v + k * rows;
    const double before = dot(x, x, rows);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t l = 0; l < k; ++l) {
        const float* y = v + l * rows;
        const double along = dot(x, y, rows);
        for (std::size_t i = 0; i < rows; ++i)
          x[i] = static_cast<float>(static_cast<double>(x[i]) - along * static_cast<double>(y[i]));
      }
    }
    const double after = dot(x, x, rows);
    if (after <= before * kDependent) {
      std::memset(x, 0, rows * sizeof(float));
      continue;
    }
    if (!(after < float_of(Real<double>::kInfinity))) {  // NaN too: it must survive
      for (std::size_t i = 0; i < rows; ++i) x[i] = float_of(Real<float>::kNan);
      continue;
    }
    const double norm = __builtin_sqrt(after);
    for (std::size_t i = 0; i < rows; ++i) x[i] = static_cast<float>(static_cast<double>(x[i]) / norm);
  }
}

}  // namespace

extern const LowrankKernels lowrank_kernels;
const LowrankKernels lowrank_kernels = {project, project_back, reconstruct, replace, orthogonalize};

}  // namespace hybridcomp::HC_ISA
