#include "engine/waiting/arrivals.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {
namespace {

constexpr double kPatience = 4;       // a sleep that arrivals end may be so many times as long
constexpr int kDoubts = 16;           // short sleeps after one that ended too late
constexpr int kMostDoubts = 4096;     // after many late ones: messages come by other ways
constexpr std::size_t kMostKept = 8;  // descriptors kept at most: MPI has one or two

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

Arrivals& Arrivals::of_process() {
  static Arrivals& arrivals = *new Arrivals(event_queues());  // threads may outlast main
  return arrivals;
}

// Copies are kept, so that a number that is closed and used again is never taken for the old descriptor.
Arrivals::Arrivals(const std::vector<int>& descriptors) : next_doubts_(kDoubts) {
  for (const int descriptor : descriptors) {
    if (copies_.size() == kMostKept) break;
    const int copy = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (copy >= 0) copies_.push_back({copy, POLLIN, 0});
  }
}

void Arrivals::late() {
  const int doubts = next_doubts_.load(std::memory_order_relaxed);
  doubts_.store(doubts, std::memory_order_relaxed);
  next_doubts_.store(std::min(2 * doubts, kMostDoubts), std::memory_order_relaxed);
}

void Nap::sleep(double pause, double longest) {
  std::array<pollfd, kMostKept + 1> polled;
  std::size_t count = 0;
  if (also_ >= 0) polled[count++] = {also_, POLLIN, 0};
  // After a waking in vain the rest of a message comes soon: a look for every packet would cost more than it
  // gains.
  const bool watches = !in_vain_ && !arrivals_.copies_.empty();
  in_vain_ = false;
  if (watches) {
    for (const pollfd& copy : arrivals_.copies_) polled[count++] = copy;
    int doubts = arrivals_.doubts_.load(std::memory_order_relaxed);
    if (doubts > 0)
      arrivals_.doubts_.compare_exchange_weak(doubts, doubts - 1, std::memory_order_relaxed);
    else
      pause = std::max(pause, std::min(kPatience * pause, longest));
  }
  sleep_precisely();
  const timespec time = time_of(pause);
  const int ready = ppoll(polled.data(), count, &time, nullptr);
  last_ = !watches ? Last::kNone : ready > 0 ? Last::kWoken : Last::kSlept;
}

void Nap::looked(bool found) {
  if (last_ == Last::kWoken) in_vain_ = !found;
  // The message may have been there for long.
  if (last_ == Last::kSlept && found) arrivals_.late();
  if (last_ == Last::kWoken && found) arrivals_.next_doubts_.store(kDoubts, std::memory_order_relaxed);
  last_ = Last::kNone;
}

}  // namespace hybridcomp::engine
