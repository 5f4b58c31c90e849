// The order of a launch's accesses: clocks of threads, barriers, fences and counters.
#pragma once

#include <cstdint>

#include "shadow.hpp"

namespace hc::order {

void launch_begins();
void block_begins();
void barrier();
void warp_barrier(std::uint32_t warp, std::uint32_t mask);
void fence();
// An atomic on global memory. It passes on what fences made known, and learns what others passed on.
void atomic(std::uintptr_t address);

// The record of an access that the running thread makes now.
Record now();
// Is the access over before the running thread goes on? Those of earlier launches are.
bool before(const Record& record);
// The same without the orders that fences and counters pass on, which take long to find out.
bool before_by_barriers(const Record& record);
// Was it made in this launch?
bool current(const Record& record);
bool in_block(const Record& record);
std::uint32_t block_of(const Record& record);  // its block's number in the grid

}  // namespace hc::order
