// The ranks of a communicator, as the engine reaches them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/shared_memory.hpp"

namespace hybridcomp::engine {

class Execution;

// A rank of this host, with whom this one shares memory.
struct Neighbour {
  int rank = -1;
  Arena arena;  // its own
  Ring to;      // in its arena
  Ring from;    // in this process's

  // A receive that waits for its message, and a message that came before its receive.
  struct Posted {
    std::uint32_t sequence, step;
    Execution* execution;
  };
  std::vector<Posted> posted;
  std::vector<Entry> early;
};

// With whom a single message is exchanged, as MPI is told: either may be MPI's "any" of a receive.
struct Envelope {
  int peer, tag;
};

struct Group {
  static constexpr std::uint32_t kTags = 30'000;  // below MPI's guaranteed 32767
  static constexpr int kMost = 64;                // numbers that an operation outside the engine takes

  // Channels of an operation, at most. Each takes as many numbers whatever it uses: a rank that has no part
  // in one of the channels does not know of it.
  int channels() const { return size + 1 < 4 ? 4 : size + 1; }

  std::uint64_t comm = 0;
  int rank = 0, size = 1;
  std::vector<Neighbour> neighbours;
  std::uint8_t* rings = nullptr;       // in this process's arena, those that it reads; null if it has none
  std::vector<int> place;              // of each rank: its index among the neighbours, or -1
  std::vector<std::int32_t> contacts;  // of each rank: first messages that are being posted; -1: it is known
  std::uint32_t sequence = 0;          // of the operations that were started

  Neighbour* neighbour(int peer) {
    const int at = peer < 0 || peer >= size ? -1 : place[static_cast<std::size_t>(peer)];
    return at < 0 ? nullptr : &neighbours[static_cast<std::size_t>(at)];
  }

  // So many sequence numbers; the first of them. The same on all ranks, which start their operations in one
  // order.
  std::uint32_t take(int numbers) {
    const std::uint32_t first = sequence + 1;
    sequence += static_cast<std::uint32_t>(numbers);
    return first;
  }
  // Count on from an operation's own number, whatever was taken before on this rank.
  void begin(std::uint32_t operation) {
    sequence = operation * static_cast<std::uint32_t>(channels() + kMost);
  }
  // The numbers of an operation's channels.
  std::uint32_t reserve() { return take(channels()); }
  static int tag(std::uint32_t sequence) { return static_cast<int>(sequence % kTags); }
};

}  // namespace hybridcomp::engine
