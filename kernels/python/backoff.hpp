// How long to leave MPI alone between two polls of what it has not done yet.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace hybridcomp {

// Gives way at first, as what is short may be here any moment; by the clock, so that few polls are made
// where the core is wanted by others. Then sleeps for a share of the time that nothing has happened.
class Backoff {
 public:
  // Seconds: that nothing has happened already; that it gives way for; that it sleeps at least, and at most.
  Backoff(double quiet, double brief, double least, double most, double share)
      : quiet_(quiet), brief_(brief), least_(least), most_(most), share_(share) {}

  // Seconds since this was made.
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

  // Wait until it is time for the next poll; not beyond `left` seconds.
  void wait(double left) const {
    const double quiet = quiet_ + seconds();
    if (quiet < brief_) {
      sched_yield();
      return;
    }
    const double pause = std::max(0.0, std::min({std::max(least_, quiet * share_), most_, left}));
    timespec time{};
    time.tv_sec = static_cast<time_t>(pause);
    time.tv_nsec = static_cast<long>((pause - std::floor(pause)) * 1e9);
    nanosleep(&time, nullptr);  // a signal ends it: the next poll is earlier
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  double quiet_, brief_, least_, most_, share_;
};

}  // namespace hybridcomp
