// First messages to ranks, whose sends MPI may never return from.
//
// Over TCP, MPICH 5 tries without end to connect to a rank that is gone, in MPI_Isend, and looks for no error
// meanwhile. So the first message to each rank is posted by a thread of its own, which is left behind where
// it does not come back; no other code waits for it.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/mpi.hpp"

namespace hybridcomp::engine {

class Contacts {
 public:
  // A message to send, and MPI's request once it is posted.
  struct Job {
    Requests::Owner owner;
    const void* data;
    int bytes, peer, tag;
    std::uint64_t comm;
    std::int32_t* open;  // how many of the rank's jobs the engine has not taken back
    std::uint64_t request = 0;
    int code = 0;
  };

  explicit Contacts(const Mpi& mpi) : shared_(std::make_shared<Shared>(mpi)) {}

  void post(const Job& job);

  // Return the jobs whose messages have been posted since the last look.
  std::vector<Job> take();

  bool idle() const { return !waiting_; }

  // Report no jobs of an execution from now on.
  void forget(const void* execution);

 private:
  struct Shared {
    explicit Shared(const Mpi& m) : mpi(m) {}
    const Mpi mpi;  // a copy, which a thread that is left behind may use
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<Job> jobs, posted;
    std::vector<std::pair<std::uint64_t, int>> busy;  // communicator and rank of jobs being posted
    int threads = 0, free = 0;

    std::deque<Job>::iterator next();  // the first job whose rank is not busy: messages keep their order
    // Refuse an operation's messages to a rank behind one that MPI refused, those that wait and those that
    // come before the engine knows: the rank would take them for the refused one.
    void refuse_behind(const Job& refused);
    bool refuse(const Job& job);  // refuse a job behind such a one; returns whether it is
  };
  static void run(const std::shared_ptr<Shared>& shared);
  void start_threads();

  std::shared_ptr<Shared> shared_;
  std::size_t waiting_ = 0;
  std::vector<const void*> forgotten_;
};

}  // namespace hybridcomp::engine
