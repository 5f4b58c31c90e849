// The simulator of schedules, from arrays of NumPy's.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "model/simulator.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

template <typename T>
const T* column(const Buffer& buffer, std::size_t count, const char* name) {
  if (buffer.bytes() != count * sizeof(T) || reinterpret_cast<std::uintptr_t>(buffer.data()) % alignof(T))
    Buffer::fail(std::string(name) + " must have " + std::to_string(count) + " aligned elements");
  return reinterpret_cast<const T*>(buffer.data());
}

void within(const std::int32_t* values, std::size_t count, std::int64_t least, std::int64_t limit,
            const char* name) {
  for (std::size_t i = 0; i < count; ++i)
    if (values[i] < least || values[i] >= limit)
      Buffer::fail(std::string(name) + " has " + std::to_string(values[i]) + " at " + std::to_string(i));
}

using Ports = std::vector<std::tuple<double, double, double>>;

// Simulate steps given as columns, those of model::Steps. Returns the seconds that each rank works, the
// ports' credits at the end, and the number of steps that never end.
std::tuple<std::vector<double>, std::vector<double>, std::size_t> simulate_steps(
    const nb::list& columns, const std::vector<std::int32_t>& pool, const std::vector<std::int32_t>& cores,
    const Ports& ports, const std::vector<double>& options, nb::handle begins, nb::handle ends) {
  if (columns.size() != 10) Buffer::fail("ten columns");
  const Buffer rank(columns[0], false), kind(columns[1], false), work(columns[2], false);
  const Buffer bytes(columns[3], false), latency(columns[4], false), line(columns[5], false);
  const Buffer out(columns[6], false), in(columns[7], false), edges(columns[8], false);
  const Buffer after(columns[9], false), to_begins(begins, true), to_ends(ends, true);
  const std::size_t n = rank.elements(sizeof(std::int32_t), "rank");
  model::Steps steps;
  steps.count = n;
  steps.rank = column<std::int32_t>(rank, n, "rank");
  steps.kind = column<std::int8_t>(kind, n, "kind");
  steps.work = column<double>(work, n, "work");
  steps.bytes = column<double>(bytes, n, "bytes");
  steps.latency = column<double>(latency, n, "latency");
  steps.line = column<std::int32_t>(line, n, "line");
  steps.out = column<std::int32_t>(out, n, "out");
  steps.in = column<std::int32_t>(in, n, "in");
  steps.edges = column<std::int32_t>(edges, n + 1, "edges");
  const std::size_t edge_count = after.elements(sizeof(std::int32_t), "after");
  steps.after = column<std::int32_t>(after, edge_count, "after");
  column<double>(to_begins, n, "begins");
  column<double>(to_ends, n, "ends");
  model::Machine machine;
  machine.pool = pool;
  machine.cores = cores;
  for (const auto& [rate, burst, credit] : ports) {
    if (!(rate > 0)) Buffer::fail("ports have rates above 0");
    machine.ports.push_back({rate, burst, credit});
  }
  if (options.size() != 7) Buffer::fail("seven options");
  for (const double option : options)
    if (!(option >= 0)) Buffer::fail("options are at least 0");
  machine.inside = options[0];
  machine.eager = options[1];
  machine.quantum = options[2];
  machine.start = options[3];
  machine.look = options[4];
  machine.patience = options[5];
  machine.wake = options[6];
  if (!(machine.inside > 0)) Buffer::fail("messages inside a host have a rate above 0");
  const auto most = static_cast<std::int64_t>(n);
  within(steps.rank, n, 0, static_cast<std::int64_t>(pool.size()), "rank");
  within(pool.data(), pool.size(), 0, static_cast<std::int64_t>(cores.size()), "pool");
  within(cores.data(), cores.size(), 1, 1 << 30, "cores");
  within(steps.out, n, -1, static_cast<std::int64_t>(ports.size()), "out");
  within(steps.in, n, -1, static_cast<std::int64_t>(ports.size()), "in");
  within(steps.after, edge_count, 0, most, "after");
  within(steps.line, n, 0, most, "line");
  for (std::size_t i = 0; i < n; ++i) {
    if (steps.kind[i] < 0 || steps.kind[i] > 2) Buffer::fail("kinds are 0, 1 and 2");
    if (!(steps.work[i] >= 0) || !(steps.bytes[i] >= 0) || !(steps.latency[i] >= 0))
      Buffer::fail("work, bytes and latency are at least 0");
    if (steps.edges[i + 1] < steps.edges[i]) Buffer::fail("edges ascend");
  }
  if (steps.edges[0] != 0 || static_cast<std::size_t>(steps.edges[n]) != edge_count)
    Buffer::fail("edges go from 0 to the length of after");
  std::size_t stuck = 0;
  model::Times times;
  {
    nb::gil_scoped_release release;
    times = model::simulate(steps, &machine, &stuck);
    std::copy(times.begins.begin(), times.begins.end(), reinterpret_cast<double*>(to_begins.data()));
    std::copy(times.ends.begin(), times.ends.end(), reinterpret_cast<double*>(to_ends.data()));
  }
  std::vector<double> credits;
  for (const model::Port& port : machine.ports) credits.push_back(port.credit);
  return {times.busy, credits, stuck};
}

}  // namespace

void bind_simulator(nb::module_& m) {
  m.def("simulate_steps", &simulate_steps, "columns"_a, "pool"_a, "cores"_a, "ports"_a, "options"_a,
        "begins"_a, "ends"_a);
}

}  // namespace hybridcomp
