// Operations whose messages Python carries, for hybridcomp/torch/exchange.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "engine/carried_operations.hpp"
#include "python/objects.hpp"

namespace hybridcomp {
namespace engine {
namespace {

Run start(CarriedOperations& carried, const ProgramHandle& program, std::uint32_t first, std::uintptr_t send,
          std::uintptr_t recv, Memory* memory, nb::object keep, bool traced) {
  check_memory(program, memory);
  if (program.program->carriage.framed) Buffer::fail("an exchange carries no framed messages");
  std::shared_ptr<Execution> execution;
  {
    nb::gil_scoped_release release;
    execution = carried.start(program.program, first, reinterpret_cast<const std::uint8_t*>(send),
                              reinterpret_cast<std::uint8_t*>(recv), memory, traced);
  }
  return {std::move(execution), std::move(keep), false};
}

std::tuple<std::vector<std::size_t>, std::vector<std::size_t>> collect(CarriedOperations& carried) {
  const CarriedOperations::Bytes bytes = carried.collect();
  return {bytes.sent, bytes.most};
}

void pack(const CarriedOperations& carried, int peer, nb::handle out, std::size_t bytes) {
  const Buffer room(out, true);
  if (room.bytes() != bytes) Buffer::fail("there is room for the messages, and for nothing else");
  nb::gil_scoped_release release;
  carried.pack(peer, room.data());
}

// Return whether the fault is of a message that this rank does not expect, and the fault; None for none.
nb::object unpack(CarriedOperations& carried, int peer, nb::handle data) {
  const Buffer buffer(data, false);
  bool unlike = false;
  const std::string fault = carried.unpack(peer, buffer.data(), buffer.bytes(), &unlike);
  if (fault.empty()) return nb::none();
  return nb::make_tuple(unlike, fault);
}

}  // namespace
}  // namespace engine

void bind_carried_operations(nb::module_& m) {
  using namespace nb::literals;
  using namespace engine;
  nb::class_<CarriedOperations>(m, "CarriedOperations")
      .def(nb::init<int, const std::vector<bool>&, const std::vector<bool>&, std::shared_ptr<SharedBlocks>>(),
           "rank"_a, "near"_a, "away"_a, "blocks"_a)
      .def("reserve", &CarriedOperations::reserve)
      .def("start", &start, "program"_a, "first"_a, "send"_a, "recv"_a, "memory"_a.none(), "keep"_a,
           "traced"_a, nb::keep_alive<0, 1>())
      .def("run", &CarriedOperations::run, nb::call_guard<nb::gil_scoped_release>())
      .def("collect", &collect,
           "Return, by rank, the bytes to it that the next exchange takes, and the most from it.")
      .def("pack", &pack, "peer"_a, "out"_a, "bytes"_a)
      .def("sent", &CarriedOperations::sent, nb::call_guard<nb::gil_scoped_release>())
      .def("unpack", &unpack, "peer"_a, "data"_a)
      .def("abandon", &CarriedOperations::abandon, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace hybridcomp
