// The functions that emulator.py calls.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <utility>

#include "checks.hpp"
#include "memory.hpp"
#include "state.hpp"

namespace hc {
namespace {

std::string refusal() {
  if (launch.grid == 0 || launch.threads == 0) return "an empty grid or block";
  if (launch.threads % kWarp != 0 || launch.threads > kMaxThreads) {
    return "a block of " + std::to_string(launch.threads) + " threads: not whole warps, or over 1024";
  }
  if (launch.dynamic_bytes > 227 * 1024) return "over 227 KiB of dynamic shared memory";
  if (launch.argument_count > kMaxArguments) return "over 20 arguments";
  return "";
}

// The i-th of the launch's blocks: any order that visits each once.
std::uint32_t block_at(std::uint64_t i, std::uint64_t step, std::uint64_t offset) {
  const std::uint64_t n = launch.grid;
  if (launch.seed == 0) return static_cast<std::uint32_t>(i);
  if (launch.seed == 1) return static_cast<std::uint32_t>(n - 1 - i);
  return static_cast<std::uint32_t>((i * step + offset) % n);
}

std::uint64_t coprime(std::uint64_t n) {
  for (;;) {
    const std::uint64_t step = random_number() % n + 1;
    std::uint64_t a = step, b = n;
    while (b) std::swap(a %= b, b);
    if (a == 1) return step;
  }
}

void run_blocks() {
  const std::uint64_t step = coprime(launch.grid), offset = random_number() % launch.grid;
  for (std::uint64_t i = 0; i < launch.grid && !launch.failed; ++i) {
    launch.block = block_at(i, step, offset);
    run_block();
  }
}

#if defined(HC_CHECKED)
void say_what_ran() {
  if (!launch.running) return;
  std::fprintf(stderr,
               "emulation: %s: block %u, thread %u, of a launch of %u blocks of %u threads, seed %llu\n",
               launch.name, launch.block, launch.current, launch.grid, launch.threads,
               static_cast<unsigned long long>(launch.seed));
}

// Each sanitizer's library has a callback of its own for the moment before it ends the process.
int tell_sanitizer(dl_phdr_info* info, std::size_t, void*) {
  const std::string library = info->dlpi_name;
  if (library.find("asan") == std::string::npos && library.find("ubsan") == std::string::npos) return 0;
  void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  void* set = handle ? dlsym(handle, "__sanitizer_set_death_callback") : nullptr;
  if (set) reinterpret_cast<void (*)(void (*)())>(set)(say_what_ran);
  return 0;
}
#endif

}  // namespace
}  // namespace hc

using namespace hc;

extern "C" {

// Run a kernel; return null, or an error that is valid until the next call. One launch at a time.
const char* hc_launch(void (*kernel)(), std::uint32_t grid, std::uint32_t block, std::uint32_t shared_bytes,
                      const std::uint64_t* arguments, std::uint32_t argument_count, std::uint64_t seed,
                      const char* name) {
  std::uint64_t all[kMaxArguments] = {};
  for (std::uint32_t i = 0; i < argument_count && i < kMaxArguments; ++i) all[i] = arguments[i];
  launch.kernel = kernel;
  launch.name = name;
  launch.arguments = all;
  launch.argument_count = argument_count;
  launch.grid = grid;
  launch.threads = block;
  launch.dynamic_bytes = shared_bytes;
  launch.seed = launch.random = seed;
  launch.failed = false;
  launch.error = refusal();
  if (!launch.error.empty()) {
    launch.error = std::string(name) + ": " + launch.error;
    return launch.error.c_str();
  }
  adopt_caller(launch.caller);
  memory::launch_begins();
  checks::launch_begins();
#if defined(HC_CHECKED)
  [[maybe_unused]] static const int told = dl_iterate_phdr(tell_sanitizer, nullptr);
#endif
  launch.running = true;
  run_blocks();
  launch.running = false;
  checks::launch_ends();
  if (!launch.failed) return nullptr;
  // Threads were left where they stood: they must begin anew.
  for (Thread& thread : launch.all) thread.prepared = false;
  return launch.error.c_str();
}

// Set whether kernels of the race flavour are watched.
void hc_checks(int on) { checks::wanted = on != 0; }

// Set after how many waits, atomics and watched accesses a block is taken for one that never ends.
void hc_limit(std::uint64_t steps) { launch.step_limit = steps; }

void hc_fence() { checks::fence(); }

void hc_atomic(const volatile void* address, std::uint32_t bytes) {
  count_step();
  if (!checks::active) return;
  void* caller = __builtin_return_address(0);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  if (at & (bytes - 1)) checks::misaligned(address, bytes, caller);
  checks::access(at, bytes, checks::Access::kAtomic, caller);
}
}
