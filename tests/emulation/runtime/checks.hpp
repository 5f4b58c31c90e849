// Checks of the race flavour at each event of a launch. In the other flavour nothing calls access(), and the
// rest is idle: AddressSanitizer watches memory there.
#pragma once

#include <cstdint>

#include "state.hpp"

namespace hc::checks {

enum class Access : std::uint8_t { kRead, kWrite, kAtomic };

extern bool wanted;  // set by hc_checks
extern bool active;  // a kernel runs, and is watched

void launch_begins();
void launch_ends();
void block_begins();
void block_ends();
void running(const Thread& thread);
void barrier();
void warp_barrier(std::uint32_t warp, std::uint32_t mask);
void fence();
// `caller`: the return address of the hook, so an address in the kernel.
void access(std::uintptr_t address, std::uint64_t bytes, Access kind, void* caller);
[[noreturn]] void misaligned(const volatile void* address, std::uint64_t bytes, void* caller);

}  // namespace hc::checks
