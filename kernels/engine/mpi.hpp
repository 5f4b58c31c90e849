// Functions of MPI that the engine calls. The module is not linked with MPI, of which every process has its
// own: Python passes the functions' addresses (hybridcomp/pmi/library.py).
//
// All their arguments are integers or pointers, in an order that the standard sets. A handle is an int in one
// MPI and a pointer in another; the calling conventions of x86-64 and AArch64 pass either in a slot of eight
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hybridcomp::engine {

struct Mpi {
  int (*isend)(const void* data, int count, std::uint64_t type, int peer, int tag, std::uint64_t comm,
               void* request);
  int (*irecv)(void* data, int count, std::uint64_t type, int peer, int tag, std::uint64_t comm,
               void* request);
  int (*testsome)(int count, void* requests, int* done, int* indices, void* statuses);
  int (*get_count)(const void* status, std::uint64_t type, int* count);
  int (*cancel)(void* request);
  int (*test_cancelled)(const void* status, int* cancelled);
  int (*set_elements)(void* status, std::uint64_t type, int count);
  std::uint64_t byte;         // the datatype
  std::size_t request_bytes;  // bytes of a request in an array
  std::size_t status_bytes;   // bytes of a status in an array
  std::size_t error_at;       // offset of a status's error, an int
};

// Requests in an array as MPI takes it, each with its owner.
class Requests {
 public:
  // Owner of a request, reported to the engine when the request is done.
  struct Owner {
    void* execution;
    std::uint32_t step;
    bool receives = false;
  };
  // A request that is done.
  struct Done {
    Owner owner;
    int code;                    // 0, or an error of MPI's
    int bytes;                   // bytes that a receive got
    const std::uint8_t* status;  // valid until the next look
  };

  explicit Requests(const Mpi& mpi) : mpi_(mpi) {}

  bool empty() const { return owners_.empty(); }
  std::size_t size() const { return owners_.size(); }

  // Return room for another request, which is in the array once MPI has filled it and `keep` is called.
  void* room() {
    const std::size_t at = owners_.size() * mpi_.request_bytes;
    if (handles_.size() < at + sizeof(std::uint64_t)) handles_.resize(2 * at + 64 * sizeof(std::uint64_t));
    return handles_.data() + at;
  }
  void keep(Owner owner) { owners_.push_back(owner); }

  // Look once at all of them, and add those that are done to `out`. MPI makes progress meanwhile.
  void test(std::vector<Done>* out);

  // Ask MPI to cancel the receives of one owner. Each is done at a later look, or takes its message.
  void cancel(const void* execution);

  // Forget the requests of one owner; MPI may still use their memory. Receives are cancelled. Sends are not:
  // MPICH 5 crashes where it cancels some over UCX, and the standard deprecates it.
  void abandon(const void* execution);

 private:
  void drop(std::size_t i);

  const Mpi& mpi_;
  std::vector<std::uint8_t> handles_;
  std::vector<Owner> owners_;
  std::vector<int> indices_;
  std::vector<std::uint8_t> statuses_;
};

}  // namespace hybridcomp::engine
