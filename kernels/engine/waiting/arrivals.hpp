// Sleeping until data have come over the sockets of MPI.
//
// MPI has no call that sleeps until a message is there. But the libraries that carry its messages (libfabric,
// UCX, Open MPI's own) watch their sockets by epoll, and a thread can sleep on a descriptor of epoll like on
// any other: it wakes as bytes come, and need not look at MPI every few microseconds. These descriptors are
// only a hint: messages may come by shared memory, and another thread may have read the data that a
// descriptor told of. So every sleep is bounded, and where sleeps end too late, they become short ones again.
#pragma once

#include <poll.h>

#include <atomic>
#include <vector>

namespace hybridcomp::engine {

// Descriptors of this process's event queues.
class Arrivals {
 public:
  // Return the descriptors found at the first call: MPI makes its own in MPI_Init.
  static Arrivals& of_process();

  // Take descriptors, and keep copies of them; for tests.
  explicit Arrivals(const std::vector<int>& descriptors);

 private:
  friend class Nap;

  // Note that a message was there that no descriptor has told of.
  void late();

  std::vector<pollfd> copies_;
  std::atomic<int> doubts_ = 0;       // coming sleeps that are to be short
  std::atomic<int> next_doubts_ = 0;  // their number after the next sleep that ends too late
};

// Sleeps of one waiting thread, between its looks at MPI.
class Nap {
 public:
  // `also`: a descriptor that ends its sleeps, too, when it is readable; -1 for none.
  explicit Nap(int also = -1, Arrivals& arrivals = Arrivals::of_process())
      : arrivals_(arrivals), also_(also) {}

  // Sleep for `pause` seconds, the length for a thread that no arrival wakes; where arrivals wake this
  // thread, for several times as long, but `longest` at most.
  void sleep(double pause, double longest);

  // Tell whether a look after the sleep has found something.
  void looked(bool found);

 private:
  enum class Last { kNone, kSlept, kWoken };

  Arrivals& arrivals_;
  int also_;
  Last last_ = Last::kNone;
  bool in_vain_ = false;  // the last waking was in vain: only a part of a message had come
};

}  // namespace hybridcomp::engine
