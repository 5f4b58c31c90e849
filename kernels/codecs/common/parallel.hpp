// Splitting a loop over threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>

namespace hybridcomp {

constexpr int kMaxThreads = 64;

// Number of threads that an operation may use, 1 unless set: ranks share a machine.
int thread_count();
void set_thread_count(int threads);

// Return how many ranges `split` makes of n elements in whole steps: no thread for less than 64 Ki elements.
inline int ranges_of(std::size_t n, std::size_t step, int threads) {
  constexpr std::size_t kLeast = std::size_t(1) << 16;
  const std::size_t steps = n / step + (n % step != 0);
  const std::size_t useful = std::max<std::size_t>(1, std::min(n / kLeast, steps));
  return static_cast<int>(
      std::min<std::size_t>(useful, static_cast<std::size_t>(std::clamp(threads, 1, kMaxThreads))));
}

// Call f(range, begin, end) for `ranges` consecutive ranges of 0 .. n, each a multiple of `step` long but the
// last, on as many threads. The caller's thread takes the first, and those for which no thread can be
// started.
template <typename F>
void split(std::size_t n, std::size_t step, int ranges, F f) {
  const std::size_t steps = n / step + (n % step != 0);
  const auto begin_of = [&](int r) {
    return std::min(n, steps * static_cast<std::size_t>(r) / static_cast<std::size_t>(ranges) * step);
  };
  std::thread others[kMaxThreads];
  int started = 1;
  try {
    for (; started < ranges; ++started)
      others[started] =
          std::thread([&f, r = started, b = begin_of(started), e = begin_of(started + 1)] { f(r, b, e); });
  } catch (const std::system_error&) {  // the user's limit of processes, say
  }
  f(0, std::size_t(0), begin_of(1));
  for (int r = started; r < ranges; ++r) f(r, begin_of(r), begin_of(r + 1));
  for (int r = 1; r < started; ++r) others[r].join();
}

}  // namespace hybridcomp
