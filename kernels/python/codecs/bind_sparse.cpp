#include <nanobind/ndarray.h>

#include <memory>
#include <string>
#include <vector>

#include "codecs/sparse/indices.hpp"
#include "codecs/sparse/message.hpp"
#include "codecs/sparse/select.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// Call select(bytes, dtype, elements) without the GIL.
template <typename F>
auto selected(nb::handle src, int dtype, F select) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(src, false);
  const std::size_t n = from.elements(size_of(type), "src");
  nb::gil_scoped_release release;
  return select(from.data(), type, n);
}

Selected sparse_topk(nb::handle src, int dtype, std::size_t k) {
  return selected(src, dtype, [k](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    if (k > n) throw nb::value_error("k is larger than the number of elements");
    return select_largest(kernels(), data, type, n, k, true, thread_count());
  });
}

Selected sparse_threshold(nb::handle src, int dtype, double limit, bool relative) {
  if (!(limit >= 0)) Buffer::fail("limit must not be negative");
  return selected(src, dtype, [=](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    return select_threshold(kernels(), data, type, n, limit, relative, thread_count());
  });
}

SidcoFit sidco_fit(int stages, unsigned distribution, int least) {
  if (stages < least || stages > kMostStages)
    Buffer::fail("stages must be from " + std::to_string(least) + " to " + std::to_string(kMostStages));
  if (distribution > kPareto) Buffer::fail("distribution must be 0 or 1");
  return {stages, static_cast<Distribution>(distribution)};
}

Selected sparse_sidco(nb::handle src, int dtype, std::size_t k, int stages, unsigned distribution) {
  const SidcoFit fits = sidco_fit(stages, distribution, 0);
  return selected(src, dtype, [k, fits](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    if (k > n) throw nb::value_error("k is larger than the number of elements");
    return select_sidco(kernels(), data, type, n, k, fits, thread_count());
  });
}

double sparse_sidco_limit(nb::handle src, int dtype, std::size_t k, int stages, unsigned distribution) {
  const SidcoFit fits = sidco_fit(stages, distribution, 1);
  return selected(src, dtype, [k, fits](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    if (!k || k > n) throw nb::value_error("k must be from 1 to the number of elements");
    return sidco_limit(kernels(), data, type, n, k, fits);
  });
}

std::size_t write_indices(const Selected& selected, nb::handle indices) {
  const Buffer index(indices, true);
  if (index.bytes() < selected.index_bytes()) Buffer::fail("indices is too small");
  nb::gil_scoped_release release;
  selected.write_indices(index.data());
  return selected.index_bytes();
}

// -- selections whose values go to another codec -----------------------------------------------------------

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes values(Selected& selected) {
  const std::size_t bytes = selected.count() * size_of(selected.dtype());
  return Bytes(selected.values(), {bytes}, nb::find(selected));
}

std::size_t sparse_index_bound(std::size_t n, std::size_t k) { return index_bound(n, k); }

int sparse_scatter(nb::handle indices, std::size_t n, std::size_t k, nb::handle values, nb::handle out,
                   int dtype, bool add) {
  const DTypeCode type = add ? sum_dtype(dtype) : float_dtype(dtype);
  const Buffer index(indices, false), value(values, false), to(out, true);
  if (value.elements(size_of(type), "values") != k) Buffer::fail("values must have k elements");
  if (to.elements(size_of(type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return scatter(kernels(), {index.data(), index.bytes(), k, value.data()}, n, type, to.data(), add,
                 thread_count());
}

int sparse_sum(const nb::sequence& payloads, std::size_t n, int dtype, nb::handle out) {
  const DTypeCode type = sum_dtype(dtype);
  std::vector<std::unique_ptr<Buffer>> held;
  std::vector<SparsePayload> parts;
  for (nb::handle payload : payloads) {
    held.push_back(std::make_unique<Buffer>(payload, false));
    parts.push_back({held.back()->data(), held.back()->bytes()});
  }
  const Buffer to(out, true);
  if (to.elements(size_of(type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return sum_sparse_payloads(kernels(), parts, n, type, to.data(), thread_count());
}

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<Selected>(m, "Selected", "Elements that a sparse codec sends.")
      .def_prop_ro("count", &Selected::count)
      .def_prop_ro("values", &values, "Their bytes, in memory that belongs to this object.")
      .def("write_indices", &write_indices, "indices"_a, "Returns the bytes of the index section.");
  m.def("sparse_topk", &sparse_topk, "src"_a, "dtype"_a, "k"_a);
  m.def("sparse_threshold", &sparse_threshold, "src"_a, "dtype"_a, "limit"_a, "relative"_a);
  m.def("sparse_sidco", &sparse_sidco, "src"_a, "dtype"_a, "k"_a, "stages"_a, "distribution"_a);
  m.def("sparse_sidco_limit", &sparse_sidco_limit, "src"_a, "dtype"_a, "k"_a, "stages"_a, "distribution"_a);
  m.def("sparse_sidco_most", &sidco_most, "n"_a, "k"_a);
  m.def("sparse_index_bound", &sparse_index_bound, "n"_a, "k"_a);
  m.def("sparse_scatter", &sparse_scatter, "indices"_a, "n"_a, "k"_a, "values"_a, "out"_a, "dtype"_a,
        "add"_a);
  m.def("sparse_sum", &sparse_sum, "payloads"_a, "n"_a, "dtype"_a, "out"_a,
        "Write the sum of messages' payloads, in their order, to out; returns a Status.");
}

}  // namespace hybridcomp
