// Operations on plain arrays, MPI's own or programs of the compiled engine: what has been learnt for a kind
// of arrays, and the operations on them.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cstring>
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

// Whether the other end of a message, if it has one, is a rank of another host.
bool is_away(const std::vector<bool>& away, long peer) {
  return peer >= 0 && peer < static_cast<long>(away.size()) && away[static_cast<std::size_t>(peer)];
}

// One operation, with the arguments that are the same for all arrays: which of MPI's functions, or which
// program, does it is learnt for each kind.
class Operation {
 public:
  Operation(const Library& library, std::uintptr_t post, int send_at, int recv_at, int request_at,
            bool in_place, std::string name, double timeout, std::vector<bool> away)
      : call_(library, post, send_at, recv_at, request_at, std::move(name), timeout),
        library_(library),
        in_place_(in_place),
        away_(std::move(away)) {}

  // See hybridcomp/collectives/fast_path_cache.py for this and what it has learnt, operations/fast_path.py
  // for the others.
  void learn(nb::handle send, nb::handle recv, nb::object note, const std::vector<std::uint64_t>& arguments,
             const engine::ProgramHandle* program, std::size_t alignment, Memory* memory, nb::object owner) {
    Arrays arrays;
    if (arguments.size() > kSlots || !alignment || !open(arrays, send, recv))
      Buffer::fail("not plain arrays, or too many arguments");
    // Destroying a memory may run Python, which may learn, too: so this loops over a copy.
    for (const std::shared_ptr<Kind>& kind : std::vector(kinds_))
      if (kind->stale()) kind->leave();
    const std::size_t from = arrays.from.bytes(), to = arrays.to.bytes();
    if (from > INT_MAX || to > INT_MAX) note = nb::none();  // MPI's counts are ints
    auto kind = std::make_shared<Kind>();
    kind->dtype = arrays.dtype;
    kind->alignment = alignment;
    kind->send = arrays.in_place ? Extent{} : arrays.from.extent();
    kind->recv = arrays.to.extent();
    kind->in_place = arrays.in_place;
    kind->note = note;
    for (std::size_t i = 0; i < arguments.size(); ++i) kind->slots[i] = arguments[i];
    if (program) kind->program = *program;
    if (memory) {
      kind->memory = memory;
      kind->version = memory->version;
      kind->owner = std::move(owner);
    }
    if (program) engine::check_memory(*program, kind->memory);
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
    remember(arrays, *kind);
    return done(call_.post_and_settle(arrays, std::move(kind), nullptr, nullptr), send, recv, arrays.owner);
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
    remember(arrays, *kind);
    return begun(arrays, std::move(kind), nullptr, nb::make_tuple(send, recv, arrays.owner), flight, request);
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

  // Send, as `send` does it, and receive at once. Returns None, False and True as above, or the results of
  // the receive and of the send, each True, its flight, or MPI's error.
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
      const nb::gil_scoped_release release;
      const auto until = [&] { return kWaiting - seconds_since(posted[0].began); };
      posted[0].status = status ? reinterpret_cast<void*>(status) : scratch[0].data();
      posted[1].status = scratch[1].data();
      codes[0] = call_.post(posted[0], theirs, std::move(received), &here, 0);
      if (!codes[0]) codes[1] = send.call_.post(posted[1], ours, std::move(sent), &there, 0);
      if (!codes[0] && !codes[1]) {
        codes[1] = send.call_.settle(posted[1], kWaiting);
        codes[0] = call_.settle(posted[0], std::max(0.0, until()));
      }
    }
    const auto result = [&](Posted& one, int code, nb::handle array) -> nb::object {
      return code ? nb::object(nb::int_(code)) : done(std::move(one), array, array);
    };
    if (codes[0]) return nb::make_tuple(codes[0], true);  // nothing was sent
    nb::object first = result(posted[0], codes[0], from), second = result(posted[1], codes[1], to);
    if (first.is(Py_True) && second.is(Py_True)) return first;
    return nb::make_tuple(first, second);
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
      const auto away = std::exchange(kind->away, 0);
      const double seconds = std::exchange(kind->seconds, 0.0);
      const engine::Tally t = std::exchange(kind->tally, {});
      if (calls)
        rows.append(nb::make_tuple(
            kind->note, calls, seconds,
            kind->program ? nb::cast(std::make_tuple(t.wire_bytes, t.shared_bytes, t.between_bytes,
                                                     t.encode_seconds, t.decode_seconds))
                          : nb::none(),
            away));
    }
    std::erase_if(kinds_, [](const std::shared_ptr<Kind>& kind) { return kind->stale() && !kind->calls; });
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

  // Begin a step of the kind's memory, and have the arrays keep it: another thread may let go of the kind's.
  static void remember(Arrays& arrays, const Kind& kind) {
    if (!kind.memory) return;
    arrays.memory = kind.memory;
    arrays.owner = kind.owner;
    arrays.memory->begin();
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
  nb::object done(Posted&& posted, nb::handle send, nb::handle recv, nb::object owner = nb::none()) {
    if (!posted.done) return nb::cast(Flight(std::move(posted), nb::make_tuple(send, recv, owner)));
    Kind& kind = *posted.kind;
    kind.calls += 1;
    kind.away += is_away(away_, posted.peer);
    kind.seconds += seconds_since(posted.began);
    if (posted.execution) {
      const engine::Tally& tally = posted.execution->tally();
      kind.tally.wire_bytes += tally.wire_bytes;
      kind.tally.shared_bytes += tally.shared_bytes;
      kind.tally.between_bytes += tally.between_bytes;
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
      const nb::gil_scoped_release release;
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

  // A buffer as mpi4py's callers give it: an array, or a list of a buffer, a count if need be, and MPI's
  // type.
  struct Given {
    nb::handle buffer, type;
    long count = -1;
  };

  // Open the buffers of one operation; returns false if MPI cannot take them as they are.
  bool open(Arrays& arrays, nb::handle send, nb::handle recv) const {
    arrays.in_place = in_place_ && (send.is(library_.in_place) || send.is_none());
    const bool sends = call_.sends() && !arrays.in_place, receives = call_.receives();
    Given from, to;
    nb::object from_type;
    if (receives && !read(recv, to, arrays.dtype)) return false;
    if (sends && !read(send, from, receives ? from_type : arrays.dtype)) return false;
    if (!sends && !receives) arrays.dtype = nb::none();
    if (sends && receives && !from_type.is(arrays.dtype)) return false;
    if (sends && !arrays.from.open(from.buffer, from.count, false)) return false;
    if (receives && !arrays.to.open(to.buffer, to.count, true)) return false;
    const View &source = arrays.from, &target = arrays.to;
    return source.begin() >= target.begin() + target.bytes() ||
           target.begin() >= source.begin() + source.bytes();
  }

  // Tell the parts of a buffer, and its type; returns false if this path does not take such buffers.
  bool read(nb::handle spec, Given& given, nb::object& type) const {
    PyObject* const object = spec.ptr();
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == library_.array.ptr()) {
      given.buffer = spec;
      PyObject* const dtype = PyObject_GetAttr(object, library_.dtype.ptr());
      if (!dtype) throw nb::python_error();
      type = nb::steal(dtype);
      return true;
    }
    const bool list = PyList_CheckExact(object);
    if (!list && !PyTuple_CheckExact(object)) return false;
    const Py_ssize_t n = list ? PyList_GET_SIZE(object) : PyTuple_GET_SIZE(object);
    if (n != 2 && n != 3) return false;
    const auto at = [&](Py_ssize_t i) -> nb::handle {
      return list ? PyList_GET_ITEM(object, i) : PyTuple_GET_ITEM(object, i);
    };
    given.type = at(n - 1);
    if (reinterpret_cast<PyObject*>(Py_TYPE(given.type.ptr())) != library_.datatype.ptr()) return false;
    if (n == 3) {
      if (!PyLong_CheckExact(at(1).ptr())) return false;
      int overflow = 0;
      given.count = PyLong_AsLongAndOverflow(at(1).ptr(), &overflow);
      if (overflow || given.count < 0) return false;
    }
    given.buffer = at(0);
    type = nb::borrow(given.type);
    return PyObject_CheckBuffer(given.buffer.ptr());
  }

  std::shared_ptr<Kind> find(const Arrays& arrays) const {
    const Extent to = arrays.to.extent(), from = arrays.in_place ? Extent{} : arrays.from.extent();
    for (std::size_t i = 0, at = last_; i < kinds_.size(); ++i, ++at) {
      if (at >= kinds_.size()) at = 0;
      const Kind& kind = *kinds_[at];
      if (kind.recv == to && kind.send == from && kind.in_place == arrays.in_place &&
          kind.dtype.is(arrays.dtype) && !kind.stale()) {
        last_ = at;
        return kinds_[at];
      }
    }
    return nullptr;
  }

  const MpiCall call_;
  const Library& library_;
  bool in_place_;                 // whether the send buffer may be MPI's IN_PLACE
  const std::vector<bool> away_;  // by rank: whether it is on another host
  std::vector<std::shared_ptr<Kind>> kinds_;
  mutable std::size_t last_ = 0;
};

constexpr long kUnknown = -1, kNotMpis = -2;

std::uint64_t truncated(std::uint64_t handle, std::size_t bytes) {
  return bytes < sizeof handle ? handle & ((std::uint64_t{1} << (8 * bytes)) - 1) : handle;
}

// The items of a list or tuple, or of nothing else.
struct Items {
  explicit Items(PyObject* object)
      : items(PyList_CheckExact(object)    ? PySequence_Fast_ITEMS(object)
              : PyTuple_CheckExact(object) ? PySequence_Fast_ITEMS(object)
                                           : nullptr),
        size(items ? PySequence_Fast_GET_SIZE(object) : 0) {}

  PyObject** items;
  Py_ssize_t size;
};

// The sum of counts; -1 if these are no plain integers.
long sum(PyObject* counts) {
  const Items given(counts);
  long total = 0;
  for (Py_ssize_t i = 0; i <= given.size; ++i) {
    PyObject* const one = given.items ? (i < given.size ? given.items[i] : nullptr) : (i ? nullptr : counts);
    if (!one) break;
    if (!PyLong_CheckExact(one)) return kUnknown;
    int overflow = 0;
    const long n = PyLong_AsLongAndOverflow(one, &overflow);
    if (overflow || n < 0) return kUnknown;
    total += n;
  }
  return total;
}

long bytes_of(PyObject* buffer) {
  View view;
  return view.open(buffer, -1, false) ? static_cast<long>(view.bytes()) : kUnknown;
}

// MPI's handle of an array's elements; none for a type that mpi4py has no datatype of.
std::optional<std::uint64_t> datatype_of(const Library& library, PyObject* array) {
  const nb::object dtype = nb::steal(PyObject_GetAttr(array, library.dtype.ptr()));
  if (!dtype.is_valid()) throw nb::python_error();
  PyObject* const handle = PyDict_GetItemWithError(library.dtypes.ptr(), dtype.ptr());
  if (!handle && PyErr_Occurred()) throw nb::python_error();
  if (!handle) return std::nullopt;
  return truncated(PyLong_AsUnsignedLongLongMask(handle), library.handle_bytes);
}

std::uint64_t handle_in(const Library& library, PyObject* datatype) {
  std::uint64_t handle = 0;
  std::memcpy(&handle, reinterpret_cast<const char*>(datatype) + library.handle_at, library.handle_bytes);
  return handle;
}

bool is_array(const Library& library, PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(library.array.ptr()));
}

// The bytes of a buffer's elements, of those of all its parts, or why not: see MpiLibrary.survey.
long survey(const Library& library, nb::handle spec) {
  PyObject* const object = spec.ptr();
  if (is_array(library, object)) return datatype_of(library, object) ? bytes_of(object) : kNotMpis;
  const Items given(object);
  if (!given.items)
    return object == Py_None || PyLong_Check(object) || PyObject_CheckBuffer(object) ? kUnknown : kNotMpis;
  if (given.size < 2) return kNotMpis;
  PyObject* const data = given.items[0];
  const bool nowhere = data == Py_None || PyLong_Check(data);
  if (!nowhere && !PyObject_CheckBuffer(data)) return kNotMpis;
  PyObject* const last = given.items[given.size - 1];
  if (reinterpret_cast<PyObject*>(Py_TYPE(last)) != library.datatype.ptr())
    return PyUnicode_Check(last) ? kNotMpis : survey(library, data) == kNotMpis ? kNotMpis : kUnknown;
  const auto found = library.sizes.find(handle_in(library, last));
  if (found == library.sizes.end()) return kUnknown;
  if (!found->second) return kNotMpis;
  if (given.size == 2) return nowhere ? 0 : bytes_of(data);
  if (given.size == 3 && PyTuple_Check(given.items[1])) return kUnknown;  // a count and a displacement
  const long n = sum(given.items[1]);
  return n < 0 ? kUnknown : n * static_cast<long>(found->second);
}

// Whether two buffers have no memory in common, which MPI does not allow them.
bool apart(nb::handle a, nb::handle b) {
  View views[2];
  const nb::handle given[2] = {a, b};
  for (int i = 0; i < 2; ++i) {
    const Items items(given[i].ptr());
    PyObject* const data = items.items && items.size ? items.items[0] : given[i].ptr();
    if (!PyObject_CheckBuffer(data) || !views[i].open(data, -1, false)) return true;
  }
  return views[0].begin() >= views[1].begin() + views[1].bytes() ||
         views[1].begin() >= views[0].begin() + views[0].bytes();
}

// The place in a request of mpi4py's of the object that it keeps until it is done: None in a new one.
std::size_t memory_kept_at(nb::handle request) {
  const nb::object empty = request();
  const auto size = static_cast<std::size_t>(reinterpret_cast<PyTypeObject*>(request.ptr())->tp_basicsize);
  for (std::size_t at = sizeof(PyObject); at + sizeof(PyObject*) <= size; at += sizeof(PyObject*)) {
    PyObject* held = nullptr;
    std::memcpy(&held, reinterpret_cast<const char*>(empty.ptr()) + at, sizeof held);
    if (held == Py_None) return at;
  }
  Buffer::fail("requests of this mpi4py keep no memory");
}

// Elements of one of MPI's basic types that lie one after another, as MPI takes them.
struct Elements {
  View memory;
  PyObject* owner = nullptr;
  int count = 0;
  std::uint64_t datatype = 0;
  std::size_t bytes = 0;

  // Read an array, or a list of a buffer, a count if need be, and a basic datatype; returns false for any
  // other buffer.
  bool open(const Library& library, nb::handle spec, bool writable) {
    owner = spec.ptr();
    long n = -1;
    if (is_array(library, owner)) {
      const auto found = datatype_of(library, owner);
      if (!found) return false;
      datatype = *found;
    } else {
      const Items given(owner);
      if (given.size != 2 && given.size != 3) return false;
      PyObject* const last = given.items[given.size - 1];
      if (reinterpret_cast<PyObject*>(Py_TYPE(last)) != library.datatype.ptr()) return false;
      datatype = handle_in(library, last);
      if (given.size == 3) {
        if (!PyLong_CheckExact(given.items[1])) return false;
        int overflow = 0;
        n = PyLong_AsLongAndOverflow(given.items[1], &overflow);
        if (overflow || n < 0 || n > INT_MAX) return false;
      }
      owner = given.items[0];
      if (!PyObject_CheckBuffer(owner)) return false;
    }
    const auto size = library.sizes.find(datatype);
    if (size == library.sizes.end() || !size->second || !memory.open(owner, -1, writable)) return false;
    if (n < 0) {
      if (memory.bytes() % size->second || memory.bytes() / size->second > INT_MAX) return false;
      n = static_cast<long>(memory.bytes() / size->second);
    }
    count = static_cast<int>(n);
    bytes = count * size->second;
    return bytes <= memory.bytes();
  }
};

// Start of non-blocking messages that are MPI's alone; see hybridcomp/collectives/operations/uncompressed.py.
class Messages {
 public:
  Messages(const Library& library, std::uintptr_t function, std::uint64_t comm, bool sends, nb::object post,
           nb::object request, nb::object op, nb::object waiting, nb::object met, nb::object tracing,
           long below, std::vector<bool> away)
      : library_(library),
        function_(reinterpret_cast<Post>(function)),
        comm_(comm),
        sends_(sends),
        post_(post),
        request_(request),
        op_(op),
        waiting_(waiting),
        met_(met),
        tracing_(tracing),
        below_(below),
        away_(std::move(away)) {}

  // Post a message to or from a peer; returns MPI's request as one of ours, or None if this path does not
  // take it.
  nb::object begin(nb::handle comm, nb::handle buffer, nb::handle peer, nb::handle tag) {
    if (!PyLong_CheckExact(peer.ptr()) || !PyLong_CheckExact(tag.ptr()) || !quiet(comm)) return nb::none();
    const long ends[2] = {PyLong_AsLong(peer.ptr()), PyLong_AsLong(tag.ptr())};
    for (const long end : ends) {
      if (end == -1 && PyErr_Occurred()) throw nb::python_error();
      if (end != static_cast<int>(end)) return nb::none();
    }
    if (ends[0] >= 0 && !met_.is_none()) {
      const int met = PySet_Contains(met_.ptr(), peer.ptr());
      if (met < 0) throw nb::python_error();
      if (!met) return nb::none();
    }
    Elements elements;
    const bool plain = elements.open(library_, buffer, !sends_);
    const long nbytes = plain ? static_cast<long>(elements.bytes) : survey(library_, buffer);
    if (nbytes == kNotMpis || (below_ >= 0 && (nbytes < 0 || nbytes >= below_))) return nb::none();
    nb::object request = plain ? posted(elements, ends) : posted_by_mpi4py(buffer, peer, tag);
    const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    const nb::object begun = nb::steal(PyTuple_Pack(5, comm.ptr(), op_.ptr(), peer.ptr(), zero_.ptr(),
                                                    nb::steal(PyFloat_FromDouble(now)).ptr()));
    if (!begun.is_valid() || PyObject_SetAttr(request.ptr(), begun_.ptr(), begun.ptr()) < 0)
      throw nb::python_error();
    calls_ += 1;
    const auto sent = static_cast<std::uint64_t>(std::max(0L, nbytes));
    bytes_ += sent;
    if (is_away(away_, ends[0])) between_ += sent;
    return request;
  }

  std::array<std::uint64_t, 3> take() {
    return {std::exchange(calls_, 0), std::exchange(bytes_, 0), std::exchange(between_, 0)};
  }

 private:
  // Whether nobody needs to know of a message, and no other waits to be posted.
  bool quiet(nb::handle comm) const {
    PyObject* const recorder = PyDict_GetItem(tracing_.ptr(), recorder_.ptr());
    if (recorder != Py_None || PyObject_Size(waiting_.ptr()) != 0) return false;
    const nb::object on_start = nb::steal(PyObject_GetAttr(comm.ptr(), on_start_.ptr()));
    if (!on_start.is_valid()) throw nb::python_error();
    return on_start.is_none();
  }

  // Make a request of ours; mpi4py's constructor takes one of its own, if there are arguments.
  nb::object made(nb::handle arguments) const {
    PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(request_.ptr());
    const auto base = reinterpret_cast<PyTypeObject*>(library_.request.ptr());
    const nb::object request = nb::steal(base->tp_new(type, arguments.ptr(), nullptr));
    if (!request.is_valid()) throw nb::python_error();
    return request;
  }

  nb::object posted(const Elements& elements, const long (&ends)[2]) const {
    const nb::object request = made(nothing_);
    auto* const at = reinterpret_cast<char*>(request.ptr());
    // As mpi4py does: the request keeps the memory until it is done.
    nb::object keep = nb::borrow(elements.owner);
    if (!is_array(library_, elements.owner)) keep = nb::steal(PyMemoryView_FromObject(elements.owner));
    if (!keep.is_valid()) throw nb::python_error();
    Py_SETREF(*reinterpret_cast<PyObject**>(at + library_.keeps_at), keep.release().ptr());
    int code = 0;
    {
      const nb::gil_scoped_release release;
      const engine::InsideMpi inside;
      code = function_(elements.memory.begin(), static_cast<std::uint64_t>(elements.count), elements.datatype,
                       static_cast<std::uint64_t>(ends[0]), static_cast<std::uint64_t>(ends[1]), comm_,
                       reinterpret_cast<std::uint64_t>(at + library_.request_at), 0);
    }
    if (code) {
      PyErr_SetObject(library_.error.ptr(), nb::int_(code).ptr());
      throw nb::python_error();
    }
    return request;
  }

  nb::object posted_by_mpi4py(nb::handle buffer, nb::handle peer, nb::handle tag) const {
    PyObject* const given[3] = {buffer.ptr(), peer.ptr(), tag.ptr()};
    nb::object posted;
    {
      const engine::InsideMpi inside;
      posted = nb::steal(PyObject_Vectorcall(post_.ptr(), given, 3, nullptr));
    }
    if (!posted.is_valid()) throw nb::python_error();
    return made(nb::make_tuple(posted));
  }

  const Library& library_;
  const Post function_;
  const std::uint64_t comm_;
  const bool sends_;
  const nb::object post_, request_, op_, waiting_, met_, tracing_;
  const long below_;  // bytes below which messages are MPI's alone; negative if all are
  const std::vector<bool> away_;
  std::uint64_t calls_ = 0, bytes_ = 0, between_ = 0;
  const nb::object nothing_ = nb::steal(PyTuple_New(0)), zero_ = nb::int_(0), begun_ = interned("begun"),
                   recorder_ = interned("recorder"), on_start_ = interned("on_start");
};

}  // namespace

void bind_mpi(nb::module_& m) {
  nb::class_<Library>(m, "MpiLibrary")
      .def(
          "__init__",
          [](Library* self, std::uintptr_t test, nb::object array, nb::object datatype, nb::object in_place,
             std::int64_t in_place_address, nb::object error, nb::object begun, double begins_for,
             nb::dict dtypes, const std::vector<std::pair<std::int64_t, std::size_t>>& sizes,
             std::size_t handle_at, std::size_t handle_bytes, nb::object request, std::size_t request_at) {
            const std::size_t keeps_at = memory_kept_at(request);
            new (self) Library{reinterpret_cast<Test>(test),
                               array,
                               datatype,
                               in_place,
                               error,
                               static_cast<std::uint64_t>(in_place_address),
                               begun,
                               begins_for,
                               dtypes,
                               {},
                               handle_at,
                               handle_bytes,
                               request,
                               request_at,
                               keeps_at};
            for (const auto& [handle, bytes] : sizes) self->sizes[truncated(handle, handle_bytes)] = bytes;
          },
          "test"_a, "array"_a, "datatype"_a, "in_place"_a, "in_place_address"_a, "error"_a, "begun"_a,
          "begins_for"_a, "dtypes"_a, "sizes"_a, "handle_at"_a, "handle_bytes"_a, "request"_a, "request_at"_a)
      .def(
          "survey",
          [](const Library& self, nb::handle data, nb::handle other) {
            const long nbytes = survey(self, data);
            if (nbytes == kNotMpis || survey(self, other) == kNotMpis || !apart(data, other)) return kNotMpis;
            return nbytes;
          },
          nb::arg().none(), nb::arg().none(),
          "Return the bytes of a buffer's elements, -1 where that takes a closer look, -2 if MPI takes it, "
          "or "
          "another one beside it, only as something else.")
      .def(
          "settle",
          [](const Library& self, std::uintptr_t request, std::uintptr_t status) {
            alignas(16) std::array<std::uint8_t, 256> scratch;  // more than any MPI's status
            bool done = false;
            int code = 0;
            {
              const nb::gil_scoped_release release;
              code = poll(self, reinterpret_cast<void*>(request),
                          status ? reinterpret_cast<void*>(status) : scratch.data(), kWaiting, &done);
            }
            if (code) {
              PyErr_SetObject(self.error.ptr(), nb::int_(code).ptr());
              throw nb::python_error();
            }
            return done;
          },
          "request"_a, "status"_a, "Poll the request at an address for a moment; return whether it is done.");
  nb::class_<Flight>(m, "Flight")
      .def(nb::init<>())
      .def_ro("note", &Flight::note)
      .def_ro("run", &Flight::run)
      .def_ro("request", &Flight::request)
      .def_ro("began", &Flight::began);
  nb::class_<Operation>(m, "LearntOperation")
      .def(nb::init<const Library&, std::uintptr_t, int, int, int, bool, std::string, double,
                    std::vector<bool>>(),
           "library"_a, "post"_a, "send_at"_a, "recv_at"_a, "request_at"_a, "in_place"_a, "name"_a,
           "timeout"_a, "away"_a, nb::keep_alive<1, 2>())
      .def("learn", &Operation::learn, "send"_a.none(), "recv"_a.none(), "note"_a.none(), "arguments"_a,
           "program"_a.none(), "alignment"_a, "memory"_a.none(), "owner"_a.none())
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
  nb::class_<Messages>(m, "MpiMessages")
      .def(nb::init<const Library&, std::uintptr_t, std::uint64_t, bool, nb::object, nb::object, nb::object,
                    nb::object, nb::object, nb::object, long, std::vector<bool>>(),
           "library"_a, "function"_a, "comm"_a, "sends"_a, "post"_a, "request"_a, "op"_a, "waiting"_a,
           "met"_a.none(), "tracing"_a, "below"_a, "away"_a, nb::keep_alive<1, 2>())
      .def("begin", &Messages::begin, nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg().none())
      .def("take", &Messages::take,
           "Return the messages since the last call, their bytes, and the bytes to or from other hosts.");
  m.def(
      "mpi_reduction",
      [](int fold, int dtype, bool large) {
        if (fold < 0 || fold >= static_cast<int>(Fold::kFolds)) Buffer::fail("there is no such fold");
        return engine::mpi_function(static_cast<Fold>(fold), dtype, large);
      },
      "fold"_a, "dtype"_a, "large"_a, "Address of MPI's user function, or 0 if there is none.");
}

}  // namespace hybridcomp
