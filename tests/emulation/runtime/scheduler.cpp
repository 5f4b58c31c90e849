// Runs the threads of a block in turn, each until it waits.
#include <utility>

#include "checks.hpp"
#include "state.hpp"

namespace hc {

Launch launch;

namespace {

// Threads that can run. Each is in it at most once.
struct Queue {
  std::uint16_t threads[kMaxThreads];
  std::uint32_t head = 0;
  std::uint32_t count = 0;

  std::uint16_t& at(std::uint32_t i) { return threads[(head + i) % kMaxThreads]; }
  void push(std::uint32_t thread) { at(count++) = static_cast<std::uint16_t>(thread); }
  std::uint32_t pop() {
    if (launch.seed > 1) std::swap(at(0), at(static_cast<std::uint32_t>(random_number() % count)));
    const std::uint32_t thread = at(0);
    head = (head + 1) % kMaxThreads;
    --count;
    return thread;
  }
};

Queue queue;

void call_kernel() {
  using W = std::uint64_t;
  using Function = void (*)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);
  const W* a = launch.arguments;
  // Registers and stack slots of 64 bits hold integers and pointers alike, and extra arguments harm nobody.
  reinterpret_cast<Function>(launch.kernel)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10],
                                            a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19]);
}

void thread_main();

void resume(std::uint32_t next, Context& from) {
  Thread& thread = launch.all[next];
  if (!thread.prepared) {
    prepare(thread.context, thread_main);
    thread.prepared = true;
  }
  launch.current = next;
  checks::running(thread);
  switch_to(from, thread.context);
}

// Returns when the thread is to run the kernel again, in another block.
void exit_thread() {
  Thread& self = launch.running_thread();
  self.wait = Wait::kExited;
  ++launch.exited;
  if (queue.count > 0) {
    resume(queue.pop(), self.context);
  } else if (launch.exited == launch.threads) {
    switch_to(self.context, launch.caller);
  } else {
    explain_deadlock();
  }
}

void thread_main() {
  entered();
  for (;;) {
    call_kernel();
    exit_thread();
  }
}

}  // namespace

std::uint64_t random_number() {  // splitmix64
  std::uint64_t z = (launch.random += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

void make_ready(std::uint32_t thread) {
  launch.all[thread].wait = Wait::kNone;
  queue.push(thread);
}

void suspend() {
  const std::uint32_t self = launch.current;
  count_step();
  if (queue.count == 0) explain_deadlock();
  const std::uint32_t next = queue.pop();
  if (next != self) resume(next, launch.all[self].context);
}

void count_step() {
  if (++launch.steps > launch.step_limit) {
    fail("the kernel does not seem to end: more than " + std::to_string(launch.step_limit) +
         " waits, atomics and watched accesses in one block");
  }
}

void run_block() {
  const std::uint32_t n = launch.threads;
  launch.exited = launch.at_barrier = launch.predicates = 0;
  launch.steps = 0;
  queue.head = queue.count = 0;
  for (std::uint32_t& waiting : launch.warp_waiting) waiting = 0;
  for (std::uint32_t i = 0; i < n; ++i) launch.all[i].index = i;
  for (std::uint32_t i = 0; i < n; ++i) make_ready(launch.seed == 1 ? n - 1 - i : i);
  checks::block_begins();
  resume(queue.pop(), launch.caller);
  checks::block_ends();
}

void fail_of(const Thread& thread, const std::string& message) {
  launch.error = std::string(launch.name) + ": block " + std::to_string(launch.block) + ", thread " +
                 std::to_string(thread.index) + ": " + message;
  launch.failed = true;
  Thread& self = launch.running_thread();
  switch_to(self.context, launch.caller);
  __builtin_unreachable();
}

void fail(const std::string& message) { fail_of(launch.running_thread(), message); }

}  // namespace hc

extern "C" {
std::uint32_t hc_thread() { return hc::launch.current; }
std::uint32_t hc_block() { return hc::launch.block; }
std::uint32_t hc_block_dim() { return hc::launch.threads; }
std::uint32_t hc_grid_dim() { return hc::launch.grid; }
}
