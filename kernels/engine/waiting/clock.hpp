// The clock that waiting goes by, and sleeps to a microsecond.
#pragma once

#include <time.h>

namespace hybridcomp::engine {

double now();  // seconds of CLOCK_MONOTONIC

// What the calls of the kernel take for so many seconds; no less than none.
timespec time_of(double seconds);

// Have this thread's sleeps end in time: they end 50 us late unless a thread asks for better.
void sleep_precisely();

// Sleep for so many seconds; a signal ends it.
void sleep_for(double seconds);

}  // namespace hybridcomp::engine
