// Waiting for any of MPI's requests, at a fraction of what a poll from Python costs.
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <vector>

#include "python/backoff.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// MPI_Request_get_status: leaves the request as it is. Of its arguments see mpi_call.hpp.
using GetStatus = int (*)(std::uint64_t, int*, void*);

class Wait {
 public:
  explicit Wait(std::uintptr_t get_status) : get_status_(reinterpret_cast<GetStatus>(get_status)) {
    if (!get_status) Buffer::fail("MPI_Request_get_status has an address");
  }

  // See PollingLock in hybridcomp/collectives/execution/wait.py.
  bool wait(const std::vector<std::uint64_t>& requests, double quiet, double brief, double least, double most,
            double share, double longest) {
    nb::gil_scoped_release release;
    alignas(16) std::array<std::uint8_t, 256> status;  // more than any MPI's
    const Backoff backoff(quiet, brief, least, most, share);
    while (true) {
      for (const std::uint64_t request : requests) {
        int done = 0;
        // An error is told to whoever tests the request.
        if (get_status_(request, &done, status.data()) || done) return true;
      }
      const double left = longest - backoff.seconds();
      if (left <= 0 || wanted_.load(std::memory_order_relaxed)) return false;
      backoff.wait(left);
    }
  }

  void want(int change) { wanted_.fetch_add(change, std::memory_order_relaxed); }

 private:
  GetStatus get_status_;
  std::atomic<int> wanted_ = 0;
};

}  // namespace

void bind_wait(nb::module_& m) {
  nb::class_<Wait>(m, "MpiWait")
      .def(nb::init<std::uintptr_t>(), "get_status"_a)
      .def("wait", &Wait::wait, "requests"_a, "quiet"_a, "brief"_a, "least"_a, "most"_a, "share"_a,
           "longest"_a)
      .def("want", &Wait::want, "change"_a);
}

}  // namespace hybridcomp
