// Messages between the ranks of a host for exchanges that no engine runs, over memory that they share. A rank
// hands each other rank of the host one parcel for each exchange: a table, in a block of the sender's arena,
// of where its messages lie. The receiver reads them in place; leases keep the blocks until it has.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/shared_memory.hpp"

namespace hybridcomp::engine {

// Blocks of an arena, taken and given back by any thread.
class SharedBlocks {
 public:
  SharedBlocks() = default;  // blocks of the heap, which no other process reads
  SharedBlocks(const Arena& arena, std::size_t first) { blocks_.use(arena, first); }

  const Arena& arena() const { return blocks_.arena(); }
  std::uint8_t* take(std::size_t bytes);  // throws std::bad_alloc
  // Give a block back; returns false where it is none that was taken.
  bool give(const std::uint8_t* block);
  // Bytes of the arena ever taken: does not grow while free blocks serve.
  std::size_t used();
  // Blocks taken and not given back.
  std::size_t held();
  // Return the taken block that holds so many bytes from an address on, with one more lease; null if none
  // does.
  std::uint8_t* lease(const std::uint8_t* data, std::size_t bytes);

 private:
  std::mutex mutex_;
  Blocks blocks_;
  std::map<const std::uint8_t*, std::size_t> taken_;
};

// A message: its tag, and its bytes.
struct Parcelled {
  std::int64_t tag;
  const std::uint8_t* data;
  std::size_t bytes;
};

// A rank's lanes to and from the other ranks of its host in one group, its neighbours by index. One thread
// uses them at a time.
class Lanes {
 public:
  Lanes(std::shared_ptr<SharedBlocks> blocks, std::size_t neighbours);
  ~Lanes();
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  // Return the place in this process's arena of the rings that it reads, one for each neighbour.
  std::size_t rings() const { return static_cast<std::size_t>(rings_ - blocks_->arena().base); }
  std::size_t size() const { return neighbours_.size(); }

  // Connect the next neighbour: its arena, the place there of all its rings and of the one to it, and which
  // of the rings here is from it. Returns false where these do not lie within.
  bool connect(const Arena& arena, std::size_t rings, std::size_t to, std::size_t from);

  // Hand a neighbour its parcel of an exchange. Messages in blocks of this process's arena stay where they
  // are, others are copied. Returns false if the ring has had no room for so many seconds.
  bool send(std::size_t index, std::uint32_t exchange, const std::vector<Parcelled>& messages,
            double seconds);
  // Tell a neighbour that nothing follows any more, and why; it may be too busy to be told.
  void leave(std::size_t index, const std::string& why);

  // Wait for so many seconds at most until all neighbours' parcels of an exchange are here, or one has left.
  bool wait(std::uint32_t exchange, double seconds);
  bool here(std::size_t index, std::uint32_t exchange) const;
  bool left(std::size_t index, std::string* why) const;

  // Return a neighbour's messages of an exchange that are here; returns false if they are none.
  bool read(std::size_t index, std::uint32_t exchange, std::vector<Parcelled>* messages);
  // Let the neighbours have the blocks of an exchange's messages back: they will not be read again.
  void release(std::uint32_t exchange);

 private:
  static constexpr std::uint32_t kLeft = 0;  // in an exchange's place: its bytes are a text

  struct Neighbour {
    Arena arena;
    std::uint8_t* rings;  // all of its rings, of which this process has a lease
    Ring to, from;
    std::unordered_map<std::uint32_t, Entry> early;  // parcels that are here and not read, by exchange
    bool gone = false;
    std::string why;
  };

  bool push(Neighbour& to, std::uint32_t exchange, std::uint8_t* block, std::size_t bytes, double seconds);
  bool look(std::uint32_t exchange);
  void drain(Neighbour& from);

  std::shared_ptr<SharedBlocks> blocks_;
  std::size_t expected_;
  std::uint8_t* rings_;
  std::vector<Neighbour> neighbours_;
  std::unordered_map<std::uint32_t, std::vector<std::uint8_t*>> leased_;  // blocks being read, by exchange
};

}  // namespace hybridcomp::engine
