// MPI's non-blocking operations on plain arrays: posted, and polled for a moment, at the cost of a few
// comparisons.
//
// The module is not linked with MPI, of which every process has its own: Python tells where its functions
// are. All their arguments are integers or pointers, in an order that the standard sets. A handle is an int
// in one MPI and a pointer in another; the calling conventions of x86-64 and AArch64 pass either in a slot of
// eight bytes, and do not mind slots after the last argument.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <climits>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "python/backoff.hpp"
#include "python/bind.hpp"
#include "python/flight.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

constexpr int kSpins = 12;            // polls that do not give way
constexpr double kYielding = 300e-6;  // seconds in which a poll gives way to whoever waits for the core
constexpr double kWaiting = 5e-3;     // seconds until the engine takes over
constexpr double kSleepMin = 20e-6, kSleepMax = 1e-3, kSleepShare = 1.0 / 16;
constexpr std::size_t kBrief = 1 << 17;  // bytes that are moved before others may have the interpreter

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

  // See hybridcomp/collectives/operations/fast_path.py, as for the other methods.
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

  // Do an operation: None if such arrays are not known, False if they are not for this, True if it has ended,
  // or the flight that is left of it.
  nb::object start(nb::handle send, nb::handle recv) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    const nb::object refused = prepare(arrays, send, recv, nullptr, &kind);
    if (refused.is_valid()) return refused;
    return done(waited(arrays, std::move(kind), nullptr, nullptr), send, recv);
  }

  nb::object message(nb::handle array, nb::handle peer, nb::handle tag, std::uintptr_t status) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    engine::Envelope ends{};
    const nb::object refused = prepare_message(arrays, array, peer, tag, &ends, &kind);
    if (refused.is_valid()) return refused;
    return done(waited(arrays, std::move(kind), &ends, reinterpret_cast<void*>(status)), array, array);
  }

  // Begin an operation: None and False as above, or True. Then its flight has what is left of it, and whoever
  // waits finds its request among what was begun.
  nb::object begin(nb::handle send, nb::handle recv, Flight& flight, nb::handle request) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    const nb::object refused = prepare(arrays, send, recv, nullptr, &kind);
    if (refused.is_valid()) return refused;
    return begun(arrays, std::move(kind), nullptr, nb::make_tuple(send, recv), flight, request);
  }

  nb::object begin_message(nb::handle array, nb::handle peer, nb::handle tag, Flight& flight,
                           nb::handle request) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    engine::Envelope ends{};
    const nb::object refused = prepare_message(arrays, array, peer, tag, &ends, &kind);
    if (refused.is_valid()) return refused;
    return begun(arrays, std::move(kind), &ends, nb::borrow(array), flight, request);
  }

  // Send, as `send` does it, and receive at once. Not None and False as above: what came of the receive and
  // of the send, each True, the flight that is left, or MPI's error.
  nb::object exchange(Operation& send, nb::handle to, nb::handle dest, nb::handle send_tag, nb::handle from,
                      nb::handle source, nb::handle recv_tag, std::uintptr_t status) {
    Arrays ours, theirs;
    std::shared_ptr<Kind> sent, received;
    engine::Envelope there{}, here{};
    nb::object refused = prepare_message(theirs, from, source, recv_tag, &here, &received);
    if (!refused.is_valid()) refused = send.prepare_message(ours, to, dest, send_tag, &there, &sent);
    if (refused.is_valid()) return refused;
    if (ours.from.begin() < theirs.to.begin() + theirs.to.bytes() &&
        theirs.to.begin() < ours.from.begin() + ours.from.bytes())
      return nb::bool_(false);

    alignas(16) std::array<std::uint8_t, 256> scratch[2];
    Posted posted[2];
    int codes[2] = {0, 0};
    {
      Release release;
      if (ours.from.bytes() + theirs.to.bytes() > kBrief || received->program || sent->program ||
          library_.calls_python())
        release.emplace();
      const auto until = [&] { return kWaiting - seconds_since(posted[0].began); };
      posted[0].status = status ? reinterpret_cast<void*>(status) : scratch[0].data();
      posted[1].status = scratch[1].data();
      codes[0] = post(posted[0], theirs, std::move(received), &here, 0);
      if (!codes[0]) codes[1] = send.post(posted[1], ours, std::move(sent), &there, 0);
      if (!codes[0] && !codes[1]) {
        codes[1] = send.settle(posted[1], kWaiting, release);
        codes[0] = settle(posted[0], std::max(0.0, until()), release);
      }
    }
    const auto result = [&](Posted& one, int code, nb::handle array) -> nb::object {
      return code ? nb::object(nb::int_(code)) : done(std::move(one), array, array);
    };
    if (codes[0]) return nb::make_tuple(codes[0], true);  // nothing was sent
    nb::object first = result(posted[0], codes[0], from);
    return nb::make_tuple(first, result(posted[1], codes[1], to));
  }

  bool knows(nb::handle send, nb::handle recv) const {
    Arrays arrays;
    return !open(arrays, send, recv) || find(arrays);
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
  // Open the arrays and find their kind; what to answer if that is not to be.
  nb::object prepare(Arrays& arrays, nb::handle send, nb::handle recv, const engine::Envelope* ends,
                     std::shared_ptr<Kind>* kind) const {
    if (!open(arrays, send, recv)) return nb::bool_(false);
    *kind = find(arrays);
    if (!*kind) return nb::none();
    const Kind& found = **kind;
    const bool unaligned = (arrays.from.begin() | arrays.to.begin()) % found.alignment;
    // A broadcast's root gets the decoded values, too.
    const bool written = found.program && !ends && !arrays.to.held() && !arrays.from.writable();
    if (found.note.is_none() || unaligned || written) return nb::bool_(false);
    return {};
  }

  nb::object prepare_message(Arrays& arrays, nb::handle array, nb::handle peer, nb::handle tag,
                             engine::Envelope* ends, std::shared_ptr<Kind>* kind) const {
    const nb::handle given[2] = {peer, tag};
    int* const out[2] = {&ends->peer, &ends->tag};
    for (int i = 0; i < 2; ++i) {
      if (!PyLong_CheckExact(given[i].ptr())) return nb::bool_(false);
      int overflow = 0;
      const long value = PyLong_AsLongAndOverflow(given[i].ptr(), &overflow);
      if (overflow || value != static_cast<int>(value)) return nb::bool_(false);
      *out[i] = static_cast<int>(value);
    }
    const bool sends = send_at_ >= 0;
    return prepare(arrays, sends ? array : nb::handle(Py_None), sends ? nb::handle(Py_None) : array, ends,
                   kind);
  }

  // Post an operation, by the engine without the interpreter's lock, where it computes for so many seconds;
  // MPI's error.
  int post(Posted& posted, const Arrays& arrays, std::shared_ptr<Kind>&& kind, const engine::Envelope* ends,
           double seconds) {
    posted.kind = std::move(kind);
    const std::uint64_t to = arrays.to.held() ? arrays.to.begin() : arrays.from.begin();
    const std::uint64_t from = arrays.from.held() ? arrays.from.begin() : to;
    if (posted.kind->program) {
      posted.execution =
          engine::launch(*posted.kind->program, std::nullopt, ends, from, to, nullptr, seconds, false);
      return 0;
    }
    Slots slots = posted.kind->slots;
    if (send_at_ >= 0) slots[send_at_] = arrays.in_place ? library_.in_place_address : from;
    if (recv_at_ >= 0) slots[recv_at_] = to;
    if (ends) {
      slots[3] = static_cast<std::uint64_t>(static_cast<std::int64_t>(ends->peer));
      slots[4] = static_cast<std::uint64_t>(static_cast<std::int64_t>(ends->tag));
    }
    slots[request_at_] = reinterpret_cast<std::uint64_t>(&posted.request);
    return post_(slots[0], slots[1], slots[2], slots[3], slots[4], slots[5], slots[6], slots[7]);
  }

  // Poll what was posted until it has ended, for so many seconds at most; MPI's error.
  int settle(Posted& posted, double seconds, Release& release) {
    int done = 0, code = 0;
    if (posted.execution) {
      engine::Execution& execution = *posted.execution;
      posted.done =
          engine::the_engine()->wait(execution, seconds) && execution.failure().fault == engine::Fault::kNone;
      if (posted.done && posted.status && !execution.status().empty())
        std::memcpy(posted.status, execution.status().data(), execution.status().size());
      return 0;
    }
    code = library_.test(&posted.request, &done, posted.status);
    if (!code && !done && !release) release.emplace();
    for (int polls = 1; !code && !done && polls <= kSpins; ++polls)
      code = library_.test(&posted.request, &done, posted.status);
    if (!code && !done) {
      const Backoff backoff(0, kYielding, kSleepMin, kSleepMax, kSleepShare);
      for (double left = seconds; !code && !done && left > 0; left = seconds - backoff.seconds()) {
        backoff.wait(left);
        code = library_.test(&posted.request, &done, posted.status);
      }
    }
    posted.done = !code && done;
    return code;
  }

  // Whether others may have the interpreter from the start.
  bool lengthy(const Arrays& arrays, const Kind& kind) const {
    return kind.program || arrays.from.bytes() + arrays.to.bytes() > kBrief || library_.calls_python();
  }

  void check(int code) const {
    if (!code) return;
    PyErr_SetObject(library_.error.ptr(), nb::int_(code).ptr());
    throw nb::python_error();
  }

  Posted waited(const Arrays& arrays, std::shared_ptr<Kind>&& kind, const engine::Envelope* ends,
                void* status) {
    alignas(16) std::array<std::uint8_t, 256> scratch;  // more than any MPI's status
    Posted posted;
    posted.status = status ? status : scratch.data();
    int code = 0;
    {
      Release release;
      if (lengthy(arrays, *kind)) release.emplace();
      code = post(posted, arrays, std::move(kind), ends, 0);
      if (!code) code = settle(posted, kWaiting, release);
    }
    check(code);
    return posted;
  }

  // Count what has ended; or what is left of it.
  nb::object done(Posted&& posted, nb::handle send, nb::handle recv) {
    if (!posted.done) return nb::cast(Flight(std::move(posted), nb::make_tuple(send, recv)));
    Kind& kind = *posted.kind;
    kind.calls += 1;
    kind.seconds += seconds_since(posted.began);
    if (posted.execution) {
      const engine::Tally& tally = posted.execution->tally();
      kind.tally.wire_bytes += tally.wire_bytes;
      kind.tally.shared_bytes += tally.shared_bytes;
      kind.tally.encode_seconds += tally.encode_seconds;
      kind.tally.decode_seconds += tally.decode_seconds;
    }
    return nb::bool_(true);
  }

  nb::object begun(const Arrays& arrays, std::shared_ptr<Kind>&& kind, const engine::Envelope* ends,
                   nb::object keep, Flight& flight, nb::handle request) {
    // What the caller sends next must not overtake a message, which is encoded at once however long that
    // takes.
    const double seconds = ends ? std::numeric_limits<double>::infinity() : library_.begins_for;
    Posted posted;
    int code = 0;
    {
      Release release;
      if (lengthy(arrays, *kind)) release.emplace();
      code = post(posted, arrays, std::move(kind), ends, seconds);
    }
    check(code);
    flight.take(std::move(posted), std::move(keep));
    if (PyObject* const none =
            PyObject_CallMethodOneArg(library_.begun.ptr(), library_.append.ptr(), request.ptr()))
      Py_DECREF(none);
    else
      throw nb::python_error();
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

  std::shared_ptr<Kind> find(const Arrays& arrays) const {
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
  mutable std::size_t last_ = 0;
};

}  // namespace

void bind_mpi(nb::module_& m) {
  nb::class_<Library>(m, "MpiLibrary")
      .def(
          "__init__",
          [](Library* self, std::uintptr_t test, nb::object array, nb::object in_place,
             std::int64_t in_place_address, nb::object error, nb::object callers, nb::object begun,
             double begins_for) {
            if (!PyAnySet_Check(callers.ptr())) Buffer::fail("who calls Python is a set");
            new (self) Library{reinterpret_cast<Test>(test),
                               array,
                               in_place,
                               error,
                               static_cast<std::uint64_t>(in_place_address),
                               callers,
                               begun,
                               begins_for};
          },
          "test"_a, "array"_a, "in_place"_a, "in_place_address"_a, "error"_a, "callers"_a, "begun"_a,
          "begins_for"_a);
  nb::class_<Flight>(m, "Flight")
      .def(nb::init<>())
      .def_ro("note", &Flight::note)
      .def_ro("run", &Flight::run)
      .def_ro("request", &Flight::request)
      .def_ro("began", &Flight::began);
  nb::class_<Operation>(m, "MpiOperation")
      .def(nb::init<const Library&, std::uintptr_t, int, int, int, bool>(), "library"_a, "post"_a,
           "send_at"_a, "recv_at"_a, "request_at"_a, "in_place"_a, nb::keep_alive<1, 2>())
      .def("learn", &Operation::learn, "send"_a.none(), "recv"_a.none(), "note"_a.none(), "arguments"_a,
           "program"_a.none())
      .def("forget", &Operation::forget)
      .def("start", &Operation::start, nb::arg().none(), nb::arg().none())
      .def("message", &Operation::message, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg())
      .def("begin", &Operation::begin, nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg())
      .def("begin_message", &Operation::begin_message, nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::arg(), nb::arg())
      .def("exchange", &Operation::exchange, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none(),
           nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg())
      .def("knows", &Operation::knows, nb::arg().none(), nb::arg().none())
      .def("take", &Operation::take)
      .def("kinds", &Operation::kinds);
}

}  // namespace hybridcomp
