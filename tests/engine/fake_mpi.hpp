// The functions of MPI that the engine calls, between ranks that are objects of one process. A mailbox
// for each communicator, pair of ranks and tag delivers in order; some sends end at once, others when their
// receive is there, and what has ended is told some looks later, by a generator with a seed. It can damage
// messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/mpi.hpp"

namespace fake {

enum Damage { kNone, kTurnedBit, kShorter, kLonger, kTooLong, kRefused, kUnread };
constexpr int kTruncated = 15, kInStatus = 17, kBroken = 16, kUndefined = -32766;  // as in MPICH

class Network {
 public:
  static Network& get() {
    static Network& network = *new Network;  // the engines' threads may outlast main
    return network;
  }

  void seed(std::uint64_t value) {
    const std::lock_guard lock(mutex_);
    random_.seed(value);
  }

  // A rank's handle of a communicator, of which `group` is the number.
  std::uint64_t communicator(int group, int rank) {
    const std::lock_guard lock(mutex_);
    communicators_.push_back({group, rank});
    return communicators_.size();
  }

  // Damage the message of a communicator that follows the next `after` ones.
  void damage(int group, std::uint64_t after, Damage how) {
    const std::lock_guard lock(mutex_);
    damaged_group_ = group;
    damaged_after_ = after;
    damage_ = how;
  }

  // Whether the damage was done; if not, it will not be done any more.
  bool damaged() {
    const std::lock_guard lock(mutex_);
    const bool happened = damage_ == kNone;
    damage_ = kNone;
    return happened;
  }

  int isend(const void* data, std::size_t bytes, int peer, int tag, std::uint64_t comm, std::uint64_t* id) {
    maybe_yield();
    std::unique_lock lock(mutex_);
    const auto [group, rank] = communicators_.at(comm - 1);
    const auto* const from = static_cast<const std::uint8_t*>(data);
    Message message{from, bytes, {}, 0, false};
    const bool harm = damage_ != kNone && group == damaged_group_ && damaged_after_-- == 0;
    const Damage how = harm ? damage_ : kNone;
    if (harm) damage_ = kNone;
    const Key key{group, rank, peer, tag};
    if (refused_.contains(key)) {
      std::fprintf(stderr, "FAILED: rank %d sends behind a message to rank %d that was refused\n", rank,
                   peer);
      std::abort();  // the receive of that one would take this
    }
    if (how == kRefused) {
      refused_.insert(key);
      // MPI takes its time to find out, while more messages may be on their way here.
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return kBroken;
    }
    const bool eager = harm || random_() % 2;
    if (eager) {
      message.copy.assign(from, from + bytes);
      if (how == kTurnedBit)
        message.copy[random_() % bytes] ^= static_cast<std::uint8_t>(1u << random_() % 8);
      if (how == kShorter) message.copy.resize(random_() % bytes);
      if (how == kLonger) message.copy.resize(bytes + 4 + random_() % 128 * 4);
      if (how == kTooLong) message.copy.resize(1 << 20);
      if (how == kUnread) {
        message.unread = true;
        for (std::uint8_t& byte : message.copy) byte = static_cast<std::uint8_t>(~byte);
      }
      message.bytes = message.copy.size();
    }
    *id = add({.from = from, .sent = {from, from + bytes}, .ended = eager});
    message.request = eager ? 0 : *id;
    boxes_[key].sent.push_back(std::move(message));
    match(key);
    return 0;
  }

  int irecv(void* data, std::size_t room, int peer, int tag, std::uint64_t comm, std::uint64_t* id) {
    maybe_yield();
    const std::lock_guard lock(mutex_);
    const auto [group, rank] = communicators_.at(comm - 1);
    *id = add({.to = static_cast<std::uint8_t*>(data), .room = room});
    const Key key{group, peer, rank, tag};
    boxes_[key].wanted.push_back(*id);
    match(key);
    return 0;
  }

  // Whether a request has ended, which is told once: then it is gone, and its bytes and error are written.
  bool test(std::uint64_t id, int* bytes, int* error, int* cancelled) {
    const std::lock_guard lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end()) std::abort();  // the engine uses a request that has ended
    Request& request = found->second;
    if (!request.ended || request.unread || request.looks-- > 0) return false;
    *bytes = request.bytes;
    *error = request.error;
    *cancelled = request.cancelled;
    if (!request.sent.empty() && std::memcmp(request.from, request.sent.data(), request.sent.size())) {
      std::fprintf(stderr, "FAILED: what is being sent was written to\n");
      std::abort();
    }
    requests_.erase(found);
    return true;
  }

  // Whether MPI finds now that it could not read the message of a request, which it calls done and well
  // later.
  bool unread(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    const auto found = requests_.find(id);
    return found != requests_.end() && std::exchange(found->second.unread, false);
  }

  // Cancel a receive that no message has met yet.
  void cancel(std::uint64_t id) {
    const std::lock_guard lock(mutex_);
    for (auto& [key, box] : boxes_)
      if (std::erase(box.wanted, id)) requests_.at(id).ended = requests_.at(id).cancelled = true;
  }

  void maybe_yield() {
    bool yields;
    {
      const std::lock_guard lock(mutex_);
      yields = random_() % 4 == 0;
    }
    if (yields) std::this_thread::yield();
  }

 private:
  struct Message {
    const std::uint8_t* from;
    std::size_t bytes;
    std::vector<std::uint8_t> copy;
    std::uint64_t request;  // id of the send, if it waits for the receive
    bool unread;            // other bytes arrive, as where MPI could not read those of a rank that has died
  };
  struct Request {
    std::uint8_t* to = nullptr;
    const std::uint8_t* from = nullptr;
    std::vector<std::uint8_t> sent{};  // what was there when the send began
    std::size_t room = 0;
    bool ended = false, cancelled = false, unread = false;
    int looks = 0, bytes = 0, error = 0;
  };
  struct Box {
    std::deque<Message> sent;
    std::deque<std::uint64_t> wanted;
  };

  using Key = std::tuple<int, int, int, int>;  // communicator, sender, receiver, tag

  std::uint64_t add(Request request) {
    request.looks = static_cast<int>(random_() % 3);
    requests_[++last_] = request;
    return last_;
  }

  void match(const Key& key) {
    Box& box = boxes_[key];
    while (!box.sent.empty() && !box.wanted.empty()) {
      const Message& message = box.sent.front();
      Request& receive = requests_.at(box.wanted.front());
      receive.ended = true;
      receive.unread = message.unread;
      if (message.bytes > receive.room) {
        receive.error = kTruncated;
      } else {
        receive.bytes = static_cast<int>(message.bytes);
        if (message.bytes)
          std::memcpy(receive.to, message.request ? message.from : message.copy.data(), message.bytes);
      }
      if (message.request) requests_.at(message.request).ended = true;
      box.sent.pop_front();
      box.wanted.pop_front();
    }
    if (box.sent.empty() && box.wanted.empty()) boxes_.erase(key);
  }

  std::mutex mutex_;
  std::mt19937_64 random_;
  std::vector<std::pair<int, int>> communicators_;
  std::map<Key, Box> boxes_;
  std::unordered_map<std::uint64_t, Request> requests_;
  std::set<Key> refused_;
  std::uint64_t last_ = 0;
  int damaged_group_ = 0;
  std::uint64_t damaged_after_ = 0;
  Damage damage_ = kNone;
};

struct Status {
  int bytes, cancelled, unused[2], error;
};

// The functions as MPI has them; `Handle` is an integer of 4 bytes, as in MPICH, or of 8, as pointers of
// Open MPI.
template <typename Handle>
struct Functions {
  static int isend(const void* data, int count, std::uint64_t, int peer, int tag, std::uint64_t comm,
                   void* request) {
    std::uint64_t id = 0;
    const int code = Network::get().isend(data, static_cast<std::size_t>(count), peer, tag, comm, &id);
    store(request, id);
    return code;
  }

  static int irecv(void* data, int count, std::uint64_t, int peer, int tag, std::uint64_t comm,
                   void* request) {
    std::uint64_t id = 0;
    const int code = Network::get().irecv(data, static_cast<std::size_t>(count), peer, tag, comm, &id);
    store(request, id);
    return code;
  }

  static int testsome(int count, void* requests, int* done, int* indices, void* statuses) {
    int found = 0;
    bool failed = false;
    for (int i = 0; i < count; ++i)
      if (Network::get().unread(
              load(static_cast<std::uint8_t*>(requests) + static_cast<std::size_t>(i) * sizeof(Handle))))
        return kBroken;
    for (int i = 0; i < count; ++i) {
      auto* const at = static_cast<std::uint8_t*>(requests) + static_cast<std::size_t>(i) * sizeof(Handle);
      Status status{};
      if (!Network::get().test(load(at), &status.bytes, &status.error, &status.cancelled)) continue;
      store(at, 0);
      indices[found] = i;
      std::memcpy(static_cast<std::uint8_t*>(statuses) + static_cast<std::size_t>(found) * sizeof(status),
                  &status, sizeof(status));
      failed = failed || status.error;
      ++found;
    }
    *done = count ? found : kUndefined;
    if (!found) Network::get().maybe_yield();
    return failed ? kInStatus : 0;
  }

  static int get_count(const void* status, std::uint64_t, int* count) {
    Status copy;
    std::memcpy(&copy, status, sizeof(copy));
    *count = copy.bytes;
    return 0;
  }

  static int cancel(void* request) {
    Network::get().cancel(load(request));
    return 0;
  }

  static int test_cancelled(const void* status, int* cancelled) {
    Status copy;
    std::memcpy(&copy, status, sizeof(copy));
    *cancelled = copy.cancelled;
    return 0;
  }

  static int set_elements(void* status, std::uint64_t, int count) {
    std::memcpy(static_cast<std::uint8_t*>(status) + offsetof(Status, bytes), &count, sizeof(count));
    return 0;
  }

  static hybridcomp::engine::Mpi all() {
    return {isend,
            irecv,
            testsome,
            get_count,
            cancel,
            test_cancelled,
            set_elements,
            1,
            sizeof(Handle),
            sizeof(Status),
            offsetof(Status, error)};
  }

 private:
  static void store(void* at, std::uint64_t id) {
    const auto handle = static_cast<Handle>(id);
    std::memcpy(at, &handle, sizeof(handle));
  }
  static std::uint64_t load(const void* at) {
    Handle handle;
    std::memcpy(&handle, at, sizeof(handle));
    return handle;
  }
};

}  // namespace fake
