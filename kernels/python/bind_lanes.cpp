// Memory that the ranks of a host share, and their lanes, for hybridcomp/torch/exchange/lanes.py.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>

#include "engine/carried_operations.hpp"
#include "engine/lanes.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
namespace engine {
namespace {

Arena arena_of(const nb::handle& memory) {
  const Buffer whole(memory, true);
  if (reinterpret_cast<std::uintptr_t>(whole.data()) % kLine || whole.bytes() <= 2 * kLine)
    Buffer::fail("an arena has a line for its token and one for its bell");
  return {whole.data(), whole.bytes()};
}

const std::uint8_t* start_of(const nb::handle& buffer) { return Buffer(buffer, false).data(); }

std::size_t checked(const Lanes& lanes, std::size_t index) {
  if (index >= lanes.size()) Buffer::fail("there is no such neighbour");
  return index;
}

// Hand a neighbour its messages, and after them those of the compiled operations to a rank.
bool send(Lanes& lanes, std::size_t index, std::uint32_t exchange, const nb::list& messages, double seconds,
          const CarriedOperations* compiled, int peer) {
  checked(lanes, index);
  std::vector<Parcelled> all;
  std::vector<std::unique_ptr<Buffer>> held;
  for (const nb::handle each : messages) {
    const auto [tag, data] = nb::cast<std::tuple<std::int64_t, nb::object>>(each);
    held.push_back(std::make_unique<Buffer>(data, false));
    all.push_back({tag, held.back()->data(), held.back()->bytes()});
  }
  if (compiled) compiled->pack(peer, &all);
  nb::gil_scoped_release release;
  return lanes.send(index, exchange, all, seconds);
}

// Return a neighbour's messages, as tag, offset in its arena and bytes, but those of compiled operations,
// which these get; None where they are none; or a fault.
nb::object read(Lanes& lanes, std::size_t index, std::uint32_t exchange, std::uintptr_t base,
                CarriedOperations* compiled, int peer) {
  std::vector<Parcelled> messages;
  if (!lanes.read(checked(lanes, index), exchange, &messages)) return nb::none();
  nb::list found;
  for (const Parcelled& m : messages)
    if (compiled && m.tag >= kCompiled) {
      const std::string fault = compiled->deliver(peer, m, true);
      if (!fault.empty()) return nb::cast(fault);
    } else
      found.append(nb::make_tuple(m.tag, reinterpret_cast<std::uintptr_t>(m.data) - base, m.bytes));
  return found;
}

nb::object left(const Lanes& lanes, std::size_t index) {
  std::string why;
  if (!lanes.left(checked(lanes, index), &why)) return nb::none();
  return nb::bytes(why.data(), why.size());
}

}  // namespace
}  // namespace engine

void bind_lanes(nb::module_& m) {
  using namespace nb::literals;
  using namespace engine;
  nb::class_<SharedBlocks>(m, "SharedBlocks")
      .def(nb::init<>(), "Make a pool of the heap's blocks, for a process alone.")
      .def(
          "__init__",
          [](SharedBlocks* made, nb::handle memory, std::size_t first) {
            const Arena arena = arena_of(memory);
            if (first % kLine || first < 2 * kLine || first > arena.bytes)
              Buffer::fail("blocks begin behind an arena's bell");
            new (made) SharedBlocks(arena, first);
          },
          "memory"_a, "first"_a, nb::keep_alive<1, 2>())
      .def(
          "take",
          [](SharedBlocks& blocks, std::size_t bytes) {
            return static_cast<std::size_t>(blocks.take(bytes) - blocks.arena().base);
          },
          "bytes"_a, "Return the offset of a new block in the arena.")
      .def_prop_ro("used", &SharedBlocks::used)
      .def_prop_ro("held", &SharedBlocks::held)
      .def(
          "give", [](SharedBlocks& blocks, nb::handle block) { return blocks.give(start_of(block)); },
          "block"_a);
  nb::class_<Lanes>(m, "Lanes")
      .def(nb::init<std::shared_ptr<SharedBlocks>, std::size_t>(), "blocks"_a, "neighbours"_a)
      .def_prop_ro("rings", &Lanes::rings)
      .def(
          "connect",
          [](Lanes& lanes, nb::handle memory, std::size_t rings, std::size_t to, std::size_t from) {
            return lanes.connect(arena_of(memory), rings, to, from);
          },
          "memory"_a, "rings"_a, "to"_a, "from_"_a, nb::keep_alive<1, 2>())
      .def("send", &send, "index"_a, "exchange"_a, "messages"_a, "seconds"_a, "compiled"_a.none(), "peer"_a)
      .def(
          "leave",
          [](Lanes& lanes, std::size_t index, const std::string& why) {
            lanes.leave(checked(lanes, index), why);
          },
          "index"_a, "why"_a)
      .def("wait", &Lanes::wait, "exchange"_a, "seconds"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "here",
          [](const Lanes& lanes, std::size_t index, std::uint32_t exchange) {
            return lanes.here(checked(lanes, index), exchange);
          },
          "index"_a, "exchange"_a)
      .def("left", &left, "index"_a)
      .def("read", &read, "index"_a, "exchange"_a, "base"_a, "compiled"_a.none(), "peer"_a)
      .def("release", &Lanes::release, "exchange"_a);
}

}  // namespace hybridcomp
