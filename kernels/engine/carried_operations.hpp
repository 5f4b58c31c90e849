// Operations whose messages travel together in exchanges that Python carries, over whatever it has: no MPI is
// called. hybridcomp/torch/exchange uses it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "engine/lanes.hpp"

namespace hybridcomp::engine {

// Tags of messages of these operations are above those of others that travel with them.
constexpr std::int64_t kCompiled = std::int64_t(1) << 32;

class CarriedOperations {
 public:
  // A message that an operation sends, or waits for.
  struct Message {
    Execution* execution;
    std::uint32_t step;
    int peer;
    std::int64_t tag;
    const std::uint8_t* data;  // null for one that is waited for
    std::size_t bytes;         // the most, for one that is waited for
  };
  // By rank, the bytes of the next exchange as pack() writes them; 0 for ranks of this host.
  struct Bytes {
    std::vector<std::size_t> sent, most;  // to the rank; from it, at most
  };

  // `near`: by rank, whether lanes reach it; `away`: whether it is on another host. Messages are made in
  // `blocks`.
  CarriedOperations(int rank, const std::vector<bool>& near, const std::vector<bool>& away,
                    std::shared_ptr<SharedBlocks> blocks);
  ~CarriedOperations();

  // Start an operation, which computes nothing yet. All ranks start the same ones in the same order.
  std::shared_ptr<Execution> start(const std::shared_ptr<const Program>& program, std::uint32_t first,
                                   const std::uint8_t* send, std::uint8_t* recv, Memory* memory, bool traced);
  // Reserve the numbers of an operation that will be started later.
  std::uint32_t reserve();
  // Compute until each operation waits for messages; returns whether there was anything to compute.
  bool run();

  // Have the messages queued since the last call leave by the next exchange: they stay as they are until
  // sent().
  Bytes collect();
  // Write the messages to a rank, as hybridcomp/torch/exchange/packing.py defines it: a table, and each
  // message.
  void pack(int peer, std::uint8_t* out) const;
  // Append the messages to a rank of this host.
  void pack(int peer, std::vector<Parcelled>* parcel) const;
  void sent();

  // Hand over the messages of a rank, packed; memory that stays as it is until all operations have ended.
  // Returns a fault, or an empty string; `unlike`: whether the fault is of a message that is not what this
  // rank expects.
  std::string unpack(int peer, const std::uint8_t* data, std::size_t bytes, bool* unlike);
  // Hand over one message. `trusted`: no wire could have damaged it.
  std::string deliver(int peer, const Parcelled& message, bool trusted);

  // Give all operations up.
  void abandon();

  // Called by executions, under the engine's lock:
  void send(const Message& message) { sends_.push_back(message); }
  void receive(const Message& message) {
    receives_[static_cast<std::size_t>(message.peer)].push_back(message);
  }
  void forget(const Execution* execution);

 private:
  std::shared_ptr<Group> group_;
  Engine engine_;
  std::vector<Message> sends_;                  // queued
  std::vector<std::vector<Message>> leaving_;   // by rank, in the order of their tags
  std::vector<std::vector<Message>> receives_;  // by rank
};

}  // namespace hybridcomp::engine
