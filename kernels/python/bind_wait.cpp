// Waiting for any of MPI's requests, and for a ring, at a fraction of the cost in Python.
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>
#include <vector>

#include "engine/waiting/backoff.hpp"
#include "engine/waiting/watchdog.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// MPI_Request_get_status, which leaves the request as it is. For its arguments see mpi_call.hpp.
using GetStatus = int (*)(std::uint64_t, int*, void*);

class Wait {
 public:
  explicit Wait(std::uintptr_t get_status) : get_status_(reinterpret_cast<GetStatus>(get_status)) {
    if (!get_status) Buffer::fail("MPI_Request_get_status has an address");
  }
  ~Wait() {
    if (bell_ >= 0) close(bell_);
  }
  Wait(const Wait&) = delete;
  Wait& operator=(const Wait&) = delete;

  // See PollingLock in hybridcomp/collectives/execution/wait.py.
  bool wait(const std::vector<std::uint64_t>& requests, double quiet, double brief, double least, double most,
            double share, double longest) {
    nb::gil_scoped_release release;
    alignas(16) std::array<std::uint8_t, 256> status;  // more than any MPI's
    engine::Backoff backoff({.yielding = brief, .least = least, .most = most, .share = share}, quiet, bell_);
    while (true) {
      for (const std::uint64_t request : requests) {
        const engine::InsideMpi inside;
        int done = 0;
        // The thread that tests the request gets its error.
        if (get_status_(request, &done, status.data()) || done) {
          backoff.found();
          return true;
        }
      }
      const double left = longest - backoff.seconds();
      if (left <= 0 || wanted_.load()) return false;
      backoff.wait(left);
    }
  }

  // Note that a thread wants the waiting thread's lock, or (-1) has got it.
  void want(int change) {
    wanted_.fetch_add(change);
    std::uint64_t count = 1;
    // If this fails, the bell has rung already, or another thread has read it: there is no more to do.
    const ssize_t moved =
        change > 0 ? write(bell_, &count, sizeof(count)) : read(bell_, &count, sizeof(count));
    static_cast<void>(moved);
  }

 private:
  GetStatus get_status_;
  std::atomic<int> wanted_ = 0;
  int bell_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // ends the waiting thread's sleep
};

// Alarm on which a background thread sleeps. Waking a thread costs the caller more than starting an
// operation: so for some time after a ring the thread looks for the next one by itself, without the
// interpreter's lock.
class Alarm {
 public:
  // `doze`: seconds between such looks; `dozing`: seconds for which the thread looks after a ring.
  Alarm(double doze, double dozing) : doze_(doze), dozing_(dozing) {}

  // Have `wait` return, soon where the thread dozes, now where it sleeps.
  void ring() {
    if (rung_.exchange(true) || !asleep_.load()) return;
    const std::lock_guard lock(mutex_);
    wake_.notify_one();
  }

  // Have `wait` return now.
  void stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = rung_ = true;
    wake_.notify_one();
  }

  // Sleep until the alarm rings, for so many seconds at most; returns whether it has. One thread calls this.
  bool wait(double seconds) {
    nb::gil_scoped_release release;
    const double until = engine::now() + seconds, dozing_until = std::min(until, rung_at_ + dozing_);
    std::unique_lock lock(mutex_);
    while (!rung_.load() && engine::now() < dozing_until)
      wake_.wait_for(lock, std::chrono::duration<double>(doze_), [this] { return stopped_; });
    asleep_.store(true);
    wake_.wait_for(lock, std::chrono::duration<double>(until - engine::now()),
                   [this] { return rung_.load(); });
    asleep_.store(false);
    if (!rung_.exchange(stopped_)) return false;
    rung_at_ = engine::now();
    return true;
  }

 private:
  double doze_, dozing_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> rung_ = false, asleep_ = false;
  bool stopped_ = false;
  double rung_at_ = -std::numeric_limits<double>::infinity();
};

}  // namespace

void bind_wait(nb::module_& m) {
  nb::class_<Alarm>(m, "Alarm")
      .def(nb::init<double, double>(), "doze"_a, "dozing"_a)
      .def("ring", &Alarm::ring)
      .def("stop", &Alarm::stop)
      .def("wait", &Alarm::wait, "seconds"_a);
  nb::class_<Wait>(m, "MpiWait")
      .def(nb::init<std::uintptr_t>(), "get_status"_a)
      .def("wait", &Wait::wait, "requests"_a, "quiet"_a, "brief"_a, "least"_a, "most"_a, "share"_a,
           "longest"_a)
      .def("want", &Wait::want, "change"_a);
}

}  // namespace hybridcomp
