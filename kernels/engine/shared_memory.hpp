// Memory that the processes of a host share. A process makes its messages in an arena of its own, which the
// others have mapped; a ring from each rank to each other rank of the host carries where they are. No call of
// MPI's is made for them.
//
// A *lease*, in the line before each block of an arena, counts who still reads the block. That a block is
// where a ring's entry says, and has a lease, is believed: who can write to an arena of this user could as
// well change this process. Bounds are checked nevertheless: a bug must not read elsewhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace hybridcomp::engine {

constexpr std::size_t kLine = 64;

// One process's arena, as it is mapped here.
struct Arena {
  std::uint8_t* base = nullptr;
  std::size_t bytes = 0;

  bool holds(std::uint64_t offset, std::uint64_t size) const {
    return offset >= 2 * kLine && offset % kLine == 0 && size <= bytes && offset <= bytes - size;
  }
};

// In the second line of every arena: on what its process sleeps while it waits for ranks of this host. The
// line is written only while somebody sleeps, so that ringing costs a read of a line that is in the cache.
struct Bell {
  std::atomic<std::uint32_t> rung;
  std::atomic<std::uint32_t> sleepers;

  static Bell& of(const Arena& arena) { return *reinterpret_cast<Bell*>(arena.base + kLine); }

  // Wake the arena's process if it sleeps. What is to be seen by who wakes was written by a sequentially
  // consistent operation.
  void ring();
};

// Someone who is about to sleep. Once it is made, whoever rings wakes it: look, sequentially consistently, at
// what is waited for after that, and before the sleep.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) {
    bell.sleepers.fetch_add(1);
    seen_ = bell.rung.load();
  }
  ~Sleeper() { bell_.sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // Sleep until somebody has rung since this was made, or for so many seconds.
  void sleep(double seconds);

 private:
  Bell& bell_;
  std::uint32_t seen_;
};

inline std::atomic<std::uint32_t>& lease_of(std::uint8_t* block) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(block - kLine);
}

// Blocks of this process's arena, or of its heap where it has none. Under the engine's lock. A block that is
// given back while others read it waits for them.
class Blocks {
 public:
  // Use an arena from `first` bytes on; none if its base is null.
  void use(const Arena& arena, std::size_t first);

  const Arena& arena() const { return arena_; }
  bool shared(const std::uint8_t* block) const {
    return block >= arena_.base && block < arena_.base + arena_.bytes;
  }

  std::uint8_t* take(std::size_t bytes);  // throws std::bad_alloc
  void give(std::uint8_t* block);

  // Bytes of the arena ever taken: does not grow while free blocks serve.
  std::size_t used() const { return used_; }

  // Whether blocks of so many bytes have been given back that others still read, that whoever sends more has
  // to wait for them.
  bool crowded();

 private:
  void collect();
  void release(std::uint8_t* block);

  Arena arena_;
  std::size_t used_ = 0;
  std::unordered_map<const std::uint8_t*, std::size_t> sizes_;
  std::unordered_map<std::size_t, std::vector<std::uint8_t*>> free_;
  std::deque<std::uint8_t*> leased_;
  std::size_t leased_bytes_ = 0;
};

// What a ring carries: a message of the operation's sequence number, in which process's arena and where.
struct Entry {
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint32_t sequence;
  std::uint32_t owner;   // rank whose arena it is in
  std::uint32_t number;  // of the entry, from 1 on: written last, so that one line tells that it is there
  std::uint32_t unused[9];
};
static_assert(sizeof(Entry) == kLine);

// A ring of one producer and one consumer, in the consumer's arena, as either of them sees it.
class Ring {
 public:
  static constexpr std::uint32_t kEntries = 256;
  static constexpr std::size_t kBytes = kLine + kEntries * sizeof(Entry);

  explicit Ring(std::uint8_t* at = nullptr) : at_(at) {}

  // The producer's; false if it is full.
  bool push(const Entry& entry) {
    if (count_ - popped_ == kEntries) popped_ = popped().load(std::memory_order_acquire);
    if (count_ - popped_ == kEntries) return false;
    Entry& to = entries()[count_ % kEntries];
    to.offset = entry.offset;
    to.bytes = entry.bytes;
    to.sequence = entry.sequence;
    to.owner = entry.owner;
    std::atomic_ref(to.number).store(++count_);  // sequentially consistent, for the bell
    return true;
  }

  // The consumer's; false if it is empty.
  bool pop(Entry* entry) {
    Entry& from = entries()[count_ % kEntries];
    if (std::atomic_ref(from.number).load() != count_ + 1) return false;
    *entry = {from.offset, from.bytes, from.sequence, from.owner, 0, {}};
    popped().store(++count_, std::memory_order_release);
    return true;
  }

 private:
  // How many entries were popped: the producer looks when it has filled all.
  std::atomic<std::uint32_t>& popped() const { return *reinterpret_cast<std::atomic<std::uint32_t>*>(at_); }
  Entry* entries() const { return reinterpret_cast<Entry*>(at_ + kLine); }

  std::uint8_t* at_;
  std::uint32_t count_ = 0;   // of entries pushed here, or popped here
  std::uint32_t popped_ = 0;  // the producer's last look at it
};

}  // namespace hybridcomp::engine
