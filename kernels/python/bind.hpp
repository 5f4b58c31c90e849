// Helpers that the bindings share: buffers of Python objects and checks of dtype codes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "codecs/common/kernels.hpp"
#include "codecs/common/parallel.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

namespace nb = nanobind;

// Memory of a Python object, held for as long as this lives: contiguous, of any alignment.
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

  // Return the number of elements of `size` bytes; ValueError if it is not whole.
  std::size_t elements(std::size_t size, const char* name) const {
    if (bytes() % size) fail(std::string(name) + " is not a whole number of elements");
    return bytes() / size;
  }

  // Return the memory as floats; ValueError unless it is aligned and at least `count` long.
  float* floats(std::size_t count, const char* name) const {
    if (bytes() < count * sizeof(float) || reinterpret_cast<std::uintptr_t>(view_.buf) % alignof(float))
      fail(std::string(name) + " must be " + std::to_string(count) + " aligned floats");
    return reinterpret_cast<float*>(view_.buf);
  }

  [[noreturn]] static void fail(const std::string& what) { throw nb::value_error(what.c_str()); }

 private:
  Py_buffer view_;
};

inline DTypeCode float_dtype(int code) {
  if (code < kFloat32 || code > kBFloat16)
    Buffer::fail("not a floating-point dtype code: " + std::to_string(code));
  return static_cast<DTypeCode>(code);
}

inline DTypeCode sum_dtype(int code) {
  if (code != kFloat32 && code != kFloat64) Buffer::fail("sums are kept in float32 or float64");
  return static_cast<DTypeCode>(code);
}

// Bind messages of any codec, and each family's functions.
void bind_message(nb::module_& m);
void bind_convert(nb::module_& m);
void bind_deferral(nb::module_& m);
void bind_ending(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_carried_operations(nb::module_& m);
void bind_lanes(nb::module_& m);
void bind_lattice(nb::module_& m);
void bind_lowrank(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_mpi(nb::module_& m);
void bind_wait(nb::module_& m);
void bind_watchdog(nb::module_& m);
void bind_planes(nb::module_& m);
void bind_simulator(nb::module_& m);
void bind_sketch(nb::module_& m);
void bind_request(nb::module_& m);
void bind_span(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_sums(nb::module_& m);

}  // namespace hybridcomp
