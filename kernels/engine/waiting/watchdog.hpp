// End the process where a call of MPI does not come back.
//
// MPICH (5.0.2) connects without end, in any call that sends, to a rank that does not answer or has gone.
// The process's other work then waits for the caller, which cannot report the fault.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

namespace hybridcomp::engine {

// An operation with a time limit, watched until this is destroyed.
class Watched {
 public:
  explicit Watched(double until);  // time limit, by now(); 0 for none
  virtual ~Watched();
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  // Return the operation's name for error messages; any thread may call this, without Python's lock.
  virtual std::string name() const = 0;

 protected:
  std::atomic<double> until_;
  std::atomic<bool> inside_mpi_ = false;

 private:
  friend class Watchdog;
  double seen_until_ = 0;
  int late_ = 0, inside_ = 0;  // looks in a row that have seen it late, or inside MPI
};

// An operation that a thread posts and waits for until this is destroyed. `name` must live as long.
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

// Thread that looks at all watched operations, and never calls MPI.
//
// Looks are counted, not seconds: a process that was stopped, or had no processor, gets the time that it
// missed.
class Watchdog {
 public:
  static Watchdog& instance();

  // Look from now on, if a thread can be started. The process ends once an operation is past its limit, and a
  // thread inside MPI, for `looks` looks that are `between` seconds apart. `who` names the process in the
  // message.
  void start(const std::string& who, double between, int looks);

  void add(Watched* one);
  void remove(Watched* one);

 private:
  Watchdog();
  void run();
  [[noreturn]] void end(const Watched& one) const;

  std::mutex mutex_;  // guards the watched operations
  std::unordered_set<Watched*> watched_;
  std::string who_;
  double between_ = 0;
  int looks_ = 0;
  bool started_ = false;
};

}  // namespace hybridcomp::engine
