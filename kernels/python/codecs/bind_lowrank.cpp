#include "codecs/lowrank/lowrank.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

struct Matrix {
  std::size_t n, rows, cols, rank;
};

Matrix matrix_of(const Buffer& m, std::size_t rows, std::size_t cols, std::size_t rank) {
  const std::size_t n = m.elements(sizeof(float), "matrix");
  constexpr std::size_t kMost = std::size_t(1) << 48;
  if (rows > kMost || cols > kMost || rank > kMost || (cols && rows > kMost / cols) ||
      (rank && (rows > kMost / rank || cols > kMost / rank)))
    Buffer::fail("rows, cols or rank is too large");
  if (n > rows * cols) Buffer::fail("matrix has more than rows * cols elements");
  return {n, rows, cols, rank};
}

void lowrank_project(nb::handle matrix, std::size_t rows, std::size_t cols, std::size_t rank, nb::handle q,
                     nb::handle p, bool back) {
  const Buffer m(matrix, false), bq(q, back), bp(p, !back);
  const Matrix s = matrix_of(m, rows, cols, rank);
  const float* values = m.floats(s.n, "matrix");
  float* fq = bq.floats(cols * rank, "q");
  float* fp = bp.floats(rows * rank, "p");
  nb::gil_scoped_release release;
  if (back)
    kernels().lowrank->project_back(values, s.n, rows, cols, rank, fp, fq);
  else
    kernels().lowrank->project(values, s.n, rows, cols, rank, fq, fp);
}

void lowrank_reconstruct(nb::handle p, nb::handle q, std::size_t rows, std::size_t cols, std::size_t rank,
                         nb::handle out, bool add) {
  const Buffer bp(p, false), bq(q, false), m(out, true);
  const Matrix s = matrix_of(m, rows, cols, rank);
  const float* fp = bp.floats(rows * rank, "p");
  const float* fq = bq.floats(cols * rank, "q");
  float* values = m.floats(s.n, "out");
  nb::gil_scoped_release release;
  kernels().lowrank->reconstruct(fp, fq, s.n, rows, cols, rank, values, add);
}

bool lowrank_replace(nb::handle p, nb::handle q, std::size_t rows, std::size_t cols, std::size_t rank,
                     nb::handle matrix, nb::handle lost) {
  const Buffer bp(p, false), bq(q, false), m(matrix, true), rest(lost, true);
  const Matrix s = matrix_of(m, rows, cols, rank);
  const float* fp = bp.floats(rows * rank, "p");
  const float* fq = bq.floats(cols * rank, "q");
  float* values = m.floats(s.n, "matrix");
  float* left = rest.floats(s.n, "lost");
  nb::gil_scoped_release release;
  return kernels().lowrank->replace(fp, fq, s.n, rows, cols, rank, values, left);
}

void lowrank_orthogonalize(nb::handle vectors, std::size_t rows, std::size_t rank) {
  const Buffer v(vectors, true);
  if (rank && rows > (std::size_t(1) << 48) / rank) Buffer::fail("rows or rank is too large");
  float* values = v.floats(rows * rank, "vectors");
  nb::gil_scoped_release release;
  kernels().lowrank->orthogonalize(values, rows, rank);
}

}  // namespace

void bind_lowrank(nb::module_& m) {
  m.def("lowrank_project", &lowrank_project, "matrix"_a, "rows"_a, "cols"_a, "rank"_a, "q"_a, "p"_a,
        "back"_a);
  m.def("lowrank_reconstruct", &lowrank_reconstruct, "p"_a, "q"_a, "rows"_a, "cols"_a, "rank"_a, "out"_a,
        "add"_a);
  m.def("lowrank_replace", &lowrank_replace, "p"_a, "q"_a, "rows"_a, "cols"_a, "rank"_a, "matrix"_a,
        "lost"_a);
  m.def("lowrank_orthogonalize", &lowrank_orthogonalize, "vectors"_a, "rows"_a, "rank"_a);
}

}  // namespace hybridcomp
