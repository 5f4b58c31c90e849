// Memories of error feedback, for codecs with an Encoder and, by their halves, for all others.
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <typeinfo>

#include "codecs/feedback/joined.hpp"
#include "codecs/feedback/memories.hpp"
#include "codecs/messages/opening.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// Return a buffer's memory as `count` values of a state's type; ValueError unless it is aligned and just that
// long.
std::uint8_t* values_of(const Buffer& buffer, std::size_t count, bool wide, const char* name) {
  const std::size_t size = wide ? 8 : 4;
  if (buffer.bytes() != count * size || reinterpret_cast<std::uintptr_t>(buffer.data()) % size)
    Buffer::fail(std::string(name) + " must be " + std::to_string(count) +
                 (wide ? " aligned doubles" : " aligned floats"));
  return buffer.data();
}

bool is_wide(const Memory& memory) { return memory.kind() == kFloat64; }

// Return the number of a buffer's elements, which begin at `start`; ValueError unless they lie within the
// memory.
std::size_t span_of(const Memory& memory, const Buffer& buffer, DTypeCode dtype, std::size_t start,
                    const char* name) {
  const std::size_t n = buffer.elements(size_of(dtype), name);
  if (start > memory.size() || n > memory.size() - start)
    Buffer::fail("elements " + std::to_string(start) + " .. " + std::to_string(start + n) +
                 " are not a span of " + std::to_string(memory.size()));
  if ((dtype == kFloat64) != is_wide(memory)) Buffer::fail("doubles, and only they, have states of doubles");
  return n;
}

void check_out(const Memory& memory, const Encoder& encoder, const Buffer& out, std::size_t n) {
  const std::size_t need = encoder.bound(n, memory.kind());
  if (!need) Buffer::fail("the codec does not take this dtype");
  if (out.bytes() < need) Buffer::fail("out is too small");
}

[[noreturn]] void fail_decoding() { Buffer::fail("messages of this codec are not decoded here"); }

std::size_t encode(Memory& memory, const Encoder& encoder, nb::handle x, int dtype, std::size_t start,
                   nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(x, false), to(out, true);
  const std::size_t n = span_of(memory, from, type, start, "x");
  check_out(memory, encoder, to, n);
  std::size_t bytes;
  {
    nb::gil_scoped_release release;
    bytes = memory.encode(kernels(), encoder, from.data(), type, n, start, thread_count(), to.data());
  }
  if (!bytes) fail_decoding();
  return bytes;
}

void correct(Memory& memory, nb::handle x, int dtype, std::size_t start, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(x, false), to(out, true);
  const std::size_t n = span_of(memory, from, type, start, "x");
  std::uint8_t* const corrected = values_of(to, n, is_wide(memory), "out");
  nb::gil_scoped_release release;
  memory.correct(kernels(), from.data(), type, n, start, thread_count(), corrected);
}

// Arguments of `keep` and `keep_sum`.
struct Kept {
  Kept(const Memory& memory, nb::handle corrected, nb::handle decoded, std::size_t start)
      : from(corrected, false),
        sent(decoded, true),
        n(span_of(memory, from, memory.kind(), start, "corrected")),
        values(values_of(from, n, is_wide(memory), "corrected")),
        lost(values_of(sent, n, is_wide(memory), "decoded")) {}

  const Buffer from, sent;
  const std::size_t n;
  const std::uint8_t* const values;
  Lease lost;
};

void keep(Memory& memory, nb::handle corrected, nb::handle decoded, std::size_t start, double weight) {
  Kept kept(memory, corrected, decoded, start);
  if (!memory.corrected(kept.n)) Buffer::fail("correct comes before keep");
  nb::gil_scoped_release release;
  memory.keep(kernels(), kept.values, kept.lost, kept.n, start, weight, thread_count());
}

void own(Memory& memory, const Encoder* encoder, nb::handle x, int dtype, std::size_t start,
         nb::handle sums) {
  static const Encoder& nobody = *new Encoder;  // for forms that do not use it
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(x, false), to(sums, true);
  const std::size_t n = span_of(memory, from, type, start, "x");
  std::uint8_t* const total = values_of(to, n, is_wide(memory), "sums");
  if (memory.sends_own() && (!encoder || !encoder->bound(n, memory.kind())))
    Buffer::fail("this form needs an encoder of this dtype");
  bool done;
  {
    nb::gil_scoped_release release;
    done = memory.own(kernels(), encoder ? *encoder : nobody, from.data(), type, n, start, thread_count(),
                      total);
  }
  if (!done) fail_decoding();
}

// Sum of an owned span, which is used up.
struct Total {
  Total(const Memory& memory, nb::handle total, std::size_t start, int ranks)
      : buffer(total, true),
        n(span_of(memory, buffer, memory.kind(), start, "total")),
        values(values_of(buffer, n, is_wide(memory), "total")) {
    if (ranks < 1) Buffer::fail("ranks must be at least 1");
    if (!memory.owned(n, start)) Buffer::fail("own comes before the sum");
  }

  const Buffer buffer;
  const std::size_t n;
  std::uint8_t* const values;
};

std::size_t encode_sum(Memory& memory, const Encoder& encoder, nb::handle total, std::size_t start, int ranks,
                       nb::handle out) {
  const Total sum(memory, total, start, ranks);
  const Buffer to(out, true);
  check_out(memory, encoder, to, sum.n);
  std::size_t bytes;
  {
    nb::gil_scoped_release release;
    bytes = memory.encode_sum(kernels(), encoder, sum.values, sum.n, start, ranks, thread_count(), to.data());
  }
  if (!bytes) fail_decoding();
  return bytes;
}

void correct_sum(Memory& memory, nb::handle total, std::size_t start, int ranks) {
  const Total sum(memory, total, start, ranks);
  nb::gil_scoped_release release;
  memory.correct_sum(kernels(), sum.values, sum.n, start, ranks, thread_count());
}

void keep_sum(Memory& memory, nb::handle corrected, nb::handle decoded, std::size_t start, int ranks) {
  if (ranks < 1) Buffer::fail("ranks must be at least 1");
  Kept kept(memory, corrected, decoded, start);
  nb::gil_scoped_release release;
  memory.keep_sum(kernels(), kept.values, kept.lost, kept.n, start, ranks, thread_count());
}

void result(Memory& memory, nb::handle values, std::size_t start) {
  const Buffer buffer(values, true);
  const std::size_t n = span_of(memory, buffer, memory.kind(), start, "values");
  std::uint8_t* const to = values_of(buffer, n, is_wide(memory), "values");
  nb::gil_scoped_release release;
  memory.result(kernels(), to, n, start, thread_count());
}

// Have a memory send a momentum of which x is a part; without one it sends x again. Its owner keeps it alive.
void blend(PlainMemory& memory, nb::handle momentum, double beta) {
  if (momentum.is_none()) {
    memory.blend(nullptr, 0);
    return;
  }
  if (!(beta >= 0 && beta < 1)) Buffer::fail("beta must be from 0 to below 1");
  const Buffer values(momentum, false);
  memory.blend(values_of(values, memory.size(), is_wide(memory), "momentum"), beta);
}

void add(EstimateMemory& memory, nb::handle decoded, nb::handle out) {
  const Buffer from(decoded, false), to(out, true);
  if (span_of(memory, from, memory.kind(), 0, "decoded") != memory.size())
    Buffer::fail("decoded must have all elements");
  std::uint8_t* const estimate = values_of(to, memory.size(), is_wide(memory), "out");
  nb::gil_scoped_release release;
  memory.add(kernels(), from.data(), thread_count(), estimate);
}

// -- arrays ------------------------------------------------------------------------------------------------

// Return a NumPy array of a room's elements of `size` bytes (1: bytes). `held` keeps the room.
nb::object array_of(const Room& room, std::size_t size, nb::handle held) {
  const std::size_t count = room.bytes() / size;
  const nb::dlpack::dtype dtype = size == 8   ? nb::dtype<double>()
                                  : size == 4 ? nb::dtype<float>()
                                              : nb::dtype<std::uint8_t>();
  return nb::cast(nb::ndarray<nb::numpy>(room.data(), 1, &count, held, nullptr, dtype));
}

// Return an array of the state: the memory's own elements until a step replaces them.
nb::object state(Memory& memory, std::string_view name, bool make) {
  const RoomPointer room = memory.state(name, make);
  if (!room) return nb::none();
  const nb::capsule held(new RoomPointer(room),
                         [](void* p) noexcept { delete static_cast<RoomPointer*>(p); });
  return array_of(*room, memory.state_size(), held);
}

// Return an array of n values whose memory goes back to the pool with the last reference.
nb::object take(const std::shared_ptr<Rooms>& rooms, std::size_t n, bool wide) {
  struct Taken {
    std::shared_ptr<Rooms> rooms;
    RoomPointer room;
  };
  const std::size_t size = wide ? 8 : 4;
  if (n > kMostElements) Buffer::fail("so many elements cannot be");
  const nb::capsule held(new Taken{rooms, rooms->take(n * size)}, [](void* p) noexcept {
    Taken* const taken = static_cast<Taken*>(p);
    taken->rooms->give(std::move(taken->room));
    delete taken;
  });
  return array_of(*static_cast<const Taken*>(held.data())->room, size, held);
}

// -- the forms ---------------------------------------------------------------------------------------------

using Shared = std::shared_ptr<Rooms>;

template <typename M, typename... Options>
void make(M* self, std::size_t n, bool wide, Shared rooms, Options... options) {
  if (n > kMostElements) Buffer::fail("so many elements cannot be");
  new (self) M(n, wide, std::move(rooms), options...);
}

void check_share(double value, const char* name) {
  if (!(value >= 0 && value < 1)) Buffer::fail(std::string(name) + " must be from 0 to below 1");
}

void make_average(AverageMemory* self, std::size_t n, bool wide, Shared rooms, double beta,
                  std::uint64_t reset_steps) {
  check_share(beta, "beta");
  if (!reset_steps) Buffer::fail("reset_steps must be at least 1");
  make(self, n, wide, std::move(rooms), beta, reset_steps);
}

template <typename M>
void make_momentum(M* self, std::size_t n, bool wide, Shared rooms, double momentum) {
  check_share(momentum, "momentum");
  make(self, n, wide, std::move(rooms), momentum);
}

void join(JoinedMemory* self, std::vector<std::shared_ptr<Memory>> parts, Shared rooms) {
  if (parts.empty()) Buffer::fail("there is no memory to join");
  const Memory* first = parts.front().get();
  for (const auto& part : parts) {
    const Memory* one = part.get();
    if (!one || typeid(*one) != typeid(*first) || one->kind() != first->kind())
      Buffer::fail("memories of several forms, or types, cannot be joined");
  }
  new (self) JoinedMemory(std::move(parts), std::move(rooms));
}

}  // namespace

void bind_memory(nb::module_& m) {
  nb::class_<Rooms>(m, "Rooms", "Memory that is used again.").def(nb::new_([] {
    return std::make_shared<Rooms>();
  }));
  m.def("take", &take, "rooms"_a, "n"_a, "wide"_a,
        "An array of n values with anything in it, whose memory goes back with the last reference.");
  nb::class_<Memory>(m, "Memory", "What one key of error feedback remembers.")
      .def_prop_ro("n", &Memory::size)
      .def_prop_ro("tracks", &Memory::tracks)
      .def_prop_ro("adds_own", &Memory::adds_own)
      .def_rw("steps", &Memory::steps)
      .def_rw("version", &Memory::version)
      .def("begin", &Memory::begin)
      .def("encode", &encode, "encoder"_a, "x"_a, "dtype"_a, "start"_a, "out"_a,
           "Returns the message's bytes.")
      .def("correct", &correct, "x"_a, "dtype"_a, "start"_a, "out"_a)
      .def("keep", &keep, "corrected"_a, "decoded"_a, "start"_a, "weight"_a)
      .def("own", &own, "encoder"_a.none(), "x"_a, "dtype"_a, "start"_a, "sums"_a)
      .def("encode_sum", &encode_sum, "encoder"_a, "total"_a, "start"_a, "ranks"_a, "out"_a,
           "Returns the message's bytes.")
      .def("correct_sum", &correct_sum, "total"_a, "start"_a, "ranks"_a)
      .def("keep_sum", &keep_sum, "corrected"_a, "decoded"_a, "start"_a, "ranks"_a)
      .def("result", &result, "values"_a, "start"_a)
      .def("state", &state, "name"_a, "make"_a = false,
           "An array of the state, its own memory; None if there is none of this name.");
  nb::class_<PlainMemory, Memory>(m, "PlainMemory")
      .def("__init__", &make<PlainMemory>, "n"_a, "wide"_a, "rooms"_a)
      .def("blend", &blend, "momentum"_a.none(), "beta"_a,
           "From now on x is a part of a momentum, whose memory must stay; None ends it.");
  nb::class_<AcceleratedMemory, PlainMemory>(m, "AcceleratedMemory")
      .def("__init__", &make_momentum<AcceleratedMemory>, "n"_a, "wide"_a, "rooms"_a, "momentum"_a);
  nb::class_<AverageMemory, Memory>(m, "AverageMemory")
      .def("__init__", &make_average, "n"_a, "wide"_a, "rooms"_a, "beta"_a, "reset_steps"_a);
  nb::class_<MomentumMemory, Memory>(m, "MomentumMemory")
      .def("__init__", &make_momentum<MomentumMemory>, "n"_a, "wide"_a, "rooms"_a, "momentum"_a);
  nb::class_<EstimateMemory, Memory>(m, "EstimateMemory")
      .def("__init__", &make<EstimateMemory>, "n"_a, "wide"_a, "rooms"_a)
      .def("add", &add, "decoded"_a, "out"_a)
      .def("settle", nb::overload_cast<bool>(&EstimateMemory::settle), "good"_a);
  nb::class_<JoinedMemory, Memory>(m, "JoinedMemory").def("__init__", &join, "parts"_a, "rooms"_a);
}

}  // namespace hybridcomp
