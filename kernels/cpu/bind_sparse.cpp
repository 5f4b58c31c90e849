#include <nanobind/ndarray.h>

#include "bind.hpp"
#include "indices.hpp"
#include "select.hpp"
#include "sparse_message.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// Calls select(bytes, dtype, elements) without the GIL.
template <typename F>
Selected selected(nb::handle src, int dtype, F select) {
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

Selected sparse_threshold(nb::handle src, int dtype, double limit) {
  if (!(limit >= 0)) Buffer::fail("limit must not be negative");
  return selected(src, dtype, [limit](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    return select_reaching(kernels(), data, type, n, limit, thread_count());
  });
}

Selected sparse_relative(nb::handle src, int dtype, double times) {
  if (!(times >= 0)) Buffer::fail("times must not be negative");
  return selected(src, dtype, [times](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    const double limit = times * root_mean_square(kernels(), data, type, n, thread_count());
    return select_reaching(kernels(), data, type, n, limit, thread_count());
  });
}

Selected sparse_sidco(nb::handle src, int dtype, std::size_t k, int stages) {
  if (stages < 0 || stages > 8) Buffer::fail("stages must be from 0 to 8");
  return selected(src, dtype, [k, stages](const std::uint8_t* data, DTypeCode type, std::size_t n) {
    if (k > n) throw nb::value_error("k is larger than the number of elements");
    return select_sidco(kernels(), data, type, n, k, stages, thread_count());
  });
}

std::size_t write_indices(const Selected& selected, nb::handle indices) {
  const Buffer index(indices, true);
  if (index.bytes() < selected.index_bytes()) Buffer::fail("indices is too small");
  nb::gil_scoped_release release;
  selected.write_indices(index.data());
  return selected.index_bytes();
}

std::size_t write_message(const Selected& selected, nb::handle out, std::uint8_t codec, std::uint32_t params,
                          std::uint8_t plain, std::uint32_t plain_params) {
  const Buffer to(out, true);
  const std::size_t bytes = sparse_message_bytes(selected);
  if (to.bytes() < bytes) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  write_sparse_message(kernels(), selected, {codec, params}, {plain, plain_params}, to.data());
  return bytes;
}

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
  return scatter(kernels(), index.data(), index.bytes(), n, k, value.data(), type, to.data(), add,
                 thread_count());
}

int sparse_read(nb::handle message, std::size_t n, std::uint8_t plain, nb::handle out, int dtype, bool add) {
  const DTypeCode type = add ? sum_dtype(dtype) : float_dtype(dtype);
  const Buffer from(message, false), to(out, true);
  if (from.bytes() < sizeof(Header)) Buffer::fail("message is shorter than a header");
  if (to.elements(size_of(type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return read_sparse_payload(kernels(), from.data() + sizeof(Header), from.bytes() - sizeof(Header), n, type,
                             plain, to.data(), add, thread_count());
}

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<Selected>(m, "Selected", "Elements that a sparse codec sends.")
      .def_prop_ro("count", &Selected::count)
      .def_prop_ro("values", &values, "Their bytes, in memory that belongs to this object.")
      .def("write_indices", &write_indices, "indices"_a, "Returns the bytes of the index section.")
      .def("write_message", &write_message, "out"_a, "codec"_a, "params"_a, "plain"_a, "plain_params"_a,
           "The whole message, with the values as they are. Returns its bytes.");
  m.def("sparse_topk", &sparse_topk, "src"_a, "dtype"_a, "k"_a);
  m.def("sparse_threshold", &sparse_threshold, "src"_a, "dtype"_a, "limit"_a);
  m.def("sparse_relative", &sparse_relative, "src"_a, "dtype"_a, "times"_a);
  m.def("sparse_sidco", &sparse_sidco, "src"_a, "dtype"_a, "k"_a, "stages"_a);
  m.def("sparse_sidco_most", &sidco_most, "n"_a, "k"_a);
  m.def("sparse_index_bound", &sparse_index_bound, "n"_a, "k"_a);
  m.def("sparse_read", &sparse_read, "message"_a, "n"_a, "plain"_a, "out"_a, "dtype"_a, "add"_a,
        "Decode a message whose values are of this dtype and as they are. Returns a Status.");
  m.def("sparse_scatter", &sparse_scatter, "indices"_a, "n"_a, "k"_a, "values"_a, "out"_a, "dtype"_a,
        "add"_a);
}

}  // namespace hybridcomp
