// One of MPI's non-blocking operations: posted, and polled for a moment, at the cost of a few comparisons.
//
// The module is not linked with MPI, of which every process has its own: Python passes the functions'
// addresses. All their arguments are integers or pointers, in an order that the standard sets. A handle is an
// int in one MPI and a pointer in another; the calling conventions of x86-64 and AArch64 pass either in a
// slot of eight bytes, and do not mind slots after the last argument.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "engine/waiting/backoff.hpp"
#include "engine/waiting/clock.hpp"
#include "engine/waiting/watchdog.hpp"
#include "python/bind.hpp"
#include "python/flight.hpp"

namespace hybridcomp {

constexpr int kSpins = 12;         // looks before the thread gives way
constexpr double kWaiting = 5e-3;  // seconds until Python waits, with the progress engine
constexpr double kMoving =
    0.1;  // the same for a program that moves: Python has nothing to do for it but to wait
constexpr engine::Pace kPace{.yielding = 300e-6, .least = 20e-6, .most = 1e-3, .share = 1.0 / 16};

// Poll a request of MPI's until it is done, for so many seconds at most; returns MPI's error.
inline int poll(const Library& library, void* request, void* status, double seconds, bool* ended) {
  int done = 0;
  const auto test = [&] {
    const engine::InsideMpi inside;
    return library.test(request, &done, status);
  };
  int code = test();
  for (int polls = 1; !code && !done && polls <= kSpins; ++polls) code = test();
  if (!code && !done) {
    engine::Backoff backoff(kPace);
    for (double left = seconds; !code && !done && left > 0; left = seconds - backoff.seconds()) {
      backoff.wait(left);
      code = test();
    }
    if (done) backoff.found();
  }
  *ended = !code && done;
  return code;
}

// MPI's function, and the positions of its arguments that differ from call to call.
class MpiCall {
 public:
  // `name` is the operation, for error messages, and `timeout` the seconds that it may take.
  MpiCall(const Library& library, std::uintptr_t post, int send_at, int recv_at, int request_at,
          std::string name, double timeout)
      : library_(library),
        name_(std::move(name)),
        timeout_(timeout),
        post_(reinterpret_cast<Post>(post)),
        send_at_(send_at),
        recv_at_(recv_at),
        request_at_(request_at) {
    for (const int at : {send_at, recv_at, request_at})
      if (at >= kSlots) Buffer::fail("an operation has at most eight arguments");
    if (!post || request_at < 0) Buffer::fail("an operation has an address, and makes a request");
  }

  bool sends() const { return send_at_ >= 0; }
  bool receives() const { return recv_at_ >= 0; }

  // Watch this thread while it posts and settles the operation.
  engine::WatchedThread watched() const { return {name_, engine::now() + timeout_}; }

  // Post an operation; returns MPI's error. The engine must be called without the interpreter's lock, and
  // computes for so many seconds.
  int post(Posted& posted, const Arrays& arrays, std::shared_ptr<Kind>&& kind, const engine::Envelope* ends,
           double seconds) const {
    posted.kind = std::move(kind);
    const std::uint64_t to = arrays.to.held() ? arrays.to.begin() : arrays.from.begin();
    const std::uint64_t from = arrays.from.held() ? arrays.from.begin() : to;
    if (posted.kind->program) {
      posted.execution =
          engine::launch(*posted.kind->program, std::nullopt, ends, from, to, arrays.memory, seconds, false);
      return 0;
    }
    Slots slots = posted.kind->slots;
    if (send_at_ >= 0) slots[send_at_] = arrays.in_place ? library_.in_place_address : from;
    if (recv_at_ >= 0) slots[recv_at_] = to;
    if (ends) {
      posted.peer = ends->peer;
      slots[3] = static_cast<std::uint64_t>(static_cast<std::int64_t>(ends->peer));
      slots[4] = static_cast<std::uint64_t>(static_cast<std::int64_t>(ends->tag));
    }
    slots[request_at_] = reinterpret_cast<std::uint64_t>(&posted.request);
    const engine::InsideMpi inside;
    return post_(slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7]);
  }

  // Poll a posted operation until it has ended, for so many seconds at most; returns MPI's error.
  int settle(Posted& posted, double seconds) const {
    if (posted.execution) {
      engine::Execution& execution = *posted.execution;
      engine::Engine& engine = *engine::the_engine();
      const double last = engine::now() + std::min(kMoving, timeout_);
      bool ended = engine.wait(execution, seconds);
      while (!ended && engine.quiet() < seconds && engine::now() < last)
        ended = engine.wait(execution, seconds);
      posted.done = ended && execution.failure().fault == engine::Fault::kNone;
      if (posted.done && posted.status && !execution.status().empty())
        std::memcpy(posted.status, execution.status().data(), execution.status().size());
      return 0;
    }
    return poll(library_, &posted.request, posted.status, seconds, &posted.done);
  }

  // Post an operation and poll it for a moment; raises MPI's error.
  Posted post_and_settle(const Arrays& arrays, std::shared_ptr<Kind>&& kind, const engine::Envelope* ends,
                         void* status) const {
    alignas(16) std::array<std::uint8_t, 256> scratch;  // more than any MPI's status
    Posted posted;
    posted.status = status ? status : scratch.data();
    int code = 0;
    {
      const auto watch = watched();
      const nb::gil_scoped_release release;
      code = post(posted, arrays, std::move(kind), ends, 0);
      if (!code) code = settle(posted, kWaiting);
    }
    check(code);
    return posted;
  }

  void check(int code) const {
    if (!code) return;
    PyErr_SetObject(library_.error.ptr(), nb::int_(code).ptr());
    throw nb::python_error();
  }

 private:
  const Library& library_;
  const std::string name_;
  const double timeout_;
  Post post_;
  int send_at_, recv_at_, request_at_;
};

}  // namespace hybridcomp
