#include "engine/arrivals.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>

namespace hybridcomp::engine {
namespace {

constexpr double kPatience = 4;       // times as long does one sleep who is woken
constexpr int kDoubts = 16;           // short sleeps after one that nothing has ended in time
constexpr std::size_t kMostKept = 8;  // descriptors: MPI has one or two

timespec time_of(double seconds) {
  timespec time{};
  time.tv_sec = static_cast<time_t>(seconds);
  time.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
  return time;
}

// Sleeps end 50 us late unless a thread asks for better.
void sleep_precisely() {
  thread_local bool asked = false;
  if (!asked) prctl(PR_SET_TIMERSLACK, 1000);
  asked = true;
}

std::vector<int> event_queues() {
  std::vector<int> found;
  DIR* const folder = opendir("/proc/self/fd");
  if (!folder) return found;
  while (const dirent* const entry = readdir(folder)) {
    std::array<char, 64> target{};
    const ssize_t length = readlinkat(dirfd(folder), entry->d_name, target.data(), target.size() - 1);
    if (length > 0 && !std::strcmp(target.data(), "anon_inode:[eventpoll]"))
      found.push_back(std::atoi(entry->d_name));
  }
  closedir(folder);
  return found;
}

}  // namespace

void sleep_for(double seconds) {
  sleep_precisely();
  const timespec time = time_of(seconds);
  nanosleep(&time, nullptr);
}

Arrivals& Arrivals::of_process() {
  static Arrivals& arrivals = *new Arrivals(event_queues());  // threads may outlast main
  return arrivals;
}

// Copies, so that a number that is closed and used again is never taken for what it was.
Arrivals::Arrivals(const std::vector<int>& descriptors) {
  for (const int descriptor : descriptors) {
    if (copies_.size() == kMostKept) break;
    const int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy >= 0) copies_.push_back({copy, POLLIN, 0});
  }
}

void Nap::sleep(double pause, double longest) {
  last_ = Last::kNone;
  if (in_vain_ || arrivals_.copies_.empty()) {
    // The rest of a message comes soon: a look for every packet would cost more than it brings.
    in_vain_ = false;
    sleep_for(pause);
    return;
  }
  int doubts = arrivals_.doubts_.load(std::memory_order_relaxed);
  if (doubts > 0)
    arrivals_.doubts_.compare_exchange_weak(doubts, doubts - 1, std::memory_order_relaxed);
  else
    pause = std::max(pause, std::min(kPatience * pause, longest));
  sleep_precisely();
  std::array<pollfd, kMostKept> polled;
  const std::size_t count = arrivals_.copies_.size();
  std::copy_n(arrivals_.copies_.begin(), count, polled.begin());
  const timespec time = time_of(pause);
  last_ = ppoll(polled.data(), count, &time, nullptr) > 0 ? Last::kWoken : Last::kSlept;
}

void Nap::looked(bool found) {
  if (last_ == Last::kWoken) in_vain_ = !found;
  // It may have been there for long.
  if (last_ == Last::kSlept && found) arrivals_.doubts_.store(kDoubts, std::memory_order_relaxed);
  last_ = Last::kNone;
}

}  // namespace hybridcomp::engine
