#include "model/simulator.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <queue>

#include "model/events.hpp"
#include "model/links.hpp"

namespace hybridcomp::model {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Activities of a rank that are no steps.
constexpr std::int32_t kNothing = -1, kStarts = -2, kLooks = -3;

struct Rank {
  std::priority_queue<std::int32_t, std::vector<std::int32_t>, std::greater<>> ready;  // the first goes first
  std::vector<std::int32_t> come;  // receives whose messages are here but not noticed yet
  std::int32_t running = kStarts;  // step, or another activity on a core
  std::size_t left = 0;            // steps not ended
  bool queued = false;             // whether it waits for a core
  bool asleep = false;
  double since = 0;  // time since which it has had its core
  double idle = 0;   // time since which it has had nothing to do
};

struct Line {
  std::vector<std::int32_t> sends, receives;
  std::size_t next_send = 0, next_receive = 0;    // not yet begun
  std::size_t sent = 0, posted = 0, matched = 0;  // how many of each
};

class Simulation {
 public:
  Simulation(const Steps& steps, Machine* machine)
      : s_(steps),
        m_(*machine),
        links_(&machine->ports, &events_),
        ranks_(machine->pool.size()),
        free_(machine->cores),
        waiting_(machine->cores.size()),
        missing_(steps.count),
        first_(steps.count + 1, 0),
        arrival_(steps.count, kNever),
        posted_(steps.count, false) {
    times_.begins.assign(steps.count, 0);
    times_.ends.assign(steps.count, kNever);
    times_.busy.assign(ranks_.size(), 0);
    prepare();
  }

  Times run(std::size_t* stuck) {
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].queued = true;
      waiting_[m_.pool[r]].push_back(static_cast<std::int32_t>(r));
    }
    for (std::size_t pool = 0; pool < free_.size(); ++pool) dispatch(static_cast<std::int32_t>(pool));
    while (!events_.empty()) handle(events_.pop());
    links_.rest();
    *stuck = s_.count - ended_;
    return std::move(times_);
  }

 private:
  StepKind kind(std::int32_t g) const { return static_cast<StepKind>(s_.kind[g]); }

  void prepare() {
    std::int32_t lines = 0;
    for (std::size_t g = 0; g < s_.count; ++g) {
      missing_[g] = s_.edges[g + 1] - s_.edges[g];
      ++ranks_[s_.rank[g]].left;
      for (std::int32_t e = s_.edges[g]; e < s_.edges[g + 1]; ++e) ++first_[s_.after[e] + 1];
      if (kind(static_cast<std::int32_t>(g)) != StepKind::kCompute) lines = std::max(lines, s_.line[g] + 1);
    }
    for (std::size_t g = 0; g < s_.count; ++g) first_[g + 1] += first_[g];
    following_.resize(first_[s_.count]);
    std::vector<std::int32_t> at(first_.begin(), first_.end() - 1);
    lines_.resize(lines);
    range_.resize(ranks_.size() + 1);
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      range_[r + 1] = range_[r] + static_cast<std::int32_t>(ranks_[r].left);
    for (std::size_t i = 0; i < s_.count; ++i) {
      const auto g = static_cast<std::int32_t>(i);
      for (std::int32_t e = s_.edges[g]; e < s_.edges[g + 1]; ++e) following_[at[s_.after[e]]++] = g;
      if (kind(g) == StepKind::kSend) lines_[s_.line[g]].sends.push_back(g);
      if (kind(g) == StepKind::kReceive) lines_[s_.line[g]].receives.push_back(g);
    }
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case EventKind::kWorked:
        worked(event.subject);
        break;
      case EventKind::kPassed:
        left(inside_[event.subject]);
        break;
      case EventKind::kFlowed:
        if (links_.valid(event)) left(links_.end(event));
        break;
      case EventKind::kArrived:
        arrived(event.subject);
        break;
      case EventKind::kWoken:
        woken(event.subject);
        break;
    }
  }

  // Handle a step whose predecessors have all ended.
  void ready(std::int32_t g) {
    if (kind(g) == StepKind::kCompute) {
      task(g);
      return;
    }
    Line& line = lines_[s_.line[g]];
    if (kind(g) == StepKind::kSend) {
      while (line.next_send < line.sends.size() && !missing_[line.sends[line.next_send]])
        task(line.sends[line.next_send++]);
      return;
    }
    while (line.next_receive < line.receives.size() && !missing_[line.receives[line.next_receive]]) {
      const std::int32_t receive = line.receives[line.next_receive++];
      posted_[receive] = true;
      times_.begins[receive] = std::max(times_.begins[receive], events_.now());
      ++line.posted;
      if (arrival_[receive] <= events_.now()) {
        events_.push(events_.now(), EventKind::kArrived, receive);
      }
    }
    match(line);
  }

  // Give a rank a step to do. The rank is on a core, or gets one: its steps become ready only through its own
  // steps, or through messages that it has noticed.
  void task(std::int32_t g) { ranks_[s_.rank[g]].ready.push(g); }

  // Continue a rank on its core: with the first step that is ready, else with looking for messages.
  void work(std::int32_t r) {
    Rank& rank = ranks_[r];
    if (rank.running == kStarts) {
      times_.busy[r] += m_.start;
      events_.push(events_.now() + m_.start, EventKind::kWorked, r);
      return;
    }
    if (rank.ready.empty()) {
      rank.running = kLooks;
      times_.busy[r] += m_.look;
      events_.push(events_.now() + m_.look, EventKind::kWorked, r);
      return;
    }
    const std::int32_t g = rank.ready.top();
    rank.ready.pop();
    rank.running = g;
    if (kind(g) == StepKind::kCompute) times_.begins[g] = events_.now();
    times_.busy[r] += s_.work[g];
    events_.push(events_.now() + s_.work[g], EventKind::kWorked, r);
  }

  void worked(std::int32_t r) {
    Rank& rank = ranks_[r];
    const std::int32_t g = rank.running;
    const bool looked = g == kLooks;
    rank.running = kNothing;
    if (g == kStarts) {
      begin(r);
    } else if (!looked) {
      if (kind(g) == StepKind::kSend) {
        Line& line = lines_[s_.line[g]];
        ++line.sent;
        match(line);
      } else {
        end(g);
      }
    }
    notice(r);
    const std::int32_t pool = m_.pool[r];
    if (!rank.ready.empty()) {
      rank.idle = events_.now();
      // The rank keeps its core unless another rank waits for one and its time is up.
      if (waiting_[pool].empty() || events_.now() - rank.since < m_.quantum)
        work(r);
      else
        yield(r);
      return;
    }
    if (!looked) rank.idle = events_.now();
    if (rank.left && m_.look > 0 && !(looked && events_.now() - rank.idle >= m_.patience)) {
      yield(r);
      return;
    }
    rank.asleep = true;
    ++free_[pool];
    dispatch(pool);
  }

  // Begin the steps of a rank that wait for no other.
  void begin(std::int32_t r) {
    for (std::int32_t g = range_[r]; g < range_[r + 1]; ++g)
      if (s_.edges[g + 1] == s_.edges[g]) ready(g);
  }

  // Give the core to the next rank that waits for one, and queue for another.
  void yield(std::int32_t r) {
    const std::int32_t pool = m_.pool[r];
    ++free_[pool];
    ranks_[r].queued = true;
    waiting_[pool].push_back(r);
    dispatch(pool);
  }

  void notice(std::int32_t r) {
    Rank& rank = ranks_[r];
    for (const std::int32_t receive : rank.come) rank.ready.push(receive);
    rank.come.clear();
  }

  void woken(std::int32_t r) {
    Rank& rank = ranks_[r];
    if (!rank.asleep || rank.queued) return;
    rank.asleep = false;
    rank.idle = events_.now();
    notice(r);
    rank.queued = true;
    waiting_[m_.pool[r]].push_back(r);
    dispatch(m_.pool[r]);
  }

  void dispatch(std::int32_t pool) {
    while (free_[pool] > 0 && !waiting_[pool].empty()) {
      const std::int32_t r = waiting_[pool].front();
      waiting_[pool].pop_front();
      ranks_[r].queued = false;
      --free_[pool];
      ranks_[r].since = events_.now();
      work(r);
    }
  }

  // Start the messages of a line that can go now.
  void match(Line& line) {
    while (line.matched < line.sent && line.matched < line.receives.size()) {
      const std::int32_t send = line.sends[line.matched], receive = line.receives[line.matched];
      if (line.matched >= line.posted && s_.bytes[send] > m_.eager) return;
      ++line.matched;
      depart(send, receive);
    }
  }

  void depart(std::int32_t send, std::int32_t receive) {
    times_.begins[send] = events_.now();
    times_.begins[receive] = std::max(times_.begins[receive], events_.now() + s_.latency[send]);
    const std::int32_t out = s_.out[send], in = s_.in[send];
    if (out < 0 || in < 0) {
      inside_.push_back({0, send, receive});
      events_.push(events_.now() + s_.bytes[send] / m_.inside, EventKind::kPassed,
                   static_cast<std::int32_t>(inside_.size()) - 1);
      return;
    }
    links_.start(out, in, s_.bytes[send], send, receive);
  }

  // Handle a message that has left its sender.
  void left(const Links::Message& message) {
    events_.push(events_.now() + s_.latency[message.send], EventKind::kArrived, message.receive);
    end(message.send);
    if (!ranks_[s_.rank[message.send]].ready.empty()) wake(s_.rank[message.send]);
  }

  // Handle a message that is at its receiver.
  void arrived(std::int32_t receive) {
    arrival_[receive] = std::min(arrival_[receive], events_.now());
    if (!posted_[receive]) return;
    const std::int32_t r = s_.rank[receive];
    ranks_[r].come.push_back(receive);
    wake(r);
  }

  // Wake a rank that sleeps, since something has come for it.
  void wake(std::int32_t r) {
    if (ranks_[r].asleep) events_.push(events_.now() + m_.wake, EventKind::kWoken, r);
  }

  void end(std::int32_t g) {
    times_.ends[g] = events_.now();
    ++ended_;
    --ranks_[s_.rank[g]].left;
    for (std::int32_t e = first_[g]; e < first_[g + 1]; ++e)
      if (!--missing_[following_[e]]) ready(following_[e]);
  }

  const Steps& s_;
  Machine& m_;
  Times times_;
  Events events_;
  Links links_;
  std::vector<Rank> ranks_;
  std::vector<std::int32_t> free_;                 // cores, by pool
  std::vector<std::deque<std::int32_t>> waiting_;  // ranks, by pool
  std::vector<std::int32_t> missing_, first_, following_;
  std::vector<std::int32_t> range_;  // by rank, the first of its steps
  std::vector<double> arrival_;      // by receive
  std::vector<bool> posted_;
  std::vector<Line> lines_;
  std::vector<Links::Message> inside_;  // messages inside hosts
  std::size_t ended_ = 0;
};

}  // namespace

Times simulate(const Steps& steps, Machine* machine, std::size_t* stuck) {
  return Simulation(steps, machine).run(stuck);
}

}  // namespace hybridcomp::model
