// End the process where a call of MPI does not come back.
//
// MPICH (5.0.2) connects without end, in any call that sends, to a rank that does not answer or has gone.
// What else this process does waits for the caller then, which cannot report it.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace hybridcomp::engine {

// What has a time limit, and is watched until this is destroyed.
class Watched {
 public:
  explicit Watched(double until);  // by now(); 0 is none
  virtual ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  // For error messages; may be called in any thread, without Python's lock.
  virtual std::string name() const = 0;

 protected:
  std::atomic<double> until_;
  std::atomic<bool> inside_mpi_ = false;

 private:
  friend class Watchdog;
  double seen_until_ = 0;
  int late_ = 0, inside_ = 0;  // looks, one after the other, that have seen it so
};

// An operation that a thread posts, and waits for, until this is destroyed. `name` lives as long.
class WatchedThread {
 public:
  WatchedThread(const std::string& name, double until);
  ~WatchedThread();
  WatchedThread(const WatchedThread&) = delete;
  WatchedThread& operator=(const WatchedThread&) = delete;
};

// A call of MPI that this thread makes until this is destroyed: one that should come back at once.
class InsideMpi {
 public:
  InsideMpi() { enter(); }
  ~InsideMpi() { leave(); }
  InsideMpi(const InsideMpi&) = delete;
  InsideMpi& operator=(const InsideMpi&) = delete;

  static void enter();
  static void leave();
};

// The thread that looks at all that is watched, and calls nothing of MPI's.
//
// Looks are counted, not seconds: a process that was stopped, or had no processor, gets the time that it
// missed.
class Watchdog {
 public:
  static Watchdog& instance();

  // Look from now on, if there is a thread for it. Where something is past its limit, and a thread inside
  // MPI, for `looks` that are so many seconds apart, the process ends. `who` it is, for the message.
  void start(const std::string& who, double between, int looks);

  void add(Watched* one);
  void remove(Watched* one);

 private:
  Watchdog();
  void run();
  [[noreturn]] void end(const Watched& one) const;

  std::mutex mutex_;  // of what is watched
  std::unordered_set<Watched*> watched_;
  std::string who_;
  double between_ = 0;
  int looks_ = 0;
  bool started_ = false;
};

}  // namespace hybridcomp::engine
