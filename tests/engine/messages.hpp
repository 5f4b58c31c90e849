// Sends and receives of single messages, each by a peer and a tag of its own.
#pragma once

#include "ranks.hpp"

namespace checked {

constexpr std::size_t kRoom = 4000;  // elements for which receivers have room

// The program of a send of so many elements, or of a receive of at most so many, as direct.send builds it
// (hybridcomp/schedules/algorithms/direct.py).
inline std::shared_ptr<const Program> message_program(bool sends, std::size_t count) {
  const auto n = static_cast<std::int64_t>(count);
  const std::vector<std::int64_t> send{kEncode, 0, -1, 0, n, 0,  0, -1, 0, 0, -1, 0, 0, 0, 0, -1, -1,  //
                                       kSend,   0, 1,  0, n, -1, 0, -1, 0, 0, -1, 0, 0, 0, 1, -1, -1};
  const std::vector<std::int64_t> recv{kRecv,   0, 0,  0, n, -1, 0, -1, 0, 0, -1, 0, 0, 0, 0, -1, -1,  //
                                       kDecode, 0, -1, 0, n, -1, 0, 1,  0, 0, -1, 0, 0, 0, 1, -1, -1};
  const std::vector<std::int64_t> slots{n, 0, 0}, lists{0};
  Carriage carriage{std::nullopt, kInt8Id, 77, kFloat32, 2, false, count * sizeof(float)};
  carriage.encoder = quantize_encoder({128, 8, true, false, 0}, false, {carriage.codec, carriage.params});
  carriage.framed = kRoom * sizeof(float) + sizeof(Header) + 1;
  const std::size_t limits[kBuffers] = {sends ? count : 0, sends ? 0 : count, 0};
  std::string fault;
  auto program = std::make_shared<Program>(carriage, sends ? send : recv, slots, lists, limits, sends ? 0 : 1,
                                           2, 4, &fault);
  expect(fault.empty(), "a message: " + fault);
  return program;
}

// A send or receive in flight.
class Letter {
 public:
  Letter(Rank& rank, const std::shared_ptr<Group>& group, bool sends, std::vector<float>* values, int tag)
      : engine_(&rank.engine) {
    const Envelope envelope{1 - group->rank, tag};
    auto* const data = reinterpret_cast<std::uint8_t*>(values->data());
    execution_ =
        std::make_shared<Execution>(*engine_, group, message_program(sends, values->size()), 0, &envelope,
                                    sends ? data : nullptr, sends ? nullptr : data, nullptr, tag % 2 == 0);
    engine_->start(execution_, 1e9);
  }
  Execution* operator->() const { return execution_.get(); }

  void wait() const {
    for (const double until = now() + kPatience; !engine_->wait(*execution_, 5e-3);)
      expect(now() < until, "a message hangs");
  }
  bool cancel() const { return engine_->cancel(*execution_); }
  int bytes() const {
    fake::Status status;
    expect(execution_->status().size() == sizeof(status), "a message has no status");
    std::memcpy(&status, execution_->status().data(), sizeof(status));
    return status.bytes;
  }

 private:
  Engine* engine_;
  std::shared_ptr<Execution> execution_;
};

// Send elements as they are, which MPI carries without the engine.
inline void send_plain(const Group& group, const std::vector<float>& values, int tag) {
  std::uint64_t id = 0;
  int bytes = 0, error = 0, cancelled = 0;
  fake::Network::get().isend(values.data(), values.size() * sizeof(float), 1 - group.rank, tag, group.comm,
                             &id);
  while (!fake::Network::get().test(id, &bytes, &error, &cancelled)) std::this_thread::yield();
}

// Two ranks exchange messages of any lengths, encoded or not, from three threads each: in the order of a tag,
// whichever side posts first. Some receives are cancelled before.
inline void exchange(World& world, std::uint64_t seed, int messages) {
  World::Groups groups = world.join(false);
  if (seed % 2)
    for (const auto& group : groups) group->contacts.assign(group->contacts.size(), -1);
  const auto talk = [&](int rank, int tag) {
    const auto& group = groups[static_cast<std::size_t>(rank)];
    std::mt19937_64 lengths(seed * 31 + static_cast<std::uint64_t>(tag)), own(seed * 17 + group->rank);
    for (int i = 0; i < messages; ++i) {
      const std::size_t count = 1 + lengths() % (kRoom - 1);
      const bool plain = lengths() % 4 == 0, longer = !plain && lengths() % 8 == 0;
      const auto value = static_cast<float>(1 + tag + i);
      std::vector<float> sent(longer ? kRoom : count, value), got(longer ? count : kRoom, -1);
      if (own() % 3 == 0) {
        std::vector<float> nothing(kRoom, -1);
        const Letter never(world[rank], group, false, &nothing, 100 + tag);
        expect(never.cancel() && never->done() && never.bytes() == 0, "a receive was not cancelled");
        expect(nothing[0] == -1, "a cancelled receive was written");
      }
      const Letter received(world[rank], group, false, &got, tag);
      if (plain) {
        send_plain(*group, sent, tag);
      } else {
        const Letter letter(world[rank], group, true, &sent, tag);
        expect(!letter.cancel(), "a send was cancelled");
        letter.wait();
      }
      received.wait();
      if (longer) {
        expect(received->failure().fault == Fault::kMessage, "a message that does not fit was taken");
        continue;
      }
      expect(received->failure().fault == Fault::kNone, "a message failed");
      expect(received.bytes() == static_cast<int>(count * sizeof(float)), "a message of another length");
      for (std::size_t k = 0; k < kRoom; ++k)
        expect(got[k] == (k < count ? value : -1), "a message has other elements");
    }
  };
  world.on_all([&](int rank) {
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 3; ++tag) threads.emplace_back(talk, rank, tag);
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace checked
