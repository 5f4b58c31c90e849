#include "engine/waiting/watchdog.hpp"

#include <pthread.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <system_error>
#include <thread>

#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {
namespace {

class Thread : public Watched {
 public:
  Thread() : Watched(0) {}
  std::string name() const override { return *name_; }

  void begin(const std::string& name, double until) {
    name_ = &name;
    until_.store(until, std::memory_order_release);
  }
  void end() { until_.store(0, std::memory_order_relaxed); }

  void enter() {
    if (!depth_++) inside_mpi_.store(true, std::memory_order_relaxed);
  }
  void leave() {
    if (!--depth_) inside_mpi_.store(false, std::memory_order_relaxed);
  }

 private:
  const std::string* name_ = nullptr;
  int depth_ = 0;
};

thread_local Thread own;

}  // namespace

Watched::Watched(double until) : until_(until) { Watchdog::instance().add(this); }
Watched::~Watched() { Watchdog::instance().remove(this); }

WatchedThread::WatchedThread(const std::string& name, double until) { own.begin(name, until); }
WatchedThread::~WatchedThread() { own.end(); }

void InsideMpi::enter() { own.enter(); }
void InsideMpi::leave() { own.leave(); }

// Return the one watchdog. It is never destroyed: threads end after it.
Watchdog& Watchdog::instance() {
  static Watchdog* const one = new Watchdog;
  return *one;
}

// A forked child has no such thread, but has its parent's watched objects, which it destroys: so it must be
// able to take the lock.
Watchdog::Watchdog() {
  pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                 [] { instance().mutex_.unlock(); });
}

void Watchdog::add(Watched* one) {
  const std::lock_guard lock(mutex_);
  watched_.insert(one);
}

void Watchdog::remove(Watched* one) {
  const std::lock_guard lock(mutex_);
  watched_.erase(one);
}

void Watchdog::start(const std::string& who, double between, int looks) {
  const std::lock_guard lock(mutex_);
  if (started_) return;
  who_ = who;
  between_ = between;
  looks_ = looks;
  try {
    std::thread([this] { run(); }).detach();
    started_ = true;
  } catch (const std::system_error&) {  // no more threads
  }
}

void Watchdog::run() {
  while (true) {
    sleep_for(between_);
    const std::lock_guard lock(mutex_);
    const Watched* latest = nullptr;
    bool inside = false;
    for (Watched* one : watched_) {
      const double until = one->until_.load(std::memory_order_acquire);
      one->late_ = until > 0 && until == one->seen_until_ && now() > until ? one->late_ + 1 : 0;
      // The looks need not see the same call: MPI may give up connecting after seconds, and the next send
      // begins again.
      one->inside_ = one->inside_mpi_.load(std::memory_order_relaxed) ? one->inside_ + 1 : 0;
      one->seen_until_ = until;
      if (one->late_ >= looks_ && (!latest || one->seen_until_ < latest->seen_until_)) latest = one;
      inside = inside || one->inside_ >= looks_;
    }
    if (latest && inside) end(*latest);
  }
}

void Watchdog::end(const Watched& one) const {
  const std::string text =
      "hybridcomp: " + who_ + ": " + one.name() + " is " +
      std::to_string(std::lround(now() - one.seen_until_)) +
      " s past its timeout, and MPI does not come back from a call that takes microseconds, as "
      "MPICH does not while it connects to a host that is gone; this rank ends here\n";
  const char* at = text.data();
  for (ssize_t left = static_cast<ssize_t>(text.size()), n = 0; left > 0; left -= n, at += n)
    if ((n = write(STDERR_FILENO, at, static_cast<std::size_t>(left))) <= 0) break;
  // The process ends by a signal: mpiexec (MPICH 5.0.2) may learn that a process has exited before it sees
  // its socket closed, and then leaves the other ranks alone, unless a signal has ended it.
  kill(getpid(), SIGKILL);
  while (true) pause();
}

}  // namespace hybridcomp::engine
