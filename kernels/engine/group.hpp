// Ranks of a communicator, as the engine reaches them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/shared_memory.hpp"

namespace hybridcomp::engine {

class Execution;

// A rank of this host, with which this one shares memory.
struct Neighbour {
  int rank = -1;
  Arena arena;  // the rank's own
  Ring to;      // ring in the rank's arena
  Ring from;    // ring in this process's arena

  // A receive that waits for its message, and a message that came before its receive.
  struct Posted {
    std::uint32_t sequence, step;
    Execution* execution;
  };
  std::vector<Posted> posted;
  std::vector<Entry> early;
};

// Peer and tag of a single message, as MPI gets them: for a receive, either may be MPI's "any".
struct Envelope {
  int peer, tag;
};

struct Group {
  static constexpr std::uint32_t kTags = 20'000;  // below those of hybridcomp/collectives/transport/mpi.py
  static constexpr int kMost = 64;  // numbers that an operation of several programs may take more

  // Return the most channels of an operation. Each operation takes as many numbers, used or not: a rank
  // without a part in a channel does not know of it.
  int channels() const { return size + 1 < 4 ? 4 : size + 1; }

  std::uint64_t comm = 0;
  int rank = 0, size = 1;
  std::vector<Neighbour> neighbours;
  std::uint8_t* rings = nullptr;       // rings in this process's arena that it reads; null if it has none
  std::vector<int> place;              // by rank: its index among the neighbours, or -1
  std::vector<std::int32_t> contacts;  // by rank: first messages being posted; -1: it is known
  std::vector<bool> away;              // by rank: whether it is on another host
  std::vector<bool> near;              // by rank: whether an exchange reaches it by memory that they share
  std::uint32_t sequence = 0;          // last number taken by the operations started

  Neighbour* neighbour(int peer) {
    const int at = peer < 0 || peer >= size ? -1 : place[static_cast<std::size_t>(peer)];
    return at < 0 ? nullptr : &neighbours[static_cast<std::size_t>(at)];
  }

  bool leaves(int peer) const {
    const auto at = static_cast<std::size_t>(peer);
    return peer >= 0 && at < away.size() && away[at];
  }

  bool shares(int peer) const {
    const auto at = static_cast<std::size_t>(peer);
    return peer >= 0 && at < near.size() && near[at];
  }

  // Count on from an operation's own number, whatever numbers this rank took before.
  void begin(std::uint32_t operation) {
    sequence = operation * static_cast<std::uint32_t>(channels() + kMost);
  }
  // Take the numbers of an operation's channels; returns the first. All ranks get the same, since they start
  // their operations in one order.
  std::uint32_t reserve() {
    const std::uint32_t first = sequence + 1;
    sequence += static_cast<std::uint32_t>(channels());
    return first;
  }
  static int tag(std::uint32_t sequence) { return static_cast<int>(sequence % kTags); }
};

}  // namespace hybridcomp::engine
