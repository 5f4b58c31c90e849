// Counts of the readers of blocks of shared memory: each in the line before its block.
#include <atomic>

#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::atomic_ref<std::uint32_t> count_at(std::uintptr_t lease) {
  if (!lease || lease % alignof(std::uint32_t)) Buffer::fail("a lease is four aligned bytes");
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(lease));
}

// Change a count of readers. All reads of the block come before a negative change: a process that then sees
// no reader left may write.
void lease_add(std::uintptr_t lease, int readers) {
  count_at(lease).fetch_add(static_cast<std::uint32_t>(readers), std::memory_order_acq_rel);
}

bool lease_held(std::uintptr_t lease) { return count_at(lease).load(std::memory_order_acquire) != 0; }

// Return the address of a contiguous array: NumPy's own ways to ask take microseconds.
std::uintptr_t address(nb::handle array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto at = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return at;
}

}  // namespace

void bind_lease(nb::module_& m) {
  m.def("lease_add", &lease_add, "lease"_a, "readers"_a);
  m.def("lease_held", &lease_held, "lease"_a);
  m.def("address", &address, "array"_a);
}

}  // namespace hybridcomp
