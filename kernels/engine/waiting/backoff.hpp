// How long to leave MPI alone between two looks at what it has not done yet.
#pragma once

#include <sched.h>

#include <algorithm>

#include "engine/waiting/arrivals.hpp"
#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {

// In seconds: how long to give way, and how long to sleep then: a share of the time that nothing has
// happened.
struct Pace {
  double yielding, least, most, share;

  double pause(double quiet) const { return std::max(0.0, std::min(std::max(least, quiet * share), most)); }
};

// Gives way at first, as what is short may be here any moment; by the clock, so that few looks are made
// where the core is wanted by others. Then sleeps.
class Backoff {
 public:
  // `quiet`: seconds for which nothing has happened already; `also`: as of Nap.
  explicit Backoff(const Pace& pace, double quiet = 0, int also = -1)
      : pace_(pace), quiet_(quiet), nap_(also) {}

  // Seconds since this was made.
  double seconds() const { return now() - began_; }

  // Wait until it is time for the next look; not beyond `left` seconds.
  void wait(double left) {
    const double quiet = quiet_ + seconds();
    nap_.looked(false);
    if (quiet < pace_.yielding)
      sched_yield();
    else
      nap_.sleep(std::min(pace_.pause(quiet), left), left);
  }

  // A look has found what was waited for.
  void found() { nap_.looked(true); }

 private:
  double began_ = now();
  Pace pace_;
  double quiet_;
  Nap nap_;
};

}  // namespace hybridcomp::engine
