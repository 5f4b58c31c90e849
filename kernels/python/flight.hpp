// Kinds of operations on plain arrays that were learnt, and operations that were posted and have not ended.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>

#include "python/bind.hpp"
#include "python/objects.hpp"

namespace hybridcomp {

constexpr int kSlots = 8;

using Slots = std::array<std::uint64_t, kSlots>;
using Clock = std::chrono::steady_clock;

using Post = int (*)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                     std::uint64_t, std::uint64_t);
using Test = int (*)(void*, int*, void*);
using Release = std::optional<nb::gil_scoped_release>;

// Objects of MPI, NumPy and the caller that every operation needs.
struct Library {
  Test test;
  nb::object array, in_place, error;
  std::uint64_t in_place_address;
  nb::object callers;  // a set: while it has members, MPI may call Python
  nb::object begun;    // a deque: gets the requests that were begun and that no thread waits for yet
  double begins_for;   // seconds that the engine computes before a start returns
  nb::object dtype = nb::str("dtype"), append = nb::str("append");  // names of attributes

  bool calls_python() const { return PySet_GET_SIZE(callers.ptr()) > 0; }
};

inline double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// Operations on arrays of one dtype and size.
struct Kind {
  nb::object dtype;
  std::size_t alignment = 1, send = 0, recv = 0;  // bytes
  nb::object note;                                // the caller's; None if this path does not take such arrays
  Slots slots{};
  std::optional<engine::ProgramHandle> program;  // the engine's, in place of MPI's function
  std::uint64_t calls = 0;
  double seconds = 0;
  engine::Tally tally;
};

// Memory of a plain array, held while this lives.
class View {
 public:
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // Open an array; returns false if it is not contiguous, or must be writable and is not.
  bool open(nb::handle array, bool writable) {
    held_ = PyObject_GetBuffer(array.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
    if (!held_) PyErr_Clear();
    return held_;
  }
  bool held() const { return held_; }
  bool writable() const { return !view_.readonly; }
  std::uint64_t begin() const { return held_ ? reinterpret_cast<std::uint64_t>(view_.buf) : 0; }
  std::size_t bytes() const { return held_ ? static_cast<std::size_t>(view_.len) : 0; }

 private:
  Py_buffer view_;
  bool held_ = false;
};

// Arrays that an operation is given.
struct Arrays {
  View from, to;
  nb::object dtype;
  bool in_place;
};

// An operation that was posted: MPI's request, or an execution of the engine.
struct Posted {
  std::shared_ptr<Kind> kind;
  std::uint64_t request = 0;
  std::shared_ptr<engine::Execution> execution;
  Clock::time_point began = Clock::now();
  void* status = nullptr;  // MPI's status of a receive
  bool done = false;
};

// A posted operation for Python, which waits for it; see hybridcomp/collectives/operations/fast_path.py.
class Flight {
 public:
  Flight() = default;
  Flight(Posted&& posted, nb::object keep) { take(std::move(posted), std::move(keep)); }

  void take(Posted&& posted, nb::object keep) {
    note = posted.kind->note;
    began = std::chrono::duration<double>(posted.began.time_since_epoch()).count();
    request = posted.request;
    if (posted.execution) run = nb::cast(engine::Run(std::move(posted.execution), std::move(keep)));
  }

  nb::object note = nb::none(), run = nb::none();
  std::uint64_t request = 0;
  double began = 0;  // by CLOCK_MONOTONIC
};

}  // namespace hybridcomp
