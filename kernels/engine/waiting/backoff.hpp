// Pauses between two looks at requests that MPI has not done yet.
#pragma once

#include <sched.h>

#include <algorithm>

#include "engine/waiting/arrivals.hpp"
#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {

// Seconds for which a waiting thread gives way, and then the length of its sleeps: a `share` of the time that
// nothing has happened, from `least` to `most` seconds.
struct Pace {
  double yielding, least, most, share;

  double pause(double quiet) const { return std::max(0.0, std::min(std::max(least, quiet * share), most)); }
};

// Wait of one thread: it gives way at first, since a short operation may end any moment, for a time by the
// clock, so that it looks rarely where other threads want the core. Then it sleeps.
class Backoff {
 public:
  // `quiet`: seconds for which nothing has happened already; `also`: as in Nap.
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

  // Note that a look has found what was waited for.
  void found() { nap_.looked(true); }

 private:
  double began_ = now();
  Pace pace_;
  double quiet_;
  Nap nap_;
};

}  // namespace hybridcomp::engine
