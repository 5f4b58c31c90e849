// The Python module hybridcomp._kernels: argument checks, buffers and the GIL around the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "hybridcomp/wire.hpp"
#include "indices.hpp"
#include "kernels.hpp"
#include "message.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace hybridcomp {
namespace {

// A Python object's memory, held for as long as this lives. Contiguous, of any alignment.
class Buffer {
 public:
  Buffer(nb::handle object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(view_.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

  // The number of elements of `size` bytes; ValueError if it is not whole.
  std::size_t elements(std::size_t size, const char* name) const {
    if (bytes() % size) fail(std::string(name) + " is not a whole number of elements");
    return bytes() / size;
  }

  // The same memory as floats; ValueError unless it is aligned and at least `count` long.
  float* floats(std::size_t count, const char* name) const {
    if (bytes() < count * sizeof(float) || reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(float))
      fail(std::string(name) + " must be " + std::to_string(count) + " aligned floats");
    return reinterpret_cast<float*>(view_.buf);
  }

  [[noreturn]] static void fail(const std::string& what) { throw nb::value_error(what.c_str()); }

 private:
  Py_buffer view_;
};

DTypeCode float_dtype(int code) {
  if (code < kFloat32 || code > kBFloat16)
    Buffer::fail("not a floating-point dtype code: " + std::to_string(code));
  return static_cast<DTypeCode>(code);
}

DTypeCode sum_dtype(int code) {
  if (code != kFloat32 && code != kFloat64) Buffer::fail("sums are kept in float32 or float64");
  return static_cast<DTypeCode>(code);
}

void check_quantizer(int bits, std::uint32_t block) {
  if (bits != 8 && bits != 4) Buffer::fail("bits must be 8 or 4");
  if (!valid_block(block)) Buffer::fail("block must be a multiple of 8 from 8 to 65536");
}

std::uint32_t crc32c(nb::handle data, std::uint32_t init) {
  const Buffer buffer(data, false);
  nb::gil_scoped_release release;
  return kernels().crc32c(buffer.data(), buffer.bytes(), init);
}

std::size_t quantize_encode(nb::handle src, int dtype, int bits, std::uint32_t block, int codec,
                            std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  check_quantizer(bits, block);
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + quantized_payload(n, type, block, bits)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return quantize_message(kernels(), from.data(), type, n, block, bits, static_cast<std::uint8_t>(codec),
                          params, to.data());
}

int quantize_decode(nb::handle payload, std::size_t n, int dtype, int bits, nb::handle out, int out_dtype,
                    bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  if (bits != 8 && bits != 4) Buffer::fail("bits must be 8 or 4");
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return dequantize_payload(kernels(), from.data(), from.bytes(), type, n, bits, to.data(), out_type, add);
}

int quantize_check(nb::handle payload, std::size_t n, int dtype, int bits) {
  const DTypeCode type = float_dtype(dtype);
  if (bits != 8 && bits != 4) Buffer::fail("bits must be 8 or 4");
  const Buffer from(payload, false);
  return check_quantized(from.data(), from.bytes(), type, n, bits);
}

void convert(nb::handle src, int src_dtype, nb::handle dst, int dst_dtype, bool add) {
  const DTypeCode from_type = float_dtype(src_dtype);
  const DTypeCode to_type = add ? sum_dtype(dst_dtype) : float_dtype(dst_dtype);
  const Buffer from(src, false), to(dst, true);
  const std::size_t n = from.elements(size_of(from_type), "src");
  if (to.elements(size_of(to_type), "dst") != n) Buffer::fail("dst must have as many elements as src");
  nb::gil_scoped_release release;
  kernels().convert(from.data(), from_type, to.data(), to_type, n, add);
}

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
    kernels().project_back(values, s.n, rows, cols, rank, fp, fq);
  else
    kernels().project(values, s.n, rows, cols, rank, fq, fp);
}

void lowrank_reconstruct(nb::handle p, nb::handle q, std::size_t rows, std::size_t cols, std::size_t rank,
                         nb::handle out, bool add) {
  const Buffer bp(p, false), bq(q, false), m(out, true);
  const Matrix s = matrix_of(m, rows, cols, rank);
  const float* fp = bp.floats(rows * rank, "p");
  const float* fq = bq.floats(cols * rank, "q");
  float* values = m.floats(s.n, "out");
  nb::gil_scoped_release release;
  kernels().reconstruct(fp, fq, s.n, rows, cols, rank, values, add);
}

void lowrank_orthogonalize(nb::handle vectors, std::size_t rows, std::size_t rank) {
  const Buffer v(vectors, true);
  if (rank && rows > (std::size_t(1) << 48) / rank) Buffer::fail("rows or rank is too large");
  float* values = v.floats(rows * rank, "vectors");
  nb::gil_scoped_release release;
  kernels().orthogonalize(values, rows, rank);
}

nb::list available_isas() {
  std::size_t count = 0;
  const Kernels* const* all = available_kernels(&count);
  nb::list names;
  for (std::size_t i = 0; i < count; ++i) names.append(all[i]->name);
  return names;
}

void set_isa(const std::string& name) {
  if (!use_kernels(name.c_str())) Buffer::fail("this CPU does not have the instruction set " + name);
}

}  // namespace
}  // namespace hybridcomp

NB_MODULE(_kernels, m) {
  using namespace hybridcomp;
  m.doc() = "Compiled CPU kernels of hybridcomp. Buffers are anything with the buffer protocol.";
  m.def("crc32c", &crc32c, "data"_a, "init"_a = 0);
  m.def("available_isas", &available_isas);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("set_isa", &set_isa, "name"_a);
  m.def("status_text", &status_text, "code"_a);
  m.def("quantize_encode", &quantize_encode, "src"_a, "dtype"_a, "bits"_a, "block"_a, "codec"_a, "params"_a,
        "out"_a);
  m.def("quantize_decode", &quantize_decode, "payload"_a, "n"_a, "dtype"_a, "bits"_a, "out"_a, "out_dtype"_a,
        "add"_a);
  m.def("quantize_check", &quantize_check, "payload"_a, "n"_a, "dtype"_a, "bits"_a);
  m.def("convert", &convert, "src"_a, "src_dtype"_a, "dst"_a, "dst_dtype"_a, "add"_a);
  m.def("topk_select", &topk_select, "src"_a, "dtype"_a, "k"_a, "indices"_a, "values"_a);
  m.def("topk_index_bound", &topk_index_bound, "n"_a, "k"_a);
  m.def("topk_scatter", &topk_scatter, "indices"_a, "n"_a, "k"_a, "values"_a, "out"_a, "dtype"_a, "add"_a);
  m.def("lowrank_project", &lowrank_project, "matrix"_a, "rows"_a, "cols"_a, "rank"_a, "q"_a, "p"_a,
        "back"_a);
  m.def("lowrank_reconstruct", &lowrank_reconstruct, "p"_a, "q"_a, "rows"_a, "cols"_a, "rank"_a, "out"_a,
        "add"_a);
  m.def("lowrank_orthogonalize", &lowrank_orthogonalize, "vectors"_a, "rows"_a, "rank"_a);
}
