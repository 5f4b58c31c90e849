// All operations in flight in this process. The callers that wait for one make progress, and one thread while
// no caller waits.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/contacts.hpp"
#include "engine/execution.hpp"
#include "engine/mpi.hpp"
#include "engine/waiting/arrivals.hpp"
#include "engine/waiting/clock.hpp"

namespace hybridcomp::engine {

class CarriedOperations;
class SharedBlocks;

class Engine {
 public:
  explicit Engine(const Mpi& mpi);
  // An engine without MPI, for operations whose messages others carry, made in blocks of theirs.
  Engine(CarriedOperations& carried, std::shared_ptr<SharedBlocks> blocks);
  ~Engine();

  // None of these is called with the interpreter's lock held: MPI may call Python while it is in the engine.

  // Begin an operation, and compute for so many seconds of it at most.
  void start(const std::shared_ptr<Execution>& execution, double seconds);
  // Make progress until an operation has ended, for so many seconds at most; returns whether it has.
  // `waited`: seconds that the caller has waited for it already. With `for_python` this also returns once any
  // operation has a step that Python is to compute, and Python is at none, or a watched operation has ended:
  // the caller then looks at all of them.
  bool wait(const Execution& execution, double seconds, double waited = 0, bool for_python = false);
  // Have calls of wait with `for_python` return soon: there is work for Python.
  void recall() { news_.store(true); }
  // Look once at all operations; returns false if nothing moved, or another thread looks.
  bool poll();
  void abandon(Execution& execution);
  // Cancel a receive that no message has reached; returns whether it was cancelled.
  bool cancel(Execution& execution);
  std::vector<Unfinished> unfinished(const Execution& execution);
  // See Execution. take() looks at all operations, as poll() does, if it has no step to return; answer() then
  // computes for so many seconds at most.
  std::optional<Asked> take(Execution& execution);
  void answer(Execution& execution, std::uint32_t step, std::size_t bytes, double seconds);
  // Compute until no operation has a step that is ready; returns whether one had.
  bool compute_all();
  void abandon_all();
  // End the thread. Operations in flight then move only while a caller waits.
  void stop();

  // Called by executions, under the lock:
  void send(Execution& execution, std::uint32_t step, Group& group, int peer, int tag,
            const std::uint8_t* data, std::size_t bytes);
  void receive(Execution& execution, std::uint32_t step, Group& group, int peer, int tag, std::uint8_t* data,
               std::size_t room);
  void forget(Execution* execution);
  // Take a block for so many bytes; throws std::bad_alloc.
  std::uint8_t* take(std::size_t bytes);
  void give(std::uint8_t* block);
  // Give blocks back, once no object in Python refers to them.
  void give(std::vector<std::uint8_t*> blocks, std::shared_ptr<Pin> pin);
  void count_asked(int more) { asked_.fetch_add(more); }
  void count_taken(int more) { taken_.fetch_add(more); }

  // The seconds for which no operation has been started, or has moved.
  double quiet() const { return now() - quiet_since_.load(); }

  std::mutex& mutex() { return mutex_; }
  const Mpi& mpi() const { return mpi_; }

  // Make messages in an arena from `first` bytes on.
  void use_arena(const Arena& arena, std::size_t first);

  // For tests: change the next message of at least so many bytes that MPI carries to a rank: in its middle,
  // or `sealed` at a byte of the payload, with the CRC that fits.
  struct Damage {
    int peer = -1;
    std::size_t least = 0;
    bool sealed = false;
    std::size_t at = 0;
    std::uint8_t flip = 4;  // bits
  };
  void damage(const Damage& damage);
  Blocks blocks;                     // under the lock
  CarriedOperations* const carried;  // null where MPI carries messages

 private:
  enum class Look : std::uint8_t { kNothing, kMoved, kBusy };  // kBusy: another thread looks

  bool advance();
  Look try_look();
  // Sleep for `pause` seconds; or, while all messages in flight are between ranks of this host, until one of
  // them rings, for `longest` at most. Looks once more before; returns true, without a sleep, if something
  // moved. The sleep is by `nap`, if given, where only ranks of other hosts are waited for.
  bool rest(double pause, double longest, Nap* nap);
  bool look();
  bool drain(Neighbour& neighbour);
  void retire();
  void wake();
  void collect();
  void run();

  Mpi mpi_;
  std::shared_ptr<SharedBlocks> others_;  // blocks of others; null for its own
  std::mutex mutex_;
  Requests requests_{mpi_};
  Contacts contacts_{mpi_};
  std::vector<Requests::Done> done_;
  std::vector<std::shared_ptr<Execution>> active_;     // small ones first
  std::vector<std::shared_ptr<Execution>> abandoned_;  // their memory may still be used by others
  std::vector<std::pair<std::shared_ptr<Pin>, std::vector<std::uint8_t*>>>
      pinned_;                         // blocks that Python refers to
  std::atomic<Bell*> bell_ = nullptr;  // bell of this process's arena
  std::atomic<int> waiters_ = 0;
  std::atomic<std::size_t> in_flight_ = 0;
  std::atomic<bool> shares_ = false;     // a group in use has neighbours
  std::atomic<bool> news_ = false;       // watched operations have ended
  std::atomic<int> asked_ = 0;           // steps that wait for Python
  std::atomic<int> taken_ = 0;           // steps that Python is at
  std::atomic<bool> requested_ = false;  // requests of MPI's are in flight
  std::atomic<double> quiet_since_ = 0;  // when an operation was started, or has moved

  Damage damage_;
  std::vector<std::uint8_t> damaged_;

  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<bool> dozes_ = false;  // the thread looks soon, whether it is woken or not
  std::atomic<double> moved_ = 0;    // when an operation was started, or the thread has moved one
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace hybridcomp::engine
