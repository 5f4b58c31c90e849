// The engine in Python; hybridcomp/collectives/execution uses it.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "python/objects.hpp"

namespace hybridcomp {
namespace engine {
namespace {

Engine* made = nullptr;  // kept until the process ends

// Runs that Python has dropped while they were in flight.
std::list<std::pair<std::shared_ptr<Execution>, nb::object>>& orphans() {
  static auto& all = *new std::list<std::pair<std::shared_ptr<Execution>, nb::object>>;
  return all;
}

// Let go of the memory of orphans that have ended. With the interpreter's lock.
void bury() {
  orphans().remove_if([](const auto& orphan) {
    return orphan.first->done() && orphan.first->failure().fault == Fault::kNone;
  });
}

}  // namespace

Engine* the_engine() {
  if (!made) Buffer::fail("the engine has not been made");
  return made;
}

Run::~Run() {
  if (outlives_ && execution_ && !(execution_->done() && execution_->failure().fault == Fault::kNone))
    orphans().emplace_back(execution_, keep_);
}

std::shared_ptr<Execution> launch(const ProgramHandle& handle, std::optional<std::uint32_t> first,
                                  const Envelope* envelope, std::uint64_t send, std::uint64_t recv,
                                  Memory* memory, double seconds, bool traced) {
  Engine& engine = *the_engine();
  if (envelope) {
    first = 0;
  } else if (!first) {
    const std::lock_guard lock(engine.mutex());  // the group's count of operations changes
    first = handle.group->reserve();
  }
  auto execution = std::make_shared<Execution>(engine, handle.group, handle.program, *first, envelope,
                                               reinterpret_cast<const std::uint8_t*>(send),
                                               reinterpret_cast<std::uint8_t*>(recv), memory, traced);
  engine.start(execution, seconds);
  return execution;
}

void check_memory(const ProgramHandle& program, const Memory* memory) {
  for (const Step& step : program.program->steps)
    if (step.memory >= 0 && (!memory || static_cast<std::size_t>(step.memory) + step.count > memory->size() ||
                             memory->kind() != program.program->wide()))
      Buffer::fail("a step has no such memory of error feedback");
}

namespace {

std::span<const std::int64_t> integers(const Buffer& buffer, const char* name) {
  const std::size_t n = buffer.elements(sizeof(std::int64_t), name);
  if (n && reinterpret_cast<std::uintptr_t>(buffer.data()) % alignof(std::int64_t))
    Buffer::fail(std::string(name) + " must be aligned integers");
  return {reinterpret_cast<const std::int64_t*>(buffer.data()), n};
}

void make_engine(const std::array<std::uintptr_t, 7>& functions, std::uint64_t byte,
                 std::size_t request_bytes, std::size_t status_bytes, std::size_t error_at) {
  if (made) Buffer::fail("there is an engine");
  for (const std::uintptr_t function : functions)
    if (!function) Buffer::fail("a function of MPI's has an address");
  if (request_bytes != 4 && request_bytes != 8) Buffer::fail("a request has 4 or 8 bytes");
  if (!status_bytes || status_bytes > 256 || error_at + sizeof(int) > status_bytes)
    Buffer::fail("a status has its error within it");
  Mpi mpi{};
  mpi.isend = reinterpret_cast<decltype(mpi.isend)>(functions[0]);
  mpi.irecv = reinterpret_cast<decltype(mpi.irecv)>(functions[1]);
  mpi.testsome = reinterpret_cast<decltype(mpi.testsome)>(functions[2]);
  mpi.get_count = reinterpret_cast<decltype(mpi.get_count)>(functions[3]);
  mpi.cancel = reinterpret_cast<decltype(mpi.cancel)>(functions[4]);
  mpi.test_cancelled = reinterpret_cast<decltype(mpi.test_cancelled)>(functions[5]);
  mpi.set_elements = reinterpret_cast<decltype(mpi.set_elements)>(functions[6]);
  mpi.byte = byte;
  mpi.request_bytes = request_bytes;
  mpi.status_bytes = status_bytes;
  mpi.error_at = error_at;
  made = new Engine(mpi);
}

// Make messages in an arena of which `first` bytes are taken.
void use_arena(std::uintptr_t base, std::size_t bytes, std::size_t first) {
  if (!base || base % kLine || first % kLine || first < 2 * kLine || first > bytes)
    Buffer::fail("an arena has a line for its token and one for its bell");
  Engine& engine = *the_engine();
  nb::gil_scoped_release release;
  engine.use_arena({reinterpret_cast<std::uint8_t*>(base), bytes}, first);
}

struct GroupHandle {
  std::shared_ptr<Group> group;
};

// Make a group. `known`: all its ranks have had messages by another way.
GroupHandle make_group(std::uint64_t comm, int rank, int size, bool known) {
  if (size < 1 || rank < 0 || rank >= size) Buffer::fail("a rank is below the number of ranks");
  auto group = std::make_shared<Group>();
  group->comm = comm;
  group->rank = rank;
  group->size = size;
  group->place.assign(static_cast<std::size_t>(size), -1);
  group->contacts.assign(static_cast<std::size_t>(size), known ? -1 : 0);
  group->away.assign(static_cast<std::size_t>(size), false);
  return {std::move(group)};
}

// Set the MPI communicator of a group that was made before it, and that has sent nothing.
void use_communicator(const GroupHandle& handle, std::uint64_t comm) { handle.group->comm = comm; }

// Set which ranks are on other hosts.
void use_hosts(const GroupHandle& handle, const std::vector<bool>& away) {
  if (away.size() != static_cast<std::size_t>(handle.group->size)) Buffer::fail("every rank has a host");
  handle.group->away = away;
}

// Take rings in the arena for so many neighbours, one after the other; returns the first one's place.
std::size_t take_rings(const GroupHandle& handle, std::size_t count) {
  Engine& engine = *the_engine();
  nb::gil_scoped_release release;
  const std::lock_guard lock(engine.mutex());
  if (handle.group->rings) Buffer::fail("a group takes rings once");
  std::uint8_t* const block = engine.blocks.take(count * Ring::kBytes);
  std::memset(block, 0, count * Ring::kBytes);
  handle.group->rings = block;
  return static_cast<std::size_t>(block - engine.blocks.arena().base);
}

// Give a group's rings back, once no rank has or will have messages in flight in it: the next group may get
// them.
void give_rings(const GroupHandle& handle) {
  Engine& engine = *the_engine();
  nb::gil_scoped_release release;
  const std::lock_guard lock(engine.mutex());
  Group& group = *handle.group;
  if (!group.rings) return;
  group.neighbours.clear();
  std::fill(group.place.begin(), group.place.end(), -1);
  engine.blocks.give(group.rings);
  group.rings = nullptr;
}

void add_neighbour(const GroupHandle& handle, int rank, std::uintptr_t base, std::size_t bytes,
                   std::size_t to, std::size_t from) {
  Group& group = *handle.group;
  const Arena own = the_engine()->blocks.arena(), other{reinterpret_cast<std::uint8_t*>(base), bytes};
  if (rank < 0 || rank >= group.size || rank == group.rank || group.neighbour(rank))
    Buffer::fail("a neighbour is another rank, once");
  if (!base || !other.holds(to, Ring::kBytes) || !own.holds(from, Ring::kBytes))
    Buffer::fail("a ring lies within its arena");
  group.place[static_cast<std::size_t>(rank)] = static_cast<int>(group.neighbours.size());
  Neighbour neighbour;
  neighbour.rank = rank;
  neighbour.arena = other;
  neighbour.to = Ring(other.base + to);
  neighbour.from = Ring(own.base + from);
  group.neighbours.push_back(std::move(neighbour));
}

// See Group::begin.
void begin(const GroupHandle& handle, std::uint32_t operation) {
  Engine& engine = *the_engine();
  nb::gil_scoped_release release;
  const std::lock_guard lock(engine.mutex());
  handle.group->begin(operation);
}

// Reserve the numbers of an operation that will be started later: taken in the order in which ranks call.
std::uint32_t reserve(const GroupHandle& handle) {
  Engine& engine = *the_engine();
  nb::gil_scoped_release release;
  const std::lock_guard lock(engine.mutex());
  return handle.group->reserve();
}

ProgramHandle make_program(const GroupHandle& group, const Encoder* encoder, int codec, std::uint32_t params,
                           int dtype, int fold, int rank, int ranks, bool stream, std::size_t bytes,
                           std::size_t framed, nb::handle steps, nb::handle slots, nb::handle lists,
                           const std::array<std::size_t, 3>& limits,
                           const std::optional<std::vector<std::size_t>>& bounds) {
  const Buffer rows(steps, false), rooms(slots, false), refs(lists, false);
  if (codec < 0 || codec > 255) Buffer::fail("a codec's id fits a byte");
  if (ranks < 1 || rank < 0 || rank >= ranks) Buffer::fail("a rank is below the number of ranks");
  if (fold < 0 || fold >= static_cast<int>(Fold::kFolds) || dtype < 0 || dtype > 255)
    Buffer::fail("there is no such fold");
  const bool plain = !encoder && !bounds;  // then elements are moved as they are, whatever they are
  Carriage carriage{std::nullopt,
                    static_cast<std::uint8_t>(codec),
                    params,
                    fold || plain ? static_cast<DTypeCode>(dtype) : float_dtype(dtype),
                    ranks,
                    stream,
                    bytes,
                    framed,
                    static_cast<Fold>(fold)};
  if (encoder) carriage.encoder = *encoder;
  carriage.bounds = bounds;
  std::string fault;
  const std::size_t elements[kBuffers] = {limits[0], limits[1], limits[2]};
  const int channels = group.group->channels();
  auto program = std::make_shared<Program>(carriage, integers(rows, "steps"), integers(rooms, "slots"),
                                           integers(refs, "lists"), elements, rank, ranks, channels, &fault);
  if (!fault.empty()) Buffer::fail("schedule: " + fault);
  return {std::move(program), group.group};
}

Run start(const ProgramHandle& program, std::uint32_t first, std::uintptr_t send, std::uintptr_t recv,
          Memory* memory, nb::object keep, double seconds, bool traced,
          std::optional<std::array<int, 2>> peer_and_tag) {
  bury();
  std::optional<Envelope> envelope;
  if (peer_and_tag) envelope = {(*peer_and_tag)[0], (*peer_and_tag)[1]};
  if (envelope.has_value() != (program.program->carriage.framed != 0))
    Buffer::fail("a framed message, and no other, has a peer and a tag");
  check_memory(program, memory);
  std::shared_ptr<Execution> execution;
  {
    nb::gil_scoped_release release;
    execution = launch(program, first, envelope ? &*envelope : nullptr, send, recv, memory, seconds, traced);
  }
  return Run(std::move(execution), std::move(keep));
}

nb::object failure(const Run& run) {
  const Failure& failure = run->failure();
  if (!run->done() || failure.fault == Fault::kNone) return nb::none();
  const auto* const text = reinterpret_cast<const char*>(failure.message.data());
  const Program& program = run->program();
  const Step& step = program.steps[failure.step];
  int dtype = program.carriage.dtype;
  // The type is that of the slot that the message was in, or should have come to.
  for (const std::uint32_t at : program.list(step.slots)) dtype = program.dtype_of(program.slots[at]);
  if (!step.slots.count && !program.slots.empty()) dtype = program.dtype_of(program.slots[step.slot]);
  return nb::make_tuple(static_cast<int>(failure.fault), failure.step, failure.peer, failure.code, step.count,
                        dtype, failure.bytes, nb::bytes(text, failure.message.size()));
}

nb::tuple tally(const Run& run) {
  const Tally& t = run->tally();
  return nb::make_tuple(t.wire_bytes, t.shared_bytes, t.between_bytes, t.encode_seconds, t.decode_seconds);
}

nb::list intervals(const Run& run) {
  nb::list all;
  for (const Interval& i : run->intervals())
    all.append(nb::make_tuple(i.encodes ? "encode" : "decode", i.began, i.ended));
  return all;
}

std::string reason_of(const Unfinished& one) {
  switch (one.reason) {
    case Unfinished::kNoMessage:
      return "no message is here";
    case Unfinished::kUnread:
      return "the message is not read (readers: " + std::to_string(one.readers) + ")";
    case Unfinished::kRingFull:
      return "the ring is full";
    default:
      return "it is with MPI";
  }
}

// Return the sends and receives that have begun and not ended: step, whether it receives, peer, channel, and
// what it waits for.
std::vector<std::tuple<std::uint32_t, bool, int, int, std::string>> unfinished(const Run& run) {
  std::vector<std::tuple<std::uint32_t, bool, int, int, std::string>> found;
  for (const Unfinished& one : the_engine()->unfinished(*run))
    found.emplace_back(one.step, one.reason == Unfinished::kNoMessage, one.peer, one.channel, reason_of(one));
  return found;
}

}  // namespace
}  // namespace engine

void bind_engine(nb::module_& m) {
  using namespace nb::literals;
  using namespace engine;
  m.def("make_engine", &make_engine, "functions"_a, "byte"_a, "request_bytes"_a, "status_bytes"_a,
        "error_at"_a);
  m.def("engine_use_arena", &use_arena, "base"_a, "bytes"_a, "first"_a);
  m.attr("ENGINE_RING_BYTES") = static_cast<std::size_t>(Ring::kBytes);
  m.def("engine_used_bytes", [] { return the_engine()->blocks.used(); });
  m.def(
      "engine_trim_period",
      [](std::size_t period) {
        Engine& engine = *the_engine();
        const std::lock_guard lock(engine.mutex());
        return std::exchange(engine.blocks.period, period);
      },
      "period"_a, nb::call_guard<nb::gil_scoped_release>(),
      "For tests: set after how many blocks given back unused pages go back; returns the period before.");
  m.def(
      "engine_damage",
      [](int peer, std::size_t least, bool sealed, std::size_t at, std::uint8_t flip) {
        the_engine()->damage({peer, least, sealed, at, flip});
      },
      "peer"_a, "least"_a, "sealed"_a = false, "at"_a = 0, "flip"_a = 4,
      nb::call_guard<nb::gil_scoped_release>(),
      "For tests: change the next such message over MPI; `sealed`: with the CRC that fits.");
  m.def("engine_stop", [] {
    if (!made) return;
    nb::gil_scoped_release release;
    made->stop();
  });
  nb::class_<GroupHandle>(m, "EngineGroup")
      .def("add_neighbour", &add_neighbour, "rank"_a, "base"_a, "bytes"_a, "to"_a, "from_"_a)
      .def("use_communicator", &use_communicator, "comm"_a)
      .def("use_hosts", &use_hosts, "away"_a)
      .def("take_rings", &take_rings, "count"_a)
      .def("give_rings", &give_rings)
      .def("begin", &begin, "operation"_a)
      .def("reserve", &reserve);
  m.def("engine_group", &make_group, "comm"_a, "rank"_a, "size"_a, "known"_a);
  nb::class_<ProgramHandle>(m, "EngineProgram");
  m.def("engine_program", &make_program, "group"_a, "encoder"_a.none(), "codec"_a, "params"_a, "dtype"_a,
        "fold"_a, "rank"_a, "ranks"_a, "stream"_a, "bytes"_a, "framed"_a, "steps"_a, "slots"_a, "lists"_a,
        "limits"_a, "bounds"_a.none());
  m.def("engine_start", &start, "program"_a, "first"_a, "send"_a, "recv"_a, "memory"_a.none(), "keep"_a,
        "seconds"_a, "traced"_a, "envelope"_a.none());
  nb::class_<Run>(m, "EngineRun")
      .def("done", [](const Run& run) { return run->done(); })
      .def("watch", [](const Run& run) { run->watched.store(true); })
      .def("recall", [](const Run&) { the_engine()->recall(); })
      .def(
          "wait",
          [](const Run& run, double seconds, double waited) {
            return the_engine()->wait(*run, seconds, waited, true);
          },
          "seconds"_a, "waited"_a = 0.0, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "abandon", [](const Run& run) { the_engine()->abandon(*run); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "cancel", [](const Run& run) { return the_engine()->cancel(*run); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("status",
           [](const Run& run) {
             const auto& status = run->status();
             return nb::bytes(reinterpret_cast<const char*>(status.data()), run->done() ? status.size() : 0);
           })
      .def("unfinished", &unfinished, nb::call_guard<nb::gil_scoped_release>())
      .def("failure", &failure)
      .def("tally", &tally)
      .def("intervals", &intervals);
  bind_python_steps(m);
}

}  // namespace hybridcomp
