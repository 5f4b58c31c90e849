// MPI's non-blocking operations on plain arrays: facts learnt for a kind of arrays, and the operations on
// them.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <climits>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/fold.hpp"
#include "python/bind.hpp"
#include "python/flight.hpp"
#include "python/mpi_call.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// One of MPI's operations, with the arguments that are the same for all arrays.
class Operation {
 public:
  Operation(const Library& library, std::uintptr_t post, int send_at, int recv_at, int request_at,
            bool in_place, std::string name, double timeout)
      : call_(library, post, send_at, recv_at, request_at, std::move(name), timeout),
        library_(library),
        in_place_(in_place) {}

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

  // Do an operation: returns None if such arrays are not known, False if this path does not take them, True
  // if the operation has ended, or its flight if it has not.
  nb::object start(nb::handle send, nb::handle recv) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    const nb::object refused = prepare(arrays, send, recv, nullptr, &kind);
    if (refused.is_valid()) return refused;
    return done(call_.post_and_settle(arrays, std::move(kind), nullptr, nullptr), send, recv);
  }

  nb::object message(nb::handle array, nb::handle peer, nb::handle tag, std::uintptr_t status) {
    Arrays arrays;
    std::shared_ptr<Kind> kind;
    engine::Envelope ends{};
    const nb::object refused = prepare_message(arrays, array, peer, tag, &ends, &kind);
    if (refused.is_valid()) return refused;
    return done(call_.post_and_settle(arrays, std::move(kind), &ends, reinterpret_cast<void*>(status)), array,
                array);
  }

  // Begin an operation: returns None and False as above, or True. Then `flight` holds the rest of the
  // operation, and `request` is appended to Library::begun, where a waiting thread finds it.
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

  // Send, as `send` does it, and receive at once. Returns None and False as above, or the results of the
  // receive and of the send, each True, its flight, or MPI's error.
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
      const auto watch = call_.watched();
      Release release;
      if (ours.from.bytes() + theirs.to.bytes() > kBrief || received->program || sent->program ||
          library_.calls_python())
        release.emplace();
      const auto until = [&] { return kWaiting - seconds_since(posted[0].began); };
      posted[0].status = status ? reinterpret_cast<void*>(status) : scratch[0].data();
      posted[1].status = scratch[1].data();
      codes[0] = call_.post(posted[0], theirs, std::move(received), &here, 0);
      if (!codes[0]) codes[1] = send.call_.post(posted[1], ours, std::move(sent), &there, 0);
      if (!codes[0] && !codes[1]) {
        codes[1] = send.call_.settle(posted[1], kWaiting, release);
        codes[0] = call_.settle(posted[0], std::max(0.0, until()), release);
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
    // Making objects may start a garbage collection, whose finalizers may let another thread in, which learns
    // kinds and counts calls: so this loops over a copy, and takes each count before its row is made.
    for (const std::shared_ptr<Kind>& kind : std::vector(kinds_)) {
      const auto calls = std::exchange(kind->calls, 0);
      const double seconds = std::exchange(kind->seconds, 0.0);
      const engine::Tally t = std::exchange(kind->tally, {});
      if (calls)
        rows.append(nb::make_tuple(
            kind->note, calls, seconds,
            kind->program
                ? nb::cast(std::make_tuple(t.wire_bytes, t.shared_bytes, t.encode_seconds, t.decode_seconds))
                : nb::none()));
    }
    return rows;
  }

  std::size_t kinds() const { return kinds_.size(); }

 private:
  // Open the arrays and find their kind; returns the answer, None or False, if this path cannot take them.
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
    const bool sends = call_.sends();
    return prepare(arrays, sends ? array : nb::handle(Py_None), sends ? nb::handle(Py_None) : array, ends,
                   kind);
  }

  // Count an operation that has ended, and return True; else return its flight.
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
    // The caller's next message must not overtake this one, which is therefore encoded at once however long
    // that takes.
    const double seconds = ends ? std::numeric_limits<double>::infinity() : library_.begins_for;
    Posted posted;
    int code = 0;
    {
      const auto watch = call_.watched();
      Release release;
      if (call_.lengthy(arrays, *kind)) release.emplace();
      code = call_.post(posted, arrays, std::move(kind), ends, seconds);
    }
    call_.check(code);
    flight.take(std::move(posted), std::move(keep));
    if (PyObject* const none =
            PyObject_CallMethodOneArg(library_.begun.ptr(), library_.append.ptr(), request.ptr()))
      Py_DECREF(none);
    else
      throw nb::python_error();
    return nb::bool_(true);
  }

  // Open the arrays of one operation; returns false if MPI cannot take them as they are.
  bool open(Arrays& arrays, nb::handle send, nb::handle recv) const {
    arrays.in_place = in_place_ && send.is(library_.in_place);
    const bool sends = call_.sends() && !arrays.in_place, receives = call_.receives();
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

  const MpiCall call_;
  const Library& library_;
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
      .def(nb::init<const Library&, std::uintptr_t, int, int, int, bool, std::string, double>(), "library"_a,
           "post"_a, "send_at"_a, "recv_at"_a, "request_at"_a, "in_place"_a, "name"_a, "timeout"_a,
           nb::keep_alive<1, 2>())
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
  m.def(
      "mpi_reduction",
      [](int fold, int dtype, bool large) {
        if (fold < 0 || fold >= static_cast<int>(Fold::kFolds)) Buffer::fail("there is no such fold");
        return engine::mpi_function(static_cast<Fold>(fold), dtype, large);
      },
      "fold"_a, "dtype"_a, "large"_a, "Address of MPI's user function, or 0 if there is none.");
}

}  // namespace hybridcomp
