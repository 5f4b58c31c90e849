#include "engine/waiting/clock.hpp"

#include <sys/prctl.h>

#include <algorithm>

namespace hybridcomp::engine {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

timespec time_of(double seconds) {
  const double some = std::max(0.0, seconds);
  timespec time{};
  time.tv_sec = static_cast<time_t>(some);
  time.tv_nsec = static_cast<long>((some - static_cast<double>(time.tv_sec)) * 1e9);
  return time;
}

void sleep_precisely() {
  thread_local bool asked = false;
  if (!asked) prctl(PR_SET_TIMERSLACK, 1000);
  asked = true;
}

void sleep_for(double seconds) {
  sleep_precisely();
  const timespec time = time_of(seconds);
  nanosleep(&time, nullptr);
}

}  // namespace hybridcomp::engine
