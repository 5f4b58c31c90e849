// Memory that the processes of a host share. A process makes its messages in an arena of its own, which the
// others have mapped; a ring from each rank to each other rank of the host carries the messages' places. No
// call of MPI's is made for them.
//
// A *lease*, in the line before each block of an arena, counts the ranks that still read the block. A ring's
// entry is trusted to name a block that has a lease: a process that can write to an arena of this user could
// as well change this process. Bounds are checked nevertheless: a bug must not read elsewhere.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace hybridcomp::engine {

constexpr std::size_t kLine = 64;

// Arena of one process, as it is mapped here.
struct Arena {
  std::uint8_t* base = nullptr;
  std::size_t bytes = 0;

  bool holds(std::uint64_t offset, std::uint64_t size) const {
    return offset >= 2 * kLine && offset % kLine == 0 && size <= bytes && offset <= bytes - size;
  }
};

// Bell on which an arena's process sleeps while it waits for ranks of this host; in the arena's second line.
// The line is written only while a thread sleeps, so that ringing costs a read of a line that is in the
// cache.
struct Bell {
  std::atomic<std::uint32_t> rung;
  std::atomic<std::uint32_t> sleepers;

  static Bell& of(const Arena& arena) { return *reinterpret_cast<Bell*>(arena.base + kLine); }

  // Wake the arena's process if it sleeps. The caller has written the data that it is to see by a
  // sequentially consistent operation.
  void ring();
};

// A thread that is about to sleep. Once this is made, a ring wakes it: after that, and before the sleep, the
// thread must look, sequentially consistently, for the data that it waits for.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) {
    bell.sleepers.fetch_add(1);
    seen_ = bell.rung.load();
  }
  ~Sleeper() { bell_.sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // Sleep until the bell has rung since this was made, or for so many seconds.
  void sleep(double seconds);

 private:
  Bell& bell_;
  std::uint32_t seen_;
};

inline std::atomic<std::uint32_t>& lease_of(std::uint8_t* block) {
  return *reinterpret_cast<std::atomic<std::uint32_t>*>(block - kLine);
}

// Blocks of this process's arena, or of its heap where it has none. Under the engine's lock. A block that is
// given back while other ranks read it waits for them. Of each size there are as many as were ever in use at
// a time; from time to time the pages of those go back to the system that have not been in use since the last
// time, or a program that sends messages of many sizes would hold the most of each that it ever needed.
class Blocks {
 public:
  // Use an arena from `first` bytes on, or the heap if its base is null.
  void use(const Arena& arena, std::size_t first);

  const Arena& arena() const { return arena_; }
  bool shared(const std::uint8_t* block) const {
    return block >= arena_.base && block < arena_.base + arena_.bytes;
  }

  std::uint8_t* take(std::size_t bytes);  // throws std::bad_alloc
  void give(std::uint8_t* block);

  // Bytes of the arena ever taken: does not grow while free blocks serve.
  std::size_t used() const { return used_; }

  // Blocks given back between two times at which pages go back to the system; may be set under the lock.
  std::size_t period = 2048;

  // Whether blocks given back that others still read have so many bytes that a rank that sends more must wait
  // for them.
  bool crowded();

 private:
  // Free blocks of one size, the one given back last at the end.
  struct Free {
    std::vector<std::uint8_t*> blocks;
    std::size_t least =
        0;  // fewest that were free since pages last went back: as many at the front were not used
    std::size_t bare = 0;  // blocks at the front whose pages have gone back
  };

  void put(std::uint8_t* block);
  void collect();
  void release(std::uint8_t* block);
  void trim();

  Arena arena_;
  std::size_t used_ = 0;
  std::unordered_map<const std::uint8_t*, std::size_t> sizes_;
  std::unordered_map<std::size_t, Free> free_;
  std::size_t given_ = 0;  // since pages last went back
  std::deque<std::uint8_t*> leased_;
  std::size_t leased_bytes_ = 0;
};

// Entry of a ring: a message's sequence number, the rank whose arena holds it, and its place there.
struct Entry {
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint32_t sequence;
  std::uint32_t owner;   // rank whose arena it is in
  std::uint32_t number;  // the entry's, from 1 on: written last, so that one line tells that it is there
  std::uint32_t unused[9];
};
static_assert(sizeof(Entry) == kLine);

// Ring of one producer and one consumer, in the consumer's arena, as either of them sees it.
class Ring {
 public:
  static constexpr std::uint32_t kEntries = 256;
  static constexpr std::size_t kBytes = kLine + kEntries * sizeof(Entry);

  explicit Ring(std::uint8_t* at = nullptr) : at_(at) {}

  // Push an entry, as the producer; returns false if the ring is full.
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

  // Pop an entry, as the consumer; returns false if the ring is empty.
  bool pop(Entry* entry) {
    Entry& from = entries()[count_ % kEntries];
    if (std::atomic_ref(from.number).load() != count_ + 1) return false;
    *entry = {from.offset, from.bytes, from.sequence, from.owner, 0, {}};
    popped().store(++count_, std::memory_order_release);
    return true;
  }

 private:
  // Number of entries popped: the producer reads it once it has filled all.
  std::atomic<std::uint32_t>& popped() const { return *reinterpret_cast<std::atomic<std::uint32_t>*>(at_); }
  Entry* entries() const { return reinterpret_cast<Entry*>(at_ + kLine); }

  std::uint8_t* at_;
  std::uint32_t count_ = 0;   // entries pushed here, or popped here
  std::uint32_t popped_ = 0;  // popped() at the producer's last look
};

}  // namespace hybridcomp::engine
