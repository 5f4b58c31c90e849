// Memory at an address as a buffer, and the address of a buffer. An array over a span holds its owner, and
// leaves no mark on it: torch allows a tensor that was asked for an array to be resized no more.
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

class Span {
 public:
  Span(std::uintptr_t address, std::size_t bytes, nb::object owner)
      : address_(address), bytes_(static_cast<Py_ssize_t>(bytes)), owner_(std::move(owner)) {}

  static int fill(PyObject* self, Py_buffer* view, int flags) {
    const Span& span = *nb::inst_ptr<Span>(self);
    return PyBuffer_FillInfo(view, self, reinterpret_cast<void*>(span.address_), span.bytes_, 0, flags);
  }

 private:
  std::uintptr_t address_;
  Py_ssize_t bytes_;
  nb::object owner_;
};

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&Span::fill)}, {0, nullptr}};

// Return the address of a contiguous array: NumPy's own ways to ask take microseconds.
std::uintptr_t address(nb::handle array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto at = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return at;
}

}  // namespace

void bind_span(nb::module_& m) {
  nb::class_<Span>(m, "Span", nb::type_slots(slots))
      .def(nb::init<std::uintptr_t, std::size_t, nb::object>(), "address"_a, "bytes"_a, "owner"_a);
  m.def("address", &address, "array"_a);
}

}  // namespace hybridcomp
