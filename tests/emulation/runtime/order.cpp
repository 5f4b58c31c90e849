#include "order.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "state.hpp"

namespace hc::order {
namespace {

using Clock = std::uint32_t;
constexpr Clock kLastClock = (1u << 21) - 1;

// A thread's clock goes on at each of its barriers and fences. After __syncthreads all clocks are alike and
// larger than any before, so what has a smaller clock than the last barrier is over for the whole block.
// Within a warp, known[t][l] is the last clock of lane l whose accesses are over for thread t.
struct Fence {
  Clock clock = 0;          // the thread's accesses up to here are visible to all blocks
  Clock earlier = 0;        // the same of the last fence before the current barrier
  Clock barrier = 0;        // the fence also passes on what this barrier had made known, and what
  Clock known[kWarp] = {};  // __syncwarp had
};

Clock clocks[kMaxThreads];
Clock known[kMaxThreads][kWarp];
Fence fences[kMaxThreads];
Clock newest = 1;        // largest clock
Clock last_barrier = 1;  // clock of all threads after it
std::uint32_t fence_count = 0;
std::uint64_t sync_count = 0;  // barriers and fences: to know that none came between two atomics

std::uint32_t block_serial = 0;
std::uint32_t first_serial = 0;           // serial of the launch's first block
std::vector<std::uint32_t> grid_indices;  // grid indices of the launch's blocks

// Last-block pattern: a thread's fence and then its atomic pass the block's accesses on to a thread that does
// an atomic on the same address later, and with it to the threads that a barrier joins to that one.
struct Release {
  std::uint32_t block = 0;
  Clock all = 0;                                      // accesses of every thread up to here, and
  std::vector<std::pair<std::uint32_t, Clock>> more;  // of some threads up to there
  // Thread and time of the atomic: a thread that learns of it may then also write the counter plainly, as the
  // last block does to reset it.
  std::uint32_t thread = 0;
  Clock clock = 0;

  bool covers(const Record& record) const {
    if (record.clock <= all) return true;
    if (record.atomic && record.thread == thread && record.clock <= clock) return true;
    return std::any_of(more.begin(), more.end(), [&](const auto& one) {
      return one.first == record.thread && record.clock <= one.second;
    });
  }
};
struct Counter {
  std::vector<Release> releases;
  std::unordered_map<std::uint32_t, std::vector<std::uint32_t>> by_block;
};
struct Acquired {
  std::size_t releases;  // how many there were
  std::uint32_t thread;
  Clock clock;
};
std::unordered_map<std::uintptr_t, Counter> counters;
std::unordered_map<const Counter*, std::vector<Acquired>> acquired;
struct {
  std::uintptr_t address = 0;
  std::uint64_t sync = 0;
} last_release[kMaxThreads];

// Is what `thread` of this block did at `clock` over for the running thread?
bool over(std::uint32_t thread, Clock clock) {
  const std::uint32_t self = launch.current;
  if (clock < last_barrier || thread == self) return true;
  return thread / kWarp == self / kWarp && clock <= known[self][thread % kWarp];
}

void advance(std::uint32_t thread) {
  if (++clocks[thread] > kLastClock) fail("too many barriers and fences for one block");
  newest = std::max(newest, clocks[thread]);
  ++sync_count;
}

// Was what `thread` of this block did at `clock` over at the running thread's last fence?
bool fenced(std::uint32_t thread, Clock clock) {
  const std::uint32_t self = launch.current;
  const Fence& fence = fences[self];
  if (clock < fence.barrier || (thread == self && clock <= fence.clock)) return true;
  return thread / kWarp == self / kWarp && clock <= fence.known[thread % kWarp];
}

void add(Counter& counter, Release made) {
  counter.by_block[made.block].push_back(static_cast<std::uint32_t>(counter.releases.size()));
  counter.releases.push_back(std::move(made));
}

void release(std::uintptr_t address) {
  const std::uint32_t self = launch.current;
  auto& last = last_release[self];
  if (last.address == address && last.sync == sync_count) return;
  last = {address, sync_count};
  static Clock passed[kMaxThreads];
  const Fence& own = fences[self];
  for (std::uint32_t i = 0; i < launch.threads; ++i) {
    const Fence& fence = fences[i];
    Clock clock = over(i, fence.clock) ? fence.clock : fence.earlier;
    if (own.barrier > 0) clock = std::max(clock, own.barrier - 1);
    if (i / kWarp == self / kWarp) clock = std::max(clock, own.known[i % kWarp]);
    passed[i] = clock;
  }
  Release made{block_serial, *std::min_element(passed, passed + launch.threads), {}, self, clocks[self]};
  for (std::uint32_t i = 0; i < launch.threads; ++i) {
    if (passed[i] > made.all) made.more.emplace_back(i, passed[i]);
  }
  Counter& counter = counters[address];
  add(counter, std::move(made));
  if (grid_indices.size() == launch.grid) return;  // no later block will learn of it
  // Releases that were learned of over another counter go on over this one.
  for (const auto& [other, times] : acquired) {
    if (other == &counter) continue;
    std::size_t known_releases = 0;
    for (const Acquired& from : times) {
      if (fenced(from.thread, from.clock)) known_releases = std::max(known_releases, from.releases);
    }
    for (std::size_t i = 0; i < known_releases; ++i) add(counter, other->releases[i]);
  }
}

void acquire(std::uintptr_t address) {
  const auto found = counters.find(address);
  if (found == counters.end()) return;
  const std::uint32_t self = launch.current;
  const Acquired made{found->second.releases.size(), self, clocks[self]};
  std::vector<Acquired>& times = acquired[&found->second];
  for (const Acquired& other : times) {
    if (other.releases == made.releases && over(other.thread, other.clock)) return;
  }
  times.push_back(made);
}

bool passed_on(const Record& record) {
  for (const auto& [counter, times] : acquired) {
    const auto found = counter->by_block.find(record.block);
    if (found == counter->by_block.end()) continue;
    for (const Acquired& from : times) {
      if (!over(from.thread, from.clock)) continue;
      for (const std::uint32_t i : found->second) {
        if (i < from.releases && counter->releases[i].covers(record)) return true;
      }
    }
  }
  return false;
}

}  // namespace

void launch_begins() {
  counters.clear();
  grid_indices.clear();
  first_serial = block_serial + 1;
}

void block_begins() {
  ++block_serial;
  grid_indices.push_back(launch.block);
  const std::uint32_t n = launch.threads;
  std::fill(clocks, clocks + n, 1);
  std::memset(known, 0, n * sizeof known[0]);
  if (fence_count) std::fill(fences, fences + kMaxThreads, Fence{});
  for (auto& last : last_release) last = {};
  newest = last_barrier = 1;
  fence_count = 0;
  acquired.clear();
}

void barrier() {
  if (++newest > kLastClock) fail("too many barriers and fences for one block");
  last_barrier = newest;
  std::fill(clocks, clocks + launch.threads, newest);
  ++sync_count;
}

void warp_barrier(std::uint32_t warp, std::uint32_t mask) {
  Clock joined[kWarp] = {};
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const std::uint32_t thread = warp * kWarp + lane;
    for (std::uint32_t i = 0; i < kWarp; ++i) joined[i] = std::max(joined[i], known[thread][i]);
    joined[lane] = std::max(joined[lane], clocks[thread]);
  }
  for (std::uint32_t lane = 0; lane < kWarp; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const std::uint32_t thread = warp * kWarp + lane;
    std::copy(joined, joined + kWarp, known[thread]);
    advance(thread);
  }
}

void fence() {
  const std::uint32_t self = launch.current;
  Fence& fence = fences[self];
  if (fence.clock && fence.clock < last_barrier) fence.earlier = fence.clock;
  fence.clock = clocks[self];
  fence.barrier = last_barrier;
  std::copy(known[self], known[self] + kWarp, fence.known);
  ++fence_count;
  advance(self);
}

void atomic(std::uintptr_t address) {
  acquire(address);
  if (fence_count) release(address);
}

Record now() {
  Record record;
  record.block = block_serial;
  record.thread = launch.current;
  record.clock = clocks[launch.current];
  return record;
}

bool current(const Record& record) { return record.clock != 0 && record.block >= first_serial; }
bool in_block(const Record& record) { return record.clock != 0 && record.block == block_serial; }

bool before_by_barriers(const Record& record) {
  return !current(record) || (record.block == block_serial && over(record.thread, record.clock));
}

bool before(const Record& record) { return before_by_barriers(record) || passed_on(record); }

std::uint32_t block_of(const Record& record) { return grid_indices[record.block - first_serial]; }

}  // namespace hc::order
