#include "codecs/convert/convert.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

void convert(nb::handle src, int src_dtype, nb::handle dst, int dst_dtype, bool add) {
  const DTypeCode from_type = float_dtype(src_dtype);
  const DTypeCode to_type = add ? sum_dtype(dst_dtype) : float_dtype(dst_dtype);
  const Buffer from(src, false), to(dst, true);
  const std::size_t n = from.elements(size_of(from_type), "src");
  if (to.elements(size_of(to_type), "dst") != n) Buffer::fail("dst must have as many elements as src");
  nb::gil_scoped_release release;
  convert_all(kernels(), from.data(), from_type, n, thread_count(), to.data(), to_type, add);
}

// Function of Python's that is told of an overflow; the reference is kept for ever.
PyObject* overflow_listener = nullptr;

// Call it, in the main thread, which Python lets do so between two of its instructions.
int call_listener(void*) {
  PyObject* const result = PyObject_CallNoArgs(overflow_listener);
  if (!result) PyErr_WriteUnraisable(overflow_listener);  // not into what the thread is at
  Py_XDECREF(result);
  return 0;
}

void listen_for_overflow(nb::callable tell) {
  overflow_listener = tell.release().ptr();
  tell_of_overflow([] { Py_AddPendingCall(call_listener, nullptr); });
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def("listen_for_overflow", &listen_for_overflow, "tell"_a);
  m.def("convert", &convert, "src"_a, "src_dtype"_a, "dst"_a, "dst_dtype"_a, "add"_a);
}

}  // namespace hybridcomp
