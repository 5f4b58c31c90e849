// Generalized requests of MPI's that end with an operation of ours, without functions of Python's.
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// MPI's functions for generalized requests; for their arguments see mpi_call.hpp.
using Query = int (*)(void*, void*);
using Free = int (*)(void*);
using Cancel = int (*)(void*, int);
struct Functions {
  int (*start)(Query, Free, Cancel, void*, void*);
  int (*complete)(std::uint64_t);
  int (*wait)(void*, void*);
  int (*free)(void*);
  int (*finalized)(int*);
};

// What MPI knows of a request, until it frees it: the status that it gives to who waits.
struct State {
  std::string status;
  std::atomic<bool> freed = false;
};

// MPI holds the state by a pointer of its own.
using Shared = std::shared_ptr<State>;

int query(void* state, void* status) {
  const std::string& given = (*static_cast<Shared*>(state))->status;
  std::memcpy(status, given.data(), given.size());
  return 0;
}

int freed(void* state) {
  auto* const own = static_cast<Shared*>(state);
  (*own)->freed.store(true);
  delete own;
  return 0;
}

// Nothing is cancelled: other ranks take part in the operation.
int cancel(void*, int) { return 0; }

// What all requests of a process have alike.
struct Common {
  Functions functions;
  std::string status;
  std::size_t request_at, handle_bytes;  // place of the handle in a request of mpi4py's
  nb::object error;                      // class of MPI's errors
};

class GeneralRequest {
 public:
  // Begin a request, and have `object`, a request of mpi4py's, stand for it.
  GeneralRequest(const Common& common, nb::handle object)
      : common_(common), state_(std::make_shared<State>()) {
    state_->status = common.status;
    auto own = std::make_unique<Shared>(state_);
    call(common_.functions.start, &query, &freed, &cancel, own.get(), &handle_);
    static_cast<void>(own.release());
    std::memcpy(place(object), &handle_, common_.handle_bytes);
  }
  GeneralRequest(const GeneralRequest&) = delete;
  GeneralRequest& operator=(const GeneralRequest&) = delete;

  // The program has given up its request: MPI frees it, once it is complete.
  ~GeneralRequest() {
    if (state_->freed.load() || !lives()) return;
    const nb::gil_scoped_release release;
    common_.functions.free(&handle_);
  }

  // Tell MPI that the operation has ended.
  void complete() {
    if (std::exchange(completed_, true) || state_->freed.load() || !lives()) return;
    call(common_.functions.complete, handle_);
  }

  // End the request of a completed operation, for which `object` stands, unless another object of mpi4py's
  // has done it.
  void release(nb::handle object, std::uintptr_t status) {
    complete();
    std::uint64_t held = 0;
    std::memcpy(&held, place(object), common_.handle_bytes);
    if (state_->freed.load() || held != handle_ || !lives()) return;
    alignas(16) std::array<std::uint8_t, 256> scratch;  // more than any MPI's status
    call(common_.functions.wait, place(object), status ? reinterpret_cast<void*>(status) : scratch.data());
  }

 private:
  char* place(nb::handle object) const { return reinterpret_cast<char*>(object.ptr()) + common_.request_at; }

  bool lives() const {
    int ended = 0;
    common_.functions.finalized(&ended);
    return !ended;
  }

  // Call a function of MPI's without the interpreter's lock; raise its error.
  template <typename... Taken, typename... Given>
  void call(int (*function)(Taken...), Given... given) const {
    int code = 0;
    {
      const nb::gil_scoped_release release;
      code = function(given...);
    }
    if (!code) return;
    PyErr_SetObject(common_.error.ptr(), nb::int_(code).ptr());
    throw nb::python_error();
  }

  const Common& common_;
  const Shared state_;
  std::uint64_t handle_ = 0;
  bool completed_ = false;
};

// Makes the requests of a process, which must not outlive this.
class GeneralRequests {
 public:
  GeneralRequests(const std::array<std::uintptr_t, 5>& functions, nb::bytes status, std::size_t request_at,
                  std::size_t handle_bytes, nb::object error) {
    for (const std::uintptr_t function : functions)
      if (!function) Buffer::fail("a function of MPI's has an address");
    if (handle_bytes != 4 && handle_bytes != 8) Buffer::fail("a request has 4 or 8 bytes");
    common_ = {{reinterpret_cast<decltype(Functions::start)>(functions[0]),
                reinterpret_cast<decltype(Functions::complete)>(functions[1]),
                reinterpret_cast<decltype(Functions::wait)>(functions[2]),
                reinterpret_cast<decltype(Functions::free)>(functions[3]),
                reinterpret_cast<decltype(Functions::finalized)>(functions[4])},
               std::string(status.c_str(), status.size()),
               request_at,
               handle_bytes,
               std::move(error)};
  }

  GeneralRequest* begin(nb::handle object) const { return new GeneralRequest(common_, object); }

 private:
  Common common_{};
};

}  // namespace

void bind_request(nb::module_& m) {
  nb::class_<GeneralRequest>(m, "GeneralRequest")
      .def("complete", &GeneralRequest::complete)
      .def("release", &GeneralRequest::release, "request"_a, "status"_a);
  nb::class_<GeneralRequests>(m, "GeneralRequests")
      .def(nb::init<const std::array<std::uintptr_t, 5>&, nb::bytes, std::size_t, std::size_t, nb::object>(),
           "functions"_a, "status"_a, "request_at"_a, "handle_bytes"_a, "error"_a)
      .def("begin", &GeneralRequests::begin, nb::rv_policy::take_ownership, "request"_a,
           "Begin a request, which must not outlive this; `request` of mpi4py's stands for it.");
}

}  // namespace hybridcomp
