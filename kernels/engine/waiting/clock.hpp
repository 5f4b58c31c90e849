// Clock of all waiting, and sleeps that are exact to a microsecond.
#pragma once

#include <time.h>

namespace hybridcomp::engine {

double now();  // seconds of CLOCK_MONOTONIC

// Return so many seconds, at least zero, as the kernel's calls take them.
timespec time_of(double seconds);

// Have this thread's sleeps end in time: they end 50 us late unless a thread asks for better.
void sleep_precisely();

// Sleep for so many seconds; a signal ends it.
void sleep_for(double seconds);

}  // namespace hybridcomp::engine
