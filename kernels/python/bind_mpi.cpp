// MPI's non-blocking operations on plain arrays: posted, and looked at for a moment, at the cost of a few
// comparisons.
//
// The module is not linked with MPI, of which every process has its own: Python tells where its functions
// are. All their arguments are integers or pointers, in an order that the standard sets. A handle is an int
// in one MPI and a pointer in another; the calling conventions of x86-64 and AArch64 pass either in a slot of
// eight bytes, and do not mind slots after the last argument.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "python/bind.hpp"
#include "python/looks.hpp"
#include "python/objects.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

constexpr int kSlots = 8;
constexpr int kSpins = 12;            // looks that do not give way
constexpr double kYielding = 300e-6;  // seconds in which a look gives way to whoever waits for the core
constexpr double kWaiting = 5e-3;     // seconds until the engine takes over
constexpr double kSleepMin = 20e-6, kSleepMax = 1e-3, kSleepShare = 1.0 / 16;
constexpr std::size_t kBrief = 1 << 17;  // bytes that are moved before others may have the interpreter

using Slots = std::array<std::uint64_t, kSlots>;
using Post = int (*)(std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                     std::uint64_t, std::uint64_t);
using Test = int (*)(void*, int*, void*);

// What every operation needs of MPI and NumPy.
struct Library {
  Test test;
  nb::object array, in_place, error, dtype;  // the last is the attribute's name
  std::uint64_t in_place_address;
};

// Operations on arrays of one dtype and size.
struct Kind {
  nb::object dtype;
  std::size_t alignment = 1, send = 0, recv = 0;  // bytes
  nb::object note;                                // of the caller; None if such arrays are not for this
  Slots slots{};
  std::optional<engine::ProgramHandle> program;  // of the engine, in place of MPI's function
  std::uint64_t calls = 0;
  double seconds = 0;
  engine::Tally tally;
};

// A plain array's memory while this lives.
class View {
 public:
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  // False if it is not contiguous, or must be and is not writable.
  bool open(nb::handle array, bool writable) {
    held_ = PyObject_GetBuffer(array.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
    if (!held_) PyErr_Clear();
    return held_;
  }
  std::uint64_t begin() const { return held_ ? reinterpret_cast<std::uint64_t>(view_.buf) : 0; }
  std::size_t bytes() const { return held_ ? static_cast<std::size_t>(view_.len) : 0; }

 private:
  Py_buffer view_;
  bool held_ = false;
};

// What an operation is given.
struct Arrays {
  View from, to;
  nb::object dtype;
  bool in_place;
};

// One of MPI's operations, with what arguments it has in common for all arrays.
class Operation {
 public:
  Operation(const Library& library, std::uintptr_t post, int send_at, int recv_at, int request_at,
            bool in_place)
      : library_(library),
        post_(reinterpret_cast<Post>(post)),
        send_at_(send_at),
        recv_at_(recv_at),
        request_at_(request_at),
        in_place_(in_place) {
    for (const int at : {send_at, recv_at, request_at})
      if (at >= kSlots) Buffer::fail("an operation has at most eight arguments");
    if (!post || request_at < 0) Buffer::fail("an operation has an address, and makes a request");
  }

  // See hybridcomp/collectives/quick.py, as for the other methods.
  void learn(nb::handle send, nb::handle recv, nb::object note, const std::vector<std::uint64_t>& arguments,
             const engine::ProgramHandle* program) {
    Arrays arrays;
    if (arguments.size() > kSlots || !open(arrays, send, recv))
      Buffer::fail("not plain arrays, or too many arguments");
    const std::size_t from = arrays.from.bytes(), to = arrays.to.bytes();
    const std::size_t alignment =
        arrays.dtype.is_none() ? 1 : nb::cast<std::size_t>(arrays.dtype.attr("alignment"));
    if (from > INT_MAX || to > INT_MAX) note = nb::none();  // MPI's counts are ints
    auto kind = std::make_shared<Kind>();
    kind->dtype = arrays.dtype;
    kind->alignment = alignment;
    kind->send = arrays.in_place ? to : from;
    kind->recv = to;
    kind->note = note;
    for (std::size_t i = 0; i < arguments.size(); ++i) kind->slots[i] = arguments[i];
    if (program) kind->program = *program;
    kinds_.push_back(std::move(kind));
  }

  void forget() { kinds_.clear(); }

  nb::object start(nb::handle send, nb::handle recv) { return run(send, recv, nullptr, 0, nullptr); }

  nb::object message(nb::handle array, nb::handle peer, nb::handle tag, std::uintptr_t status) {
    int ends[2];
    const nb::handle given[2] = {peer, tag};
    for (int i = 0; i < 2; ++i) {
      if (!PyLong_CheckExact(given[i].ptr())) return nb::bool_(false);
      int overflow = 0;
      const long value = PyLong_AsLongAndOverflow(given[i].ptr(), &overflow);
      if (overflow || value != static_cast<int>(value)) return nb::bool_(false);
      ends[i] = static_cast<int>(value);
    }
    const bool sends = send_at_ >= 0;
    return run(sends ? array : nb::handle(Py_None), sends ? nb::handle(Py_None) : array, ends, 3,
               reinterpret_cast<void*>(status));
  }

  nb::list take() {
    nb::list rows;
    for (const auto& kind : kinds_) {
      const engine::Tally& t = kind->tally;
      if (kind->calls)
        rows.append(nb::make_tuple(
            kind->note, kind->calls, kind->seconds,
            kind->program
                ? nb::cast(std::make_tuple(t.wire_bytes, t.shared_bytes, t.encode_seconds, t.decode_seconds))
                : nb::none()));
      kind->calls = 0;
      kind->seconds = 0;
      kind->tally = {};
    }
    return rows;
  }

  std::size_t kinds() const { return kinds_.size(); }

 private:
  nb::object run(nb::handle send, nb::handle recv, const int* ends, int ends_at, void* status) {
    Arrays arrays;
    if (!open(arrays, send, recv)) return nb::bool_(false);
    const View &from = arrays.from, &to = arrays.to;
    const std::shared_ptr<Kind> kind = find(arrays);
    if (!kind) return nb::none();
    if (kind->note.is_none() || (from.begin() | to.begin()) % kind->alignment) return nb::bool_(false);

    if (kind->program) return execute(*kind, arrays, send, recv, ends, status);
    std::uint64_t request = 0;
    Slots slots = kind->slots;
    if (send_at_ >= 0) slots[send_at_] = arrays.in_place ? library_.in_place_address : from.begin();
    if (recv_at_ >= 0) slots[recv_at_] = to.begin();
    if (ends)
      for (int i = 0; i < 2; ++i)
        slots[ends_at + i] = static_cast<std::uint64_t>(static_cast<std::int64_t>(ends[i]));
    slots[request_at_] = reinterpret_cast<std::uint64_t>(&request);

    alignas(16) std::array<std::uint8_t, 256> scratch;  // more than any MPI's status
    if (!status) status = scratch.data();
    int done = 0, code = 0;
    const auto began = std::chrono::steady_clock::now();
    {
      std::optional<nb::gil_scoped_release> release;
      if (from.bytes() + to.bytes() > kBrief) release.emplace();
      code = post_(slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7]);
      if (!code) code = library_.test(&request, &done, status);
      if (!code && !done && !release) release.emplace();
      for (int look = 1; !code && !done && look <= kSpins; ++look)
        code = library_.test(&request, &done, status);
      if (!code && !done) {
        const Looks looks(0, kYielding, kSleepMin, kSleepMax, kSleepShare);
        for (double left = kWaiting; !code && !done && left > 0; left = kWaiting - looks.seconds()) {
          looks.wait(left);
          code = library_.test(&request, &done, status);
        }
      }
    }
    if (code) {
      PyErr_SetObject(library_.error.ptr(), nb::int_(code).ptr());
      throw nb::python_error();
    }
    if (!done) return nb::make_tuple(request, kind->note);
    kind->calls += 1;
    kind->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    return nb::bool_(true);
  }

  // The same by the engine, which is waited for as long.
  nb::object execute(Kind& kind, const Arrays& arrays, nb::handle send, nb::handle recv, const int* ends,
                     void* status) {
    const auto began = std::chrono::steady_clock::now();
    const std::uint64_t to = arrays.to.begin(), from = arrays.in_place ? to : arrays.from.begin();
    std::shared_ptr<engine::Execution> execution;
    bool done = false;
    {
      nb::gil_scoped_release release;
      const engine::Envelope envelope = ends ? engine::Envelope{ends[0], ends[1]} : engine::Envelope{};
      execution = engine::launch(*kind.program, std::nullopt, ends ? &envelope : nullptr, from, to, nullptr,
                                 0, false);
      done = engine::the_engine()->wait(*execution, kWaiting);
    }
    if (!done || execution->failure().fault != engine::Fault::kNone)
      return nb::make_tuple(engine::Run(std::move(execution), nb::make_tuple(send, recv)), kind.note);
    kind.calls += 1;
    kind.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    const engine::Tally& tally = execution->tally();
    kind.tally.wire_bytes += tally.wire_bytes;
    kind.tally.shared_bytes += tally.shared_bytes;
    kind.tally.encode_seconds += tally.encode_seconds;
    kind.tally.decode_seconds += tally.decode_seconds;
    if (status && !execution->status().empty())
      std::memcpy(status, execution->status().data(), execution->status().size());
    return nb::bool_(true);
  }

  // The arrays of one operation; false if MPI cannot take them as they are.
  bool open(Arrays& arrays, nb::handle send, nb::handle recv) const {
    arrays.in_place = in_place_ && send.is(library_.in_place);
    const bool sends = send_at_ >= 0 && !arrays.in_place, receives = recv_at_ >= 0;
    if ((sends && !plain(send)) || (receives && !plain(recv))) return false;
    arrays.dtype = receives ? dtype_of(recv) : sends ? dtype_of(send) : nb::none();
    if (sends && receives && !dtype_of(send).is(arrays.dtype)) return false;
    if ((sends && !arrays.from.open(send, false)) || (receives && !arrays.to.open(recv, true))) return false;
    const View &from = arrays.from, &to = arrays.to;
    return from.begin() >= to.begin() + to.bytes() || to.begin() >= from.begin() + from.bytes();
  }

  bool plain(nb::handle array) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(array.ptr())) == library_.array.ptr();
  }

  nb::object dtype_of(nb::handle array) const {
    PyObject* dtype = PyObject_GetAttr(array.ptr(), library_.dtype.ptr());
    if (!dtype) throw nb::python_error();
    return nb::steal(dtype);
  }

  std::shared_ptr<Kind> find(const Arrays& arrays) {
    const std::size_t to = arrays.to.bytes(), from = arrays.in_place ? to : arrays.from.bytes();
    for (std::size_t i = 0, at = last_; i < kinds_.size(); ++i, ++at) {
      if (at >= kinds_.size()) at = 0;
      const Kind& kind = *kinds_[at];
      if (kind.recv == to && kind.send == from && kind.dtype.is(arrays.dtype)) {
        last_ = at;
        return kinds_[at];
      }
    }
    return nullptr;
  }

  const Library& library_;
  Post post_;
  int send_at_, recv_at_, request_at_;
  bool in_place_;  // whether the send buffer may be MPI's IN_PLACE
  std::vector<std::shared_ptr<Kind>> kinds_;
  std::size_t last_ = 0;
};

}  // namespace

void bind_mpi(nb::module_& m) {
  nb::class_<Library>(m, "MpiLibrary")
      .def(
          "__init__",
          [](Library* self, std::uintptr_t test, nb::object array, nb::object in_place,
             std::int64_t in_place_address, nb::object error) {
            new (self) Library{reinterpret_cast<Test>(test),
                               array,
                               in_place,
                               error,
                               nb::str("dtype"),
                               static_cast<std::uint64_t>(in_place_address)};
          },
          "test"_a, "array"_a, "in_place"_a, "in_place_address"_a, "error"_a);
  nb::class_<Operation>(m, "MpiOperation")
      .def(nb::init<const Library&, std::uintptr_t, int, int, int, bool>(), "library"_a, "post"_a,
           "send_at"_a, "recv_at"_a, "request_at"_a, "in_place"_a, nb::keep_alive<1, 2>())
      .def("learn", &Operation::learn, "send"_a.none(), "recv"_a.none(), "note"_a.none(), "arguments"_a,
           "program"_a.none())
      .def("forget", &Operation::forget)
      .def("start", &Operation::start, nb::arg().none(), nb::arg().none())
      .def("message", &Operation::message, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg())
      .def("take", &Operation::take)
      .def("kinds", &Operation::kinds);
}

}  // namespace hybridcomp
