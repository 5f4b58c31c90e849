// The end of MPI with the process.
#include <string>

#include "engine/waiting/ending.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;

void bind_ending(nb::module_& m) {
  m.def(
      "end_mpi_at_exit",
      [](std::uintptr_t finalize, nb::bytes session, int launcher) {
        if (!finalize) Buffer::fail("MPI_Session_finalize has an address");
        engine::end_mpi_at_exit(reinterpret_cast<engine::SessionFinalize>(finalize), session.c_str(),
                                session.size(), launcher);
      },
      "finalize"_a, "session"_a, "launcher"_a);
  m.def("end_without_mpi_after", &engine::end_without_mpi_after, "socket"_a);
  m.def("leave_mpi", &engine::leave_mpi, "why"_a);
  m.def("mpi_has_ended", &engine::mpi_has_ended);
}

}  // namespace hybridcomp
