#include "bind.hpp"
#include "indices.hpp"
#include "topk.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::size_t topk_select(nb::handle src, int dtype, std::size_t k, nb::handle indices, nb::handle values) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(src, false), index(indices, true), value(values, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (k > n) Buffer::fail("k is larger than the number of elements");
  if (index.bytes() < index_bound(n, k)) Buffer::fail("indices is too small");
  if (value.bytes() < k * size_of(type)) Buffer::fail("values is too small");
  nb::gil_scoped_release release;
  return select_largest(kernels(), from.data(), type, n, k, index.data(), value.data());
}

std::size_t topk_index_bound(std::size_t n, std::size_t k) { return index_bound(n, k); }

int topk_scatter(nb::handle indices, std::size_t n, std::size_t k, nb::handle values, nb::handle out,
                 int dtype, bool add) {
  const DTypeCode type = add ? sum_dtype(dtype) : float_dtype(dtype);
  const Buffer index(indices, false), value(values, false), to(out, true);
  if (value.elements(size_of(type), "values") != k) Buffer::fail("values must have k elements");
  if (to.elements(size_of(type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return scatter(index.data(), index.bytes(), n, k, value.data(), type, to.data(), add);
}

}  // namespace

void bind_topk(nb::module_& m) {
  m.def("topk_select", &topk_select, "src"_a, "dtype"_a, "k"_a, "indices"_a, "values"_a);
  m.def("topk_index_bound", &topk_index_bound, "n"_a, "k"_a);
  m.def("topk_scatter", &topk_scatter, "indices"_a, "n"_a, "k"_a, "values"_a, "out"_a, "dtype"_a, "add"_a);
}

}  // namespace hybridcomp
