// Ranks as engines of one process, joined as hybridcomp/collectives/engine/groups.py joins processes, and
// the operations that they run.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "asking.hpp"
#include "codecs/block/message.hpp"
#include "engine/engine.hpp"
#include "fake_mpi.hpp"

namespace checked {

constexpr double kPatience = 120;  // seconds; what takes longer hangs

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

inline void expect(bool good, const std::string& what) {
  if (!good) fail(what);
}

// -- schedules ---------------------------------------------------------------------------------------------

// A schedule of one rank, as Schedule.packed has it.
struct Packed {
  std::size_t scratch;
  std::vector<std::int64_t> steps, slots, lists;
};

// One all-reduce: the schedules of all ranks, from a file of dump.py.
struct Case {
  std::string name;
  std::vector<int> hosts;
  std::size_t count;
  bool plain, feedback, mean;
  bool asks;   // for the steps that need the codec, as where Python has that
  bool folds;  // elements are integers of as many bytes
  std::vector<Packed> packed;
  std::vector<std::shared_ptr<const Program>> programs;

  int ranks() const { return static_cast<int>(hosts.size()); }
  std::int64_t regions(int rank) const {
    return static_cast<std::int64_t>(programs[static_cast<std::size_t>(rank)]->regions);
  }

  std::shared_ptr<const Program> compile(int rank, const Packed& from, std::string* fault) const {
    Carriage carriage{std::nullopt, kNoneId, 0, kFloat32, ranks(), mean, count * sizeof(float)};
    if (folds) {
      carriage.dtype = static_cast<DTypeCode>(kInt32);
      carriage.fold = Fold::kSum;
    }
    if (!plain) {
      carriage.codec = kInt8Id;
      carriage.params = 77;
      carriage.encoder = quantize_encoder({128, 8, true, false, 0}, false, {carriage.codec, carriage.params});
      if (asks) carriage.bounds.emplace();
      for (std::size_t at = 0; asks && at < from.slots.size(); at += kSlotWords)
        carriage.bounds->push_back(
            carriage.encoder->bound(static_cast<std::size_t>(from.slots[at]), kFloat32));
    }
    Group group;
    group.size = ranks();
    const std::size_t limits[kBuffers] = {count, count, from.scratch};
    return std::make_shared<Program>(carriage, from.steps, from.slots, from.lists, limits, rank, ranks(),
                                     group.channels(), fault);
  }

  // Read a case. With `otherwise` it asks for steps if elements are encoded, and has integers if not.
  Case(const std::string& folder, const std::string& file, bool otherwise) : name(file) {
    std::ifstream in(folder + "/" + file, std::ios::binary);
    const auto next = [&] {
      std::int64_t value = 0;
      in.read(reinterpret_cast<char*>(&value), sizeof(value));
      expect(in.good(), name + " is cut off");
      return value;
    };
    const auto many = [&](std::vector<std::int64_t>* values) {
      for (std::int64_t& value : *values) value = next();
    };
    hosts.resize(static_cast<std::size_t>(next()));
    for (int& host : hosts) host = static_cast<int>(next());
    count = static_cast<std::size_t>(next());
    plain = next() != 0;
    feedback = next() != 0;
    mean = next() != 0;
    asks = otherwise && !plain;
    folds = otherwise && plain;
    name += asks ? ", asking" : folds ? ", of integers" : "";
    packed.resize(hosts.size());
    for (Packed& one : packed) {
      one.scratch = static_cast<std::size_t>(next());
      for (auto* const part : {&one.steps, &one.slots, &one.lists})
        part->resize(static_cast<std::size_t>(next()));
      for (auto* const part : {&one.steps, &one.slots, &one.lists}) many(part);
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      std::string fault;
      programs.push_back(compile(rank, packed[static_cast<std::size_t>(rank)], &fault));
      expect(fault.empty(), name + ": " + fault);
    }
  }
};

// -- ranks -------------------------------------------------------------------------------------------------

class Flight;

struct Rank {
  explicit Rank(const Mpi& mpi) : engine(mpi) {}
  Engine engine;
  Arena arena;  // memory that other ranks see, once there is one

  // Operations that ask for steps: a thread that waits for one computes those of all, one at a time.
  std::mutex steps;
  std::vector<const Flight*> asking;
  void compute();
};

// Ranks on hosts. A communicator of theirs is a group for each.
class World {
 public:
  using Groups = std::vector<std::shared_ptr<Group>>;

  World(std::vector<int> hosts, bool wide_handles) : hosts_(std::move(hosts)) {
    const Mpi mpi =
        wide_handles ? fake::Functions<std::uint64_t>::all() : fake::Functions<std::uint32_t>::all();
    for (std::size_t i = 0; i < hosts_.size(); ++i) ranks_.push_back(std::make_unique<Rank>(mpi));
  }

  // Ends all threads. Arenas stay after a failure, since the fake's mailboxes may still use them.
  ~World() {
    for (const auto& rank : ranks_) rank->engine.stop();
    if (failed)
      for (auto& rank : ranks_) kept().push_back(std::move(rank));
    else
      for (const auto& rank : ranks_)
        if (rank->arena.base) munmap(rank->arena.base, rank->arena.bytes);
  }

  int size() const { return static_cast<int>(hosts_.size()); }
  Rank& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  const std::shared_ptr<Rooms>& rooms() const { return rooms_; }
  bool failed = false;  // an operation has failed, or was abandoned

  // Give a rank that shares its host an arena, as the first communicator of several ranks of a host does.
  void use_arena(int rank, std::size_t bytes = std::size_t(64) << 20) {
    Rank& own = (*this)[rank];
    if (own.arena.base || neighbours(rank).empty()) return;
    void* const base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    expect(base != MAP_FAILED, "no memory for an arena");
    own.arena = {static_cast<std::uint8_t*>(base), bytes};
    own.engine.use_arena(own.arena, 2 * kLine);
  }

  // The groups of one more communicator, the next one; with `shared`, neighbours share memory.
  Groups join(bool shared = true) {
    ++last_group;
    Groups groups;
    std::vector<std::uint8_t*> rings(hosts_.size());
    for (int rank = 0; rank < size(); ++rank) {
      auto group = std::make_shared<Group>();
      group->comm = fake::Network::get().communicator(last_group, rank);
      group->rank = rank;
      group->size = size();
      group->place.assign(hosts_.size(), -1);
      group->contacts.assign(hosts_.size(), 0);
      for (const int host : hosts_) group->away.push_back(host != hosts_[static_cast<std::size_t>(rank)]);
      groups.push_back(std::move(group));
      const std::size_t count = neighbours(rank).size();
      if (!shared || !count) continue;
      use_arena(rank);
      Engine& engine = (*this)[rank].engine;
      const std::lock_guard lock(engine.mutex());
      rings[static_cast<std::size_t>(rank)] = engine.blocks.take(count * Ring::kBytes);
      std::memset(rings[static_cast<std::size_t>(rank)], 0, count * Ring::kBytes);
    }
    for (int rank = 0; shared && rank < size(); ++rank)
      for (const int other : neighbours(rank)) {
        Group& group = *groups[static_cast<std::size_t>(rank)];
        Neighbour neighbour;
        neighbour.rank = other;
        neighbour.arena = (*this)[other].arena;
        neighbour.to = Ring(rings[static_cast<std::size_t>(other)] + place(rank, other) * Ring::kBytes);
        neighbour.from = Ring(rings[static_cast<std::size_t>(rank)] + place(other, rank) * Ring::kBytes);
        group.place[static_cast<std::size_t>(other)] = static_cast<int>(group.neighbours.size());
        group.neighbours.push_back(neighbour);
      }
    return groups;
  }

  // Run f(rank) on a thread for each rank, until all have returned.
  void on_all(const std::function<void(int)>& f) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(f, rank);
    for (std::thread& thread : threads) thread.join();
  }

  static inline int last_group = 0;

 private:
  static std::vector<std::unique_ptr<Rank>>& kept() {
    static auto& all = *new std::vector<std::unique_ptr<Rank>>;
    return all;
  }

  std::vector<int> neighbours(int rank) const {
    std::vector<int> found;
    for (int other = 0; other < size(); ++other)
      if (other != rank && hosts_[static_cast<std::size_t>(other)] == hosts_[static_cast<std::size_t>(rank)])
        found.push_back(other);
    return found;
  }

  // Index of a rank's ring among another's rings, which are in the order of that one's neighbours.
  std::size_t place(int rank, int of) const {
    const std::vector<int> all = neighbours(of);
    return static_cast<std::size_t>(std::find(all.begin(), all.end(), rank) - all.begin());
  }

  const std::vector<int> hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();
};

// -- operations --------------------------------------------------------------------------------------------

// Return whole numbers, so that sums are exact in any order.
inline float element(std::uint64_t seed, int rank, std::size_t i) {
  return static_cast<float>((seed * 31 + static_cast<std::uint64_t>(rank) * 7 + i * 13) % 65) - 32;
}

// One rank's part of an operation, started.
class Flight {
 public:
  Flight(World& world, const Case& what, int rank, const std::shared_ptr<Group>& group, std::uint64_t seed,
         double seconds)
      : case_(&what),
        rank_(&world[rank]),
        engine_(&rank_->engine),
        seed_(seed),
        send_(what.count),
        recv_(what.count, -1e9f) {
    auto& input = seed % 3 ? send_ : recv_;  // or in place
    for (std::size_t i = 0; i < input.size(); ++i) {
      const float value = element(seed, rank, i);
      const auto whole = static_cast<std::int32_t>(value);
      std::memcpy(&input[i], what.folds ? static_cast<const void*>(&whole) : &value, sizeof(value));
    }
    if (what.feedback) {
      memory_ = std::make_unique<PlainMemory>(what.count, false, world.rooms());
      memory_->begin();
    }
    {
      const std::lock_guard lock(engine_->mutex());  // a group counts its operations
      execution_ = std::make_shared<Execution>(
          *engine_, group, what.programs[static_cast<std::size_t>(rank)], group->reserve(), nullptr,
          reinterpret_cast<const std::uint8_t*>(input.data()), reinterpret_cast<std::uint8_t*>(recv_.data()),
          memory_.get(), seed % 2 == 0);
    }
    arrays_ = {input.data(), recv_.data(), memory_.get()};
    engine_->start(execution_, seconds);
    if (!what.asks) return;
    const std::lock_guard lock(rank_->steps);
    rank_->asking.push_back(this);
  }
  ~Flight() {
    const std::lock_guard lock(rank_->steps);
    std::erase(rank_->asking, this);
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  Execution& operator*() const { return *execution_; }
  Execution* operator->() const { return execution_.get(); }

  // Wait as Python does, for some milliseconds at a time.
  void wait() const {
    for (const double until = now() + kPatience; !engine_->wait(*execution_, 5e-3, 0, true);) {
      expect(now() < until, case_->name + " hangs");
      rank_->compute();
    }
  }
  // Leave it to the engine's own thread.
  void look_on() const {
    for (const double until = now() + kPatience; !execution_->done();) {
      expect(now() < until, case_->name + " hangs while nobody waits");
      rank_->compute();  // as Python's own thread
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  void compute() const {
    while (const auto asked = engine_->take(*execution_)) {
      const std::size_t bytes = Answer(execution_->program(), *asked, arrays_).compute();
      engine_->answer(*execution_, asked->step, bytes, seed_ % 2 ? 100e-6 : 0);
    }
  }
  void abandon() const { engine_->abandon(*execution_); }
  std::vector<Unfinished> unfinished() const { return engine_->unfinished(*execution_); }

  // Check that it ended well, with the sum.
  void check() const {
    expect(execution_->done() && execution_->failure().fault == Fault::kNone,
           case_->name + ": fault " + std::to_string(static_cast<int>(execution_->failure().fault)));
    const float ranks = static_cast<float>(case_->ranks());
    const float allowed = case_->plain ? 1e-5f * ranks : ranks;  // int8 rounds parts and sums
    for (std::size_t i = 0; i < recv_.size(); ++i) {
      float sum = 0;
      for (int rank = 0; rank < case_->ranks(); ++rank) sum += element(seed_, rank, i);
      if (case_->folds) {
        std::int32_t whole = 0;
        std::memcpy(&whole, &recv_[i], sizeof(whole));
        expect(static_cast<float>(whole) == sum,
               case_->name + ": integer " + std::to_string(i) + " is " + std::to_string(whole));
        continue;
      }
      if (case_->mean) sum /= ranks;
      expect(std::abs(recv_[i] - sum) <= allowed && (case_->mean || !case_->plain || recv_[i] == sum),
             case_->name + ": element " + std::to_string(i) + " is " + std::to_string(recv_[i]) + ", not " +
                 std::to_string(sum));
    }
  }
  const std::vector<float>& result() const { return recv_; }

 private:
  const Case* case_;
  Rank* rank_;
  Engine* engine_;
  std::uint64_t seed_;
  std::vector<float> send_, recv_;
  Arrays arrays_{};
  std::unique_ptr<PlainMemory> memory_;
  std::shared_ptr<Execution> execution_;
};

inline void Rank::compute() {
  const std::unique_lock lock(steps, std::try_to_lock);
  if (!lock) return;
  for (const Flight* const flight : asking) flight->compute();
}

}  // namespace checked
