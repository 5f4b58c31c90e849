// Simulated time: when each step of the schedules of all ranks begins and ends on a machine whose cores and
// links are shared. Discrete events; a link's flows share it evenly at every moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridcomp::model {

enum class StepKind : std::int8_t { kCompute = 0, kSend = 1, kReceive = 2 };

// The steps of all ranks, rank after rank, as columns. Columns that a kind of step does not use are not read.
struct Steps {
  std::size_t count = 0;
  const std::int32_t* rank = nullptr;   // ascending, from 0
  const std::int8_t* kind = nullptr;    // StepKind
  const double* work = nullptr;         // seconds of a core: before a message leaves, after one has come
  const double* bytes = nullptr;        // bytes of a message on its link
  const double* latency = nullptr;      // for a send: seconds until the receiver may see the message's end
  const std::int32_t* line = nullptr;   // sends and receives of one line meet in their order
  const std::int32_t* out = nullptr;    // for a send: the port that its message leaves by; -1 for none
  const std::int32_t* in = nullptr;     // for a send: the port that its message enters by
  const std::int32_t* edges = nullptr;  // count + 1 starts of the steps' lists in `after`
  const std::int32_t* after = nullptr;  // steps that must have ended
};

// One direction of a host's link.
struct Port {
  double rate;    // bytes per second
  double burst;   // most bytes that an idle port saves up at that rate, to let pass at once
  double credit;  // bytes of the burst saved up at the start; after the run, at the end
};

struct Machine {
  std::vector<std::int32_t> pool;   // by rank: the pool of cores that it runs on
  std::vector<std::int32_t> cores;  // number of cores of each pool
  std::vector<Port> ports;
  double inside = 1;   // bytes per second of a message that leaves by no port
  double eager = 0;    // messages of at most so many bytes leave whether or not they are expected
  double quantum = 1;  // seconds after which a rank gives its core to another that waits for one
  double start = 0;    // seconds of a core before a rank's first step
  // A rank that waits looks for messages, each time for `look` seconds of a core that it then gives to
  // others, until it has waited for `patience` seconds; then it sleeps, and needs `wake` seconds once a
  // message is there.
  double look = 0;
  double patience = 0;
  double wake = 0;
};

struct Times {
  std::vector<double> begins, ends;  // by step; a message's times are those of its way
  std::vector<double> busy;          // seconds of a core, by rank
};

// Run all steps; `stuck` gets the number of steps that never end because they wait for one another.
// `machine.ports` is left as it is at the end.
Times simulate(const Steps& steps, Machine* machine, std::size_t* stuck);

}  // namespace hybridcomp::model
