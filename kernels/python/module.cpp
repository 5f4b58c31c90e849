// The Python module hybridcomp._kernels: argument checks, buffers and the GIL around the kernels.
#include "codecs/common/status.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
namespace {

std::uint32_t crc32c(nb::handle data, std::uint32_t init) {
  const Buffer buffer(data, false);
  nb::gil_scoped_release release;
  return kernels().crc32c(buffer.data(), buffer.bytes(), init);
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

void set_threads(int count) {
  if (count < 1 || count > kMaxThreads)
    Buffer::fail("threads must be from 1 to " + std::to_string(kMaxThreads) + ", not " +
                 std::to_string(count));
  set_thread_count(count);
}

}  // namespace
}  // namespace hybridcomp

NB_MODULE(_kernels, m) {
  using namespace hybridcomp;
  using namespace nb::literals;
  std::size_t count = 0;
  available_kernels(&count);
  if (!count)
    throw nb::import_error(
        "they were compiled for another processor alone; `make build`, or pip, compiles them for all");
  // The progress engine keeps memory that MPI may still write to until the process has gone.
  nb::set_leak_warnings(false);
  m.doc() = "Compiled CPU kernels of hybridcomp. Buffers are anything with the buffer protocol.";
  m.def("crc32c", &crc32c, "data"_a, "init"_a = 0);
  m.def("available_isas", &available_isas);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("set_isa", &set_isa, "name"_a);
  m.def("status_text", &status_text, "code"_a);
  m.def("threads", &thread_count);
  m.def("set_threads", &set_threads, "count"_a);
  bind_message(m);
  bind_convert(m);
  bind_deferral(m);
  bind_ending(m);
  bind_engine(m);
  bind_lanes(m);
  bind_carried_operations(m);
  bind_lattice(m);
  bind_lowrank(m);
  bind_memory(m);
  bind_mpi(m);
  bind_wait(m);
  bind_watchdog(m);
  bind_planes(m);
  bind_simulator(m);
  bind_sketch(m);
  bind_request(m);
  bind_span(m);
  bind_sparse(m);
  bind_sums(m);
}
