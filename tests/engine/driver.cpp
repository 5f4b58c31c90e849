// The compiled engine without Python and MPI, for ThreadSanitizer and AddressSanitizer: checked.sh builds and
// runs this.
//
//   driver FOLDER ROUNDS [SEED [PART]]    FOLDER: schedules by dump.py; PART: words of what is to run
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "engine/waiting/arrivals.hpp"
#include "hostile.hpp"
#include "messages.hpp"

namespace checked {
namespace {

using Cases = std::vector<const Case*>;
using Results = std::vector<std::vector<float>>;  // results of each rank

void same(const Results& results, const std::string& what) {
  for (const auto& result : results)
    expect(result.size() == results[0].size() &&
               !std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)),
           what + ": ranks have different bits");
}

// A write past the end of some buffer into a free block's lease makes no readers for its next owner.
void stray_write() {
  alignas(kLine) static std::uint8_t memory[1 << 14];
  Blocks blocks;
  blocks.use({memory, sizeof(memory)}, 2 * kLine);
  std::uint8_t* const block = blocks.take(4096);
  blocks.give(block);
  lease_of(block).store(0x3f800000);
  expect(blocks.take(4096) == block && !lease_of(block).load(), "a free block has readers");
}

double slept(Nap& nap, double pause, double longest) {
  const double began = now();
  nap.sleep(pause, longest);
  return now() - began;
}

// A write to a pipe ends the sleep of a thread on the event queue that watches it.
void woken() {
  int pipes[2];
  const int queue = epoll_create1(0);
  epoll_event event{.events = EPOLLIN, .data = {}};
  expect(queue >= 0 && !pipe(pipes) && !epoll_ctl(queue, EPOLL_CTL_ADD, pipes[0], &event), "no event queue");
  Arrivals none({}), arrivals({queue});
  Nap plain(-1, none), nap(-1, arrivals), other(pipes[0], none);
  expect(slept(plain, 0.02, 60) < 10, "a sleep that nothing can end is longer than a pause");
  for (int i = 0; i < 3; ++i) {
    std::thread writer([&] {
      sleep_for(0.02);
      expect(write(pipes[1], "x", 1) == 1, "nothing was written");
    });
    expect(slept(nap, 20, 60) < 10, "nothing has ended a sleep");
    writer.join();
    nap.looked(i < 2);
    char byte;
    if (i < 2) expect(read(pipes[0], &byte, 1) == 1, "nothing was read");
  }
  // The last sleep was ended in vain, and something is there still: the thread sleeps once even so.
  expect(slept(nap, 0.05, 60) >= 0.05, "there is a look for every packet");
  nap.looked(false);
  expect(slept(nap, 20, 60) < 10, "what has come does not end a sleep");
  nap.looked(true);
  expect(slept(other, 20, 60) < 10, "the other descriptor does not end a sleep");
  char byte;
  expect(read(pipes[0], &byte, 1) == 1, "nothing was read");
  // A nap is patient until a look finds something that no event told of; then not.
  expect(slept(nap, 0.2, 60) >= 0.8, "whom something would wake is not patient");
  nap.looked(true);
  expect(slept(nap, 0.2, 60) < 0.8, "who was late is patient still");
  for (const int descriptor : {pipes[0], pipes[1], queue}) close(descriptor);
}

// Run one operation of all ranks, from a thread each.
void once(World& world, const Case& what, const World::Groups& groups, std::uint64_t seed) {
  Results results(groups.size());
  world.on_all([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const Flight flight(world, what, rank, groups[at], seed, (seed + at) % 2 ? 100e-6 : 0);
    flight.wait();
    flight.check();
    results[at] = flight.result();
  });
  same(results, what.name);
}

// Run several threads of each rank, each with a communicator of its own and a random program of operations,
// alike on all ranks: some are waited for at once, some later and in another order on each rank, some are
// left to the engine's own thread.
void overlap(World& world, const Cases& cases, std::uint64_t seed, int steps) {
  constexpr std::size_t kThreads = 3;
  std::vector<World::Groups> groups;
  for (std::size_t t = 0; t < kThreads; ++t) groups.push_back(world.join());
  std::vector<Results> results(kThreads, Results(groups[0].size()));
  const auto program = [&](int rank, std::size_t t) {
    const auto at = static_cast<std::size_t>(rank);
    std::mt19937_64 shared(seed + t), own(seed * 7919 + t * 31 + at);
    std::vector<std::unique_ptr<Flight>> flights;
    std::vector<Flight*> open;
    for (int step = 0; step < steps; ++step) {
      const Case& what = *cases[shared() % cases.size()];
      const bool blocking = shared() % 2;
      flights.push_back(
          std::make_unique<Flight>(world, what, rank, groups[t][at], shared(), blocking ? 0 : 100e-6));
      Flight& flight = *flights.back();
      if (blocking) {
        flight.wait();
        continue;
      }
      flight->watched.store(true);
      flight.unfinished();
      open.push_back(&flight);
      while (!open.empty() && own() % 5 < 2) {
        const auto which = open.begin() + static_cast<std::ptrdiff_t>(own() % open.size());
        (*which)->wait();
        open.erase(which);
      }
    }
    for (const Flight* const flight : open) flight->look_on();
    for (const auto& flight : flights) {
      flight->check();
      results[t][at].insert(results[t][at].end(), flight->result().begin(), flight->result().end());
    }
  };
  world.on_all([&](int rank) {
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t) threads.emplace_back(program, rank, t);
    for (std::thread& thread : threads) thread.join();
  });
  for (const Results& of : results) same(of, "overlapping operations");
}

constexpr int kLate = 60;  // operations: more messages than a ring holds

// The last rank begins when the others have begun all: their messages to it fill its rings.
void late(World& world, const Case& what, std::uint64_t seed, int operations) {
  const World::Groups groups = world.join();
  std::vector<Results> results(static_cast<std::size_t>(operations), Results(groups.size()));
  std::atomic<int> begun = 0;
  world.on_all([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    for (; rank == world.size() - 1 && begun.load() < rank; std::this_thread::yield());
    std::vector<std::unique_ptr<Flight>> flights;
    for (int i = 0; i < operations; ++i)
      flights.push_back(std::make_unique<Flight>(world, what, rank, groups[at],
                                                 seed + static_cast<std::uint64_t>(i), 100e-6));
    begun.fetch_add(1);
    for (std::size_t i = flights.size(); i-- > 0;) {
      flights[i]->wait();
      flights[i]->check();
      results[i][at] = flights[i]->result();
    }
  });
  for (const Results& of : results) same(of, what.name);
}

// Run an operation that a rank gives up or that fails there, and then on the others, which are told of it
// while a thread of theirs waits. Returns the failures.
std::vector<Failure> broken(World& world, const Case& what, const World::Groups& groups, std::uint64_t seed,
                            bool given_up) {
  std::vector<Failure> failures(groups.size());
  std::atomic<bool> told = false;
  world.failed = true;
  world.on_all([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    // MPI may use its arrays for as long as the process runs.
    const Flight& flight = *new Flight(world, what, rank, groups[at], seed, seed % 2 ? 100e-6 : 0);
    std::thread waiting([&] { flight.wait(); });
    if (given_up && rank == static_cast<int>(seed % groups.size())) {
      std::this_thread::sleep_for(std::chrono::microseconds(seed % 400));
      told.store(true);
    }
    for (; !flight->done() && !told.load(); std::this_thread::yield()) flight.unfinished();
    if (!flight->done()) flight.abandon();
    waiting.join();
    const Fault fault = flight->failure().fault;
    if (fault == Fault::kNone) {
      flight.check();
    } else if (fault != Fault::kGivenUp) {
      failures[at] = flight->failure();
      told.store(true);
    }
  });
  return failures;
}

void damaged(World& world, const Case& what, fake::Damage how, std::uint64_t seed, int* happened) {
  const World::Groups groups = world.join();
  if (seed % 2) once(world, what, groups, seed);  // so that no first messages are met
  fake::Network::get().damage(World::last_group, seed / 2 % 8, how);
  const std::vector<Failure> failures = broken(world, what, groups, seed, false);
  const std::string name = what.name + ", damage " + std::to_string(how);
  const bool met = fake::Network::get().damaged();
  const bool truncated = how == fake::kTooLong, refused = how == fake::kRefused || how == fake::kUnread;
  const Fault wanted = truncated || refused ? Fault::kMpi : what.plain ? Fault::kLength : Fault::kMessage;
  const bool sizes = what.regions(0) > 0;  // encoded even where elements are not
  int failed = 0;
  for (const Failure& failure : failures) {
    if (failure.fault == Fault::kNone) continue;
    ++failed;
    // A slightly longer message is past the room of its receive, or not.
    if (how == fake::kLonger && failure.fault == Fault::kMpi && failure.code == fake::kTruncated) continue;
    if (sizes && what.plain && failure.fault == Fault::kMessage) continue;
    expect(failure.fault == wanted, name + ": fault " + std::to_string(static_cast<int>(failure.fault)));
    const int code = truncated ? fake::kTruncated : refused ? fake::kBroken : 0;
    expect(failure.code == code, name + ": code " + std::to_string(failure.code));
  }
  // Bytes behind a whole encoded message are not read.
  expect(failed == met || (how == fake::kLonger && (!what.plain || sizes)),
         name + ": " + std::to_string(failed) + " ranks failed");
  *happened += met;
  once(world, what, world.join(), seed + 1);  // a failed operation does no harm to others
}

// Operations go by MPI alone until, while some run, the ranks of a host get arenas.
void arenas_come(World& world, const Cases& cases, std::uint64_t seed) {
  const World::Groups before = world.join(false);
  std::atomic<bool> joined = false;
  std::thread running([&] {
    for (std::uint64_t i = 0; i < 5 || !joined.load(); ++i) {
      world.on_all([&](int rank) {
        const Flight flight(world, *cases[i % cases.size()], rank, before[static_cast<std::size_t>(rank)],
                            seed + i, 100e-6);
        i % 2 ? flight.look_on() : flight.wait();
        flight.check();
      });
    }
  });
  const World::Groups after = world.join();
  joined.store(true);
  for (const Case* const what : cases) once(world, *what, after, seed);
  running.join();
}

class Told {  // prints how long a test took
 public:
  explicit Told(const char* what) : what_(what) {}
  ~Told() { std::printf("%s: %d, %.1f s\n", what_, count, now() - began_); }
  int count = 0;

 private:
  const char* what_;
  double began_ = now();
};

void all(const std::string& folder, int rounds, std::uint64_t seed, const std::string& part) {
  const auto wanted = [&](const char* what) { return std::string(what).find(part) != std::string::npos; };
  fake::Network::get().seed(seed);
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".case") files.push_back(entry.path().filename());
  std::sort(files.begin(), files.end());
  expect(!files.empty(), folder + " has no cases");
  std::vector<std::unique_ptr<Case>> cases;
  std::map<std::vector<int>, Cases> by_hosts;
  for (const std::string& file : files)
    for (const bool otherwise : {false, true}) {
      if (otherwise && file.find("plain-mean") != std::string::npos) continue;  // integers have no mean
      auto one = std::make_unique<Case>(folder, file, otherwise);
      by_hosts[one->hosts].push_back(one.get());
      cases.push_back(std::move(one));
    }
  if (const char* name = "leases that a stray write has changed"; wanted(name)) {
    Told told(name);
    stray_write();
    ++told.count;
  }
  if (const char* name = "sleeps that a message ends"; wanted(name)) {
    Told told(name);
    woken();
    ++told.count;
  }
  if (const char* name = "hostile programs, refused"; wanted(name)) {
    Told told(name);
    for (const auto& one : cases)
      for (int rank = 0; rank < std::min(2, one->ranks()); ++rank) {
        Hostile hostile(*one, rank);
        if (one->count < 100 && (rounds > 1 || one->ranks() == 2))
          told.count += hostile.all();  // the longer ones have the same steps, often
        hostile.random(5 * rounds, seed++);
      }
  }
  if (const char* name = "operations one by one"; wanted(name)) {
    Told told(name);
    for (const auto& [hosts, of] : by_hosts) {
      World world(hosts, seed % 2);
      const World::Groups groups = world.join();
      for (const Case* const one : of) {
        for (int i = 0; i < rounds; ++i) once(world, *one, groups, seed++);
        told.count += rounds;
      }
    }
  }
  if (const char* name = "overlapping operations of three threads a rank"; wanted(name)) {
    Told told(name);
    for (const auto& [hosts, of] : by_hosts) {
      World world(hosts, seed % 2);
      const int steps = 20 * rounds;
      overlap(world, of, seed++, steps);
      told.count += 3 * steps;
    }
  }
  if (const char* name = "arenas that come later"; wanted(name)) {
    Told told(name);
    for (const auto& [hosts, of] : by_hosts) {
      World world(hosts, seed % 2);
      arenas_come(world, of, seed++);
      ++told.count;
    }
  }
  if (const char* name = "single messages"; wanted(name)) {
    Told told(name);
    for (int i = 0; i < 4 * rounds; ++i) {
      World world({0, 1}, seed % 2);
      exchange(world, seed++, 40);
      told.count += 40 * 6;
    }
  }
  if (const char* name = "failures"; wanted(name)) {
    Told told(name);
    int at = 0;
    for (const auto& one : cases) {
      if (one->ranks() == 1 || (rounds == 1 && ++at % 5)) continue;
      World world(one->hosts, seed % 2);
      for (const auto how :
           {fake::kTurnedBit, fake::kShorter, fake::kLonger, fake::kTooLong, fake::kRefused, fake::kUnread})
        for (int i = 0; i < (how == fake::kLonger ? 2 : 1); ++i)
          if (how != fake::kTurnedBit || !one->plain) damaged(world, *one, how, seed++, &told.count);
    }
    expect(told.count > 0, "nothing was damaged");
  }
  if (const char* name = "operations given up"; wanted(name)) {
    Told told(name);
    int at = 0;
    for (const auto& one : cases) {
      if (rounds == 1 && ++at % 3) continue;
      World world(one->hosts, seed % 2);
      for (const Failure& failure : broken(world, *one, world.join(), seed++, true))
        expect(failure.fault == Fault::kNone, one->name + ": it was given up, and failed");
      once(world, *one, world.join(), seed++);
      ++told.count;
    }
  }
  if (const char* name = "operations whose last rank is late"; wanted(name)) {
    Told told(name);
    int at = 0;
    for (const auto& [hosts, of] : by_hosts) {
      World world(hosts, seed % 2);
      for (const Case* const what : of) {
        if (what->count < 5000 || hosts.size() < 2 || hosts[0] != hosts.back()) continue;
        if (rounds == 1 && (what->plain || what->feedback || ++at % 3)) continue;
        late(world, *what, seed, kLate);
        seed += kLate;
        told.count += kLate;
      }
    }
  }
}

}  // namespace
}  // namespace checked

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: driver FOLDER ROUNDS [SEED [PART]]\n");
    return 2;
  }
  setvbuf(stdout, nullptr, _IOLBF, 0);
  checked::all(argv[1], std::atoi(argv[2]), argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1,
               argc > 4 ? argv[4] : "");
  return 0;
}
