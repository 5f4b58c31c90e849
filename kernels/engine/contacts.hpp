// First messages to ranks, which MPI may never return from.
//
// Over TCP, MPICH 5 tries without end to connect to a rank that is gone, in MPI_Isend, and looks for no error
// meanwhile. So the first message to each rank is posted by a thread of its own, which is left behind where
// it does not come back; nothing else waits for it.
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
  // A message to send, and afterwards MPI's request of it.
  struct Job {
    Requests::Owner owner;
    const void* data;
    int bytes, peer, tag;
    std::uint64_t comm;
    std::int32_t* open;  // of that rank: how many jobs the engine has not taken back
    std::uint64_t request = 0;
    int code = 0;
  };

  explicit Contacts(const Mpi& mpi) : shared_(std::make_shared<Shared>(mpi)) {}

  void post(const Job& job);

  // The jobs whose messages have been posted since the last look.
  std::vector<Job> take();

  bool idle() const { return !waiting_; }

  // Let nobody hear of jobs of an execution again.
  void forget(const void* execution);

 private:
  struct Shared {
    explicit Shared(const Mpi& m) : mpi(m) {}
    const Mpi mpi;  // a thread that is left behind has its own
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<Job> jobs, posted;
    std::vector<std::pair<std::uint64_t, int>> busy;  // communicator and rank of those being posted
    int threads = 0, free = 0;

    std::deque<Job>::iterator next();  // the first job whose rank is not busy: messages keep their order
    // Refuse the messages of an operation behind one that MPI refused, those that wait and those that come
    // before the engine knows: the rank would take them for that one.
    void refuse_behind(const Job& refused);
    bool refuse(const Job& job);  // whether it is behind one
  };
  static void run(const std::shared_ptr<Shared>& shared);
  void start_threads();

  std::shared_ptr<Shared> shared_;
  std::size_t waiting_ = 0;
  std::vector<const void*> forgotten_;
};

}  // namespace hybridcomp::engine
