// Objects of the engine that Python holds.
#pragma once

#include <memory>
#include <optional>

#include "engine/engine.hpp"
#include "python/bind.hpp"

namespace hybridcomp::engine {

// Return the process's engine, which ends with the process: operations in flight may outlast the interpreter.
Engine* the_engine();

// An operation in flight, and the Python objects whose memory it uses.
class Run {
 public:
  // `outlives`: MPI may use its memory after this object has gone.
  Run(std::shared_ptr<Execution> execution, nb::object keep, bool outlives = true)
      : execution_(std::move(execution)), keep_(std::move(keep)), outlives_(outlives) {}
  ~Run();
  Run(Run&& other) = default;
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Execution& operator*() const { return *execution_; }
  Execution* operator->() const { return execution_.get(); }

 private:
  std::shared_ptr<Execution> execution_;
  nb::object keep_;
  bool outlives_;
};

struct ProgramHandle {
  std::shared_ptr<const Program> program;
  std::shared_ptr<Group> group;
};

// ValueError unless a program's steps have a memory of error feedback where they need one.
void check_memory(const ProgramHandle& program, const Memory* memory);

void bind_python_steps(nb::module_& m);

// Start a program on two addresses, with the numbers that were reserved for it or the next ones; without the
// interpreter's lock; or, with an envelope, to its peer and by its tag. See Engine::start.
std::shared_ptr<Execution> launch(const ProgramHandle& handle, std::optional<std::uint32_t> first,
                                  const Envelope* envelope, std::uint64_t send, std::uint64_t recv,
                                  Memory* memory, double seconds, bool traced);

}  // namespace hybridcomp::engine
