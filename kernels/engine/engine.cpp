#include "engine/engine.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <system_error>

#include "codecs/messages/opening.hpp"
#include "engine/carried_operations.hpp"
#include "engine/waiting/backoff.hpp"
#include "engine/waiting/watchdog.hpp"

namespace hybridcomp::engine {
namespace {

// Waiting in the foreground: some looks at once, then at this pace.
constexpr int kSpins = 3;
constexpr Pace kPace{.yielding = 100e-6, .least = 30e-6, .most = 1e-3, .share = 1.0 / 8};
// In the background other threads compute meanwhile, so the pace is slower.
constexpr double kBackMin = 300e-6, kBackMax = 1e-3, kBackShare = 1.0 / 4;
// After the last operation has ended the thread looks for new ones so often, for so long: waking it costs the
// caller that starts an operation more than the operation does.
constexpr double kDoze = 1e-3, kDozing = 10e-3;

constexpr int kCancelLooks = 20;     // looks at a receive that MPI was asked to cancel
constexpr double kBellSleep = 5e-3;  // seconds of a sleep that only neighbours' bells end
constexpr double kAside = 0.1;       // seconds for which the thread leaves the work to waiting threads

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Engine::Engine(const Mpi& mpi) : carried(nullptr), mpi_(mpi) {}

Engine::Engine(CarriedOperations& operations, std::shared_ptr<SharedBlocks> others)
    : carried(&operations), mpi_{}, others_(std::move(others)) {}

Engine::~Engine() { stop(); }

void Engine::use_arena(const Arena& arena, std::size_t first) {
  const std::lock_guard lock(mutex_);
  blocks.use(arena, first);
  bell_.store(&Bell::of(arena));
}

// -- called by executions ----------------------------------------------------------------------------------

void Engine::send(Execution& execution, std::uint32_t step, Group& group, int peer, int tag,
                  const std::uint8_t* data, std::size_t bytes) {
  if (carried) return carried->send({&execution, step, peer, tag, data, bytes});
  if (peer == damage_.peer && bytes >= damage_.least) {
    damage_.peer = -1;
    damaged_.assign(data, data + bytes);
    damaged_[damage_.sealed ? std::min(sizeof(Header) + damage_.at, bytes - 1) : bytes / 2] ^= damage_.flip;
    Header h;
    std::memcpy(&h, damaged_.data(), std::min(sizeof(h), bytes));
    if (damage_.sealed && bytes >= sizeof(h) && h.payload <= bytes - sizeof(h)) {
      h.crc = crc_of(damaged_.data(), h.payload);
      std::memcpy(damaged_.data(), &h, sizeof(h));
    }
    data = damaged_.data();
  }
  const Requests::Owner owner{&execution, step};
  const int count = static_cast<int>(bytes);
  std::int32_t& contacts = group.contacts[static_cast<std::size_t>(peer)];
  if (contacts >= 0) {
    ++contacts;
    return contacts_.post({owner, data, count, peer, tag, group.comm, &contacts});
  }
  int code = 0;
  {
    const InsideMpi inside;
    code = mpi_.isend(data, count, mpi_.byte, peer, tag, group.comm, requests_.room());
  }
  if (code) return execution.refused(step, code);
  requests_.keep(owner);
}

void Engine::receive(Execution& execution, std::uint32_t step, Group& group, int peer, int tag,
                     std::uint8_t* data, std::size_t room) {
  if (carried) return carried->receive({&execution, step, peer, tag, nullptr, room});
  int code = 0;
  {
    const InsideMpi inside;
    code = mpi_.irecv(data, static_cast<int>(room), mpi_.byte, peer, tag, group.comm, requests_.room());
  }
  if (code) return execution.refused(step, code);
  requests_.keep({&execution, step, true});
}

void Engine::damage(const Damage& damage) {
  const std::lock_guard lock(mutex_);
  damage_ = damage;
}

std::uint8_t* Engine::take(std::size_t bytes) { return others_ ? others_->take(bytes) : blocks.take(bytes); }

void Engine::give(std::uint8_t* block) {
  if (others_)
    others_->give(block);
  else
    blocks.give(block);
}

void Engine::forget(Execution* execution) {
  if (carried) return carried->forget(execution);
  requests_.abandon(execution);
  contacts_.forget(execution);
  for (const auto& one : active_)
    if (one.get() == execution) abandoned_.push_back(one);
}

// -- progress ----------------------------------------------------------------------------------------------

void Engine::start(const std::shared_ptr<Execution>& execution, double seconds) {
  {
    const std::lock_guard lock(mutex_);
    const auto later = [](const auto& a, const auto& b) {
      return a->program().carriage.bytes < b->program().carriage.bytes;
    };
    active_.insert(std::upper_bound(active_.begin(), active_.end(), execution, later), execution);
    in_flight_.store(active_.size());
    collect();
    execution->start();
    const double began = now();
    quiet_since_.store(began);
    if (seconds > 0) moved_.store(began);  // else the caller waits: the thread need not look
    for (const double until = began + seconds; execution->ready() && now() < until;) execution->compute();
    retire();
  }
  // A Python thread that computes steps also looks for messages: see take.
  const bool python = execution->program().carriage.bounds.has_value();
  if (!execution->done() && !waiters_.load() && seconds > 0 && !python) wake();
}

// Wake the thread, so that it makes progress.
void Engine::wake() {
  if (dozes_.load()) return;
  const std::lock_guard lock(sleep_);
  if (!thread_.joinable() && !stopping_) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {  // no more threads: waiting callers make progress, and the next
                                          // start tries again
      return;
    }
  }
  wake_.notify_one();
}

// Look once at everything, and compute one step. Under the lock.
bool Engine::advance() {
  bool moved = look();
  for (std::size_t i = 0; i < active_.size(); ++i) {
    Execution& execution = *active_[i];
    if (execution.done()) continue;
    if (execution.compute()) {
      moved = true;
      break;
    }
  }
  if (moved) {
    retire();
    quiet_since_.store(now());
  }
  requested_.store(!requests_.empty() || !contacts_.idle());
  return moved;
}

bool Engine::look() {
  bool moved = false;
  if (!contacts_.idle()) {
    for (const Contacts::Job& job : contacts_.take()) {
      moved = true;
      if (job.code) {
        static_cast<Execution*>(job.owner.execution)->refused(job.owner.step, job.code);
        continue;
      }
      if (--*job.open == 0) *job.open = -1;
      std::memcpy(requests_.room(), &job.request, sizeof(job.request));
      requests_.keep(job.owner);
    }
  }
  if (!requests_.empty()) {
    done_.clear();
    requests_.test(&done_);
    for (const Requests::Done& done : done_) {
      moved = true;
      auto* const execution = static_cast<Execution*>(done.owner.execution);
      if (!execution->done()) execution->completed(done.owner.step, done);
    }
  }
  bool shares = false;
  const Group* last = nullptr;
  for (std::size_t i = 0; i < active_.size(); ++i) {
    Execution& execution = *active_[i];
    if (execution.done()) continue;
    Group& group = execution.group();
    shares = shares || !group.neighbours.empty();
    if (&group != last)
      for (Neighbour& neighbour : group.neighbours) moved |= drain(neighbour);
    last = &group;
    if (!execution.done()) moved |= execution.settle();
    if (!execution.done()) moved |= execution.retry();
  }
  shares_.store(shares);
  return moved;
}

bool Engine::drain(Neighbour& neighbour) {
  bool moved = false;
  for (Entry entry; neighbour.from.pop(&entry); moved = true) {
    const auto found = std::find_if(neighbour.posted.begin(), neighbour.posted.end(),
                                    [&](const auto& posted) { return posted.sequence == entry.sequence; });
    if (found == neighbour.posted.end()) {
      neighbour.early.push_back(entry);
      continue;
    }
    const Neighbour::Posted posted = *found;
    neighbour.posted.erase(found);
    posted.execution->received(posted.step, entry);
  }
  return moved;
}

bool Engine::compute_all() {
  const std::lock_guard lock(mutex_);
  bool computed = false;
  for (const auto& execution : active_)
    while (!execution->done() && execution->compute()) computed = true;
  retire();
  return computed;
}

void Engine::abandon_all() {
  const std::lock_guard lock(mutex_);
  for (const auto& execution : active_)
    if (!execution->done()) execution->abandon();
  retire();
}

// Let go of executions that have ended.
void Engine::retire() {
  for (const auto& execution : active_)
    if (execution->done() && execution->watched.load()) news_.store(true);
  std::erase_if(active_, [](const auto& execution) { return execution->done(); });
  in_flight_.store(active_.size());
}

Engine::Look Engine::try_look() {
  if (!mutex_.try_lock()) return Look::kBusy;
  const bool moved = advance();
  mutex_.unlock();
  return moved ? Look::kMoved : Look::kNothing;
}

bool Engine::poll() { return try_look() == Look::kMoved; }

bool Engine::rest(double pause, double longest, Nap* nap) {
  Bell* const bell = shares_.load() ? bell_.load() : nullptr;
  if (!bell) {
    if (nap)
      nap->sleep(pause, longest);
    else
      sleep_for(pause);
    return false;
  }
  Sleeper sleeper(*bell);
  const Look look = try_look();
  if (look == Look::kMoved) return true;
  // Another thread that looks now may have looked at a ring before an entry came into it: then no bell rings.
  sleeper.sleep(look == Look::kBusy || requested_.load() ? pause : std::min(kBellSleep, longest));
  return false;
}

bool Engine::wait(const Execution& execution, double seconds, double waited, bool for_python) {
  // The thread that computes one of Python's steps goes on with the next: others need not look for it.
  const auto over = [&] {
    return execution.done() || (for_python && (news_.load() || (asked_.load() && !taken_.load())));
  };
  const auto told = [&] {
    if (for_python) news_.store(false);  // Python looks at all operations now
    return execution.done();
  };
  if (over()) return told();
  waiters_.fetch_add(1);
  Nap nap;
  int looks = 0;
  double since = 0, until = 0;
  while (!over()) {
    const bool moved = poll();
    nap.looked(moved);
    if (moved) {
      looks = 0;
      continue;
    }
    if (over()) break;
    if (++looks <= kSpins) {
      relax();
      continue;
    }
    const double time = now();
    if (!until) {
      until = time + seconds;
      since = std::max(time - waited, quiet_since_.load());
    } else if (looks == kSpins + 1) {
      since = time;
    }
    if (time >= until) break;
    const double quiet = time - since;
    if (quiet < kPace.yielding) {
      sched_yield();
      continue;
    }
    if (rest(std::min(kPace.pause(quiet), until - time), until - time, &nap)) looks = 0;
  }
  const bool back = !execution.done() && over();  // Python does its steps, and comes back
  if (waiters_.fetch_sub(1) == 1 && in_flight_.load() && !back) wake();
  return told();
}

void Engine::abandon(Execution& execution) {
  const std::lock_guard lock(mutex_);
  if (execution.done()) return;
  execution.abandon();
  retire();
}

bool Engine::cancel(Execution& execution) {
  const std::lock_guard lock(mutex_);
  if (!execution.done()) {
    requests_.cancel(&execution);
    // MPI soon tells that the receive is cancelled, unless a message is on its way.
    for (int i = 0; i < kCancelLooks && !execution.done(); ++i) {
      look();
      while (execution.compute()) {
      }
    }
    retire();
  }
  return execution.cancelled();
}

std::vector<Unfinished> Engine::unfinished(const Execution& execution) {
  const std::lock_guard lock(mutex_);
  return execution.unfinished();
}

// Body of the thread that makes progress while no caller waits.
void Engine::run() {
  while (true) {
    {
      std::unique_lock lock(sleep_);
      const auto wanted = [this] { return stopping_ || (in_flight_.load() && !waiters_.load()); };
      if (!wanted() && now() - moved_.load() < kDozing) {
        dozes_.store(true);
        wake_.wait_for(lock, std::chrono::duration<double>(kDoze), [this] { return stopping_; });
        dozes_.store(false);
        if (!stopping_ && !wanted()) continue;
      } else if (!in_flight_.load()) {
        wake_.wait(lock, wanted);
      } else if (waiters_.load()) {
        wake_.wait_for(lock, std::chrono::duration<double>(kAside), wanted);
      }
      if (stopping_) return;
    }
    bool moved = poll();
    if (!moved && !news_.load()) {
      const double pause = std::clamp((now() - moved_.load()) * kBackShare, kBackMin, kBackMax);
      moved = rest(pause, pause, nullptr);
    }
    news_.store(false);
    if (moved) moved_.store(now());
  }
}

void Engine::stop() {
  {
    const std::lock_guard lock(sleep_);
    stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace hybridcomp::engine
