// One run of a program: the state of its steps, and its messages. All but the atomic members are under the
// engine's lock.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "codecs/feedback/memory.hpp"
#include "engine/group.hpp"
#include "engine/mpi.hpp"
#include "engine/program.hpp"

namespace hybridcomp::engine {

// Cause of an execution's failure; see hybridcomp/collectives/engine/faults.py.
enum class Fault : int {
  kNone = 0,
  kMessage = 1,  // a message that is damaged, or not what this rank expects
  kLength = 2,   // a message of another length than this rank expects, or has room for
  kMpi = 3,      // an error of MPI's
  kCodec = 4,    // the codec could not do what its kind of message tells
  kMemory = 5,   // no memory
  kGivenUp = 6,  // no fault: the caller gave it up
};

struct Failure {
  Fault fault = Fault::kNone;
  std::uint32_t step = 0;
  int peer = -1;
  int code = 0;                       // code of MPI's error
  std::size_t bytes = 0;              // bytes of the message
  std::vector<std::uint8_t> message;  // the message received
};

// Statistics of an execution.
struct Tally {
  std::uint64_t wire_bytes = 0, shared_bytes = 0,
                between_bytes = 0;  // sent; in shared memory; to other hosts
  double encode_seconds = 0, decode_seconds = 0;
};

// Token held by Python's objects that refer to blocks of an execution, which may outlast it: the blocks are
// not used again while they do.
struct Pin {};

// A step for Python to compute, and its memory.
struct Asked {
  std::uint32_t step = 0;
  std::span<std::uint8_t> room;                   // room for its message; empty if it makes none
  std::span<std::uint8_t> scratch;                // all scratch memory; empty if it uses none
  std::vector<std::span<std::uint8_t>> messages;  // messages that it reads: checked, cut to their length
  std::shared_ptr<Pin> pin;
};

// Interval of a trace, in which a kernel ran, by CLOCK_MONOTONIC.
struct Interval {
  bool encodes;
  double began, ended;
};

// A send or receive that has begun and not ended.
struct Unfinished {
  enum Reason : std::uint8_t { kNoMessage, kInMpi, kUnread, kRingFull };
  std::uint32_t step;
  int peer, channel;
  Reason reason;
  std::uint32_t readers;  // left for an unread message; 0 if no look came since the last one read it
};

class Engine;

class Execution {
 public:
  // `first`: first of the numbers that its group has reserved for it; not used with an `envelope`, which has
  // the peer and the tag of all its messages.
  Execution(Engine& engine, std::shared_ptr<Group> group, std::shared_ptr<const Program> program,
            std::uint32_t first, const Envelope* envelope, const std::uint8_t* send, std::uint8_t* recv,
            Memory* memory, bool traced);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Failure& failure() const { return failure_; }  // once done
  const Tally& tally() const { return tally_; }        // once done
  const std::vector<Interval>& intervals() const { return intervals_; }
  // MPI's status of a framed receive, once done; its count is that of the elements' bytes.
  const std::vector<std::uint8_t>& status() const { return status_; }
  bool cancelled() const { return cancelled_; }
  const Program& program() const { return *program_; }
  Group& group() { return *group_; }
  std::atomic<bool> watched = false;  // Python is to be told when it ends

  // Under the lock: begin; run the first step that is ready and computes, if there is one; take a request
  // that is done; see which messages others have read; end early, keeping memory that MPI or another rank
  // still uses.
  void start();
  bool compute();
  bool ready() const { return !ready_.empty(); }
  void received(std::uint32_t step, const Entry& entry);
  void completed(std::uint32_t step, const Requests::Done& done);
  // For messages of an exchange: one has been taken, one is here.
  void left(std::uint32_t step);
  void arrived(std::uint32_t step, const std::uint8_t* data, std::size_t bytes, bool trusted);
  bool settle();
  bool retry();
  void abandon();
  void refused(std::uint32_t step, int code);

  // Under the lock: return the next step that Python is to compute, if there is one and Python is at none;
  // and take its result, the bytes of the message that it made.
  std::optional<Asked> take();
  void answer(std::uint32_t step, std::size_t bytes);

  // Return every send and receive that has begun and not ended, in the order of the schedule; under the lock.
  std::vector<Unfinished> unfinished() const;

 private:
  // State of a slot that holds a message.
  struct Held {
    std::uint8_t* data = nullptr;   // the message
    std::size_t bytes = 0;          // bytes of the message
    std::uint8_t* block = nullptr;  // room of this rank's own
    std::uint32_t uses = 0;         // steps that have still to read it
    bool leased = false;            // it lies in another rank's arena, or was handed on there
    bool trusted = false;           // checked, or on no wire that could damage it
    int peer = -1;                  // rank that sent it, or this rank
    int owner = -1;                 // rank whose arena it is in
  };
  enum State : std::uint8_t { kWaiting, kReady, kPosted, kEnded };

  int peer(const Step& step) const { return envelope_ ? envelope_->peer : step.peer; }
  std::uint32_t sequence(const Step& step) const {
    return sequence_ + static_cast<std::uint32_t>(step.channel);
  }
  int tag(const Step& step) const { return envelope_ ? envelope_->tag : Group::tag(sequence(step)); }
  std::uint8_t* address(BufferId buffer, std::size_t at) const;
  std::uint8_t* room(std::uint32_t slot, std::size_t bytes);
  void begin(std::uint32_t step);
  // Whether it is known that a step is not carried out.
  bool left_out(const Step& step) const {
    return step.region != kAlways && !owners_.empty() &&
           owners_[static_cast<std::size_t>(step.region)] != step.owner;
  }
  void post_next(std::uint32_t queue);
  void post_send(std::uint32_t step);
  bool push(std::uint32_t step);
  bool blocked(std::uint32_t queue, std::size_t first) const;
  void post_receive(std::uint32_t step);
  void filled(const Step& step, std::uint8_t* data, std::size_t bytes, bool leased, bool trusted);
  void used(std::uint32_t slot);
  void end(std::uint32_t step);
  void begin_next(std::uint32_t step);
  bool finish_if_ended();
  void finish();
  void give_back();
  void fail(Fault fault, std::uint32_t step, int peer, int code = 0, const Held* held = nullptr);

  void ask(std::uint32_t step);
  void ask_no_more();

  // Run a step that computes; returns false if it failed.
  bool run(std::uint32_t step);
  bool encode(std::uint32_t index, const Step& step);
  bool check(std::uint32_t index, const Step& step, std::uint32_t slot);
  bool decode(std::uint32_t index, const Step& step);
  bool accept(std::uint32_t index, const Step& step);
  bool sum(std::uint32_t index, const Step& step);
  bool write_sizes(std::uint32_t index, const Step& step);
  bool cut(std::uint32_t index, const Step& step);
  bool fold(const Step& step);
  bool sum_with_feedback(std::uint32_t index, const Step& step);
  bool decode_result(const Payload& payload, const Step& step);
  void fail_sum(std::uint32_t index, const Step& step);
  bool payload(std::uint32_t index, const Step& step, std::uint32_t slot, Payload* payload);

  Engine& engine_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<const Program> program_;
  const std::uint8_t* send_;
  std::uint8_t* recv_;
  Memory* memory_;          // memory of error feedback; null for none
  std::uint32_t sequence_;  // number of its first channel
  std::optional<Envelope> envelope_;
  bool traced_;
  // unshared_: sums of plain elements are sent from the caller's array, since no rank of this host reads them
  // through shared memory. lends_: so are its own elements, by the order, and messages are received there.
  bool unshared_, lends_;
  const Order* order_;

  std::vector<std::uint32_t> waits_;    // by step: how many predecessors must still end
  std::vector<State> states_;           // by step
  std::vector<std::uint32_t> posted_;   // by queue: how many of its steps have been posted
  std::vector<Held> held_;              // by slot
  std::vector<std::uint32_t> ready_;    // steps that compute: a heap, the first on top
  std::vector<std::uint32_t> asked_;    // steps for Python: the same
  std::uint32_t taken_ = kNowhere;      // step that Python is at
  std::shared_ptr<Pin> pin_;            // set once Python was at a step
  std::vector<std::uint32_t> leased_;   // sends that others of this host have not read yet
  std::vector<std::uint32_t> blocked_;  // sends whose ring was full
  std::vector<Payload> payloads_;       // messages of a sum
  std::vector<std::int32_t> owners_;    // by region, once they are found
  std::vector<std::uint32_t> skipped_;  // steps that are not carried out and whose successors have not begun
  std::uint8_t* scratch_ = nullptr;
  std::size_t left_;  // steps not ended
  Failure failure_;
  Tally tally_;
  std::vector<Interval> intervals_;
  std::vector<std::uint8_t> status_;
  bool cancelled_ = false;
  std::atomic<bool> done_ = false;
};

}  // namespace hybridcomp::engine
