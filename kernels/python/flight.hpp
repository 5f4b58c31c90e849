// Kinds of operations on plain arrays that were learnt, and operations that were posted and have not ended.
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <unordered_map>

#include "python/bind.hpp"
#include "python/objects.hpp"

namespace hybridcomp {

constexpr int kSlots = 8;

using Slots = std::array<std::uint64_t, kSlots>;
using Clock = std::chrono::steady_clock;

using Post = int (*)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                     std::uint64_t, std::uint64_t);
using Test = int (*)(void*, int*, void*);

// Name of an attribute, which Python finds by its address.
inline nb::object interned(const char* name) { return nb::steal(PyUnicode_InternFromString(name)); }

// Objects of MPI, NumPy and the caller that every operation needs.
struct Library {
  Test test;
  nb::object array, datatype, in_place, error;
  std::uint64_t in_place_address;
  nb::object begun;   // a deque: gets the requests that were begun and that no thread waits for yet
  double begins_for;  // seconds that the engine computes before a start returns
  nb::dict dtypes;    // handles of MPI's datatypes by NumPy's dtypes
  std::unordered_map<std::uint64_t, std::size_t> sizes;  // bytes of MPI's basic datatypes, by handle
  std::size_t handle_at, handle_bytes;                   // place of the handle in a datatype's object
  nb::object request;                                    // class of mpi4py's requests
  std::size_t request_at, keeps_at;  // places in a request of the handle, and of the memory that it keeps
  nb::object dtype = interned("dtype"), append = interned("append");
};

inline double seconds_since(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

// Size of a buffer: its bytes, and the count that the caller gives for it, or -1.
struct Extent {
  std::size_t bytes = 0;
  long count = -1;

  bool operator==(const Extent&) const = default;
};

// Operations on buffers of one type and size.
struct Kind {
  nb::object dtype;  // NumPy's of arrays, or MPI's that the caller gives
  std::size_t alignment = 1;
  Extent send, recv;
  bool in_place = false;
  nb::object note;  // the caller's; None if this path does not take such arrays
  Slots slots{};
  std::optional<engine::ProgramHandle> program;  // the engine's, in place of MPI's function
  nb::object owner = nb::none();                 // of the memory below
  Memory* memory = nullptr;                      // of the program's error feedback; null for none
  std::uint64_t version = 0;                     // of the memory, as it was learnt
  bool left = false;                             // whether it was let go: the calls are to be counted yet
  bool stale() const { return left || (memory && memory->version != version); }
  void leave() {
    left = true;
    memory = nullptr;
    owner = nb::none();
  }
  std::uint64_t calls = 0, away = 0;  // calls in all, and messages to ranks of other hosts
  double seconds = 0;
  engine::Tally tally;
};

// Memory of a contiguous buffer, held while this lives.
class View {
 public:
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // Open a buffer; returns false if it is not contiguous in any order, or must be writable and is not.
  bool open(nb::handle buffer, long count, bool writable) {
    const int flags = PyBUF_ANY_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    held_ = PyObject_GetBuffer(buffer.ptr(), &view_, flags) == 0;
    if (!held_) PyErr_Clear();
    count_ = count;
    return held_;
  }
  Extent extent() const { return {bytes(), count_}; }
  bool held() const { return held_; }
  bool writable() const { return !view_.readonly; }
  std::uint64_t begin() const { return held_ ? reinterpret_cast<std::uint64_t>(view_.buf) : 0; }
  std::size_t bytes() const { return held_ ? static_cast<std::size_t>(view_.len) : 0; }

 private:
  Py_buffer view_;
  long count_ = -1;
  bool held_ = false;
};

// Buffers that an operation is given.
struct Arrays {
  View from, to;
  nb::object dtype;
  bool in_place;
  Memory* memory = nullptr;  // of error feedback, and its owner
  nb::object owner = nb::none();
};

// An operation that was posted: MPI's request, or an execution of the engine.
struct Posted {
  std::shared_ptr<Kind> kind;
  std::uint64_t request = 0;
  std::shared_ptr<engine::Execution> execution;
  Clock::time_point began = Clock::now();
  void* status = nullptr;  // MPI's status of a receive
  int peer = -1;           // the other end of a message
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
