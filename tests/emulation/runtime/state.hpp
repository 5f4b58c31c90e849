// The running launch: its threads, the queue of those that can run, and how a fault ends it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "api.hpp"
#include "fiber.hpp"

namespace hc {

inline constexpr std::uint32_t kWarp = 32;
inline constexpr std::uint32_t kMaxThreads = 1024;
inline constexpr std::uint32_t kMaxArguments = 20;

enum class Wait : std::uint8_t { kNone, kBarrier, kWarp, kExited };

struct Thread {
  Context context;
  std::uint32_t index = 0;
  Wait wait = Wait::kNone;
  bool prepared = false;  // its stack holds a flow of control that can be switched to
  // The barrier or collective that the thread waits in, and the operands that it brought.
  const hc_site* site = nullptr;
  int op = 0;
  std::uint32_t mask = 0;
  std::uint32_t argument = 0;
  std::uint32_t width = kWarp;
  std::uint64_t value = 0;
  std::uint64_t result = 0;
};

struct Launch {
  using Kernel = void (*)();
  Kernel kernel = nullptr;
  const char* name = "";
  const std::uint64_t* arguments = nullptr;
  std::uint32_t argument_count = 0;
  std::uint32_t grid = 0;
  std::uint32_t threads = 0;  // threads of a block
  std::uint32_t dynamic_bytes = 0;
  std::uint64_t seed = 0;

  bool running = false;
  bool failed = false;
  std::string error;
  Context caller;

  std::uint32_t block = 0;
  std::uint32_t current = 0;  // running thread
  std::uint32_t exited = 0;
  std::uint32_t at_barrier = 0;
  std::uint32_t predicates = 0;  // threads at the barrier whose predicate is true
  std::uint64_t steps = 0;
  std::uint64_t step_limit = std::uint64_t{1} << 28;
  std::uint64_t random = 0;
  std::uint32_t warp_waiting[kMaxThreads / kWarp] = {};  // lanes that wait in a collective
  Thread all[kMaxThreads];

  Thread& running_thread() { return all[current]; }
};

extern Launch launch;

std::uint64_t random_number();

// Run a block, from its first thread to the end of its last, or to a fault.
void run_block();
// Give up the launch: `message` is told with the kernel's name, the block and the thread.
[[noreturn]] void fail(const std::string& message);
[[noreturn]] void fail_of(const Thread& thread, const std::string& message);
// Count a step that a kernel that never ends does again and again.
void count_step();

// Functions that scheduler.cpp and collectives.cpp call in each other.
void make_ready(std::uint32_t thread);
void suspend();
[[noreturn]] void explain_deadlock();

std::string place_of(const hc_site* site);

}  // namespace hc
