// How many still read a block of memory that processes share: a count in the line before it.
#include <atomic>

#include "bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::atomic_ref<std::uint32_t> count_of(const Buffer& line) {
  if (line.bytes() < sizeof(std::uint32_t) ||
      reinterpret_cast<std::uintptr_t>(line.data()) % alignof(std::uint32_t))
    Buffer::fail("a lease is four aligned bytes");
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(line.data()));
}

// Reads of the block come before a negative change; who then sees none left may write.
void lease_add(nb::handle line, int readers) {
  count_of(Buffer(line, true)).fetch_add(static_cast<std::uint32_t>(readers), std::memory_order_acq_rel);
}

bool lease_held(nb::handle line) { return count_of(Buffer(line, true)).load(std::memory_order_acquire) != 0; }

}  // namespace

void bind_lease(nb::module_& m) {
  m.def("lease_add", &lease_add, "line"_a, "readers"_a);
  m.def("lease_held", &lease_held, "line"_a);
}

}  // namespace hybridcomp
