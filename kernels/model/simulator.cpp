#include "model/simulator.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <queue>
#include <utility>

namespace hybridcomp::model {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

enum class EventKind : std::uint8_t { kWorked, kPassed, kFlowed, kArrived, kWoken };

// What a rank does that is no step.
constexpr std::int32_t kNothing = -1, kStarts = -2, kLooks = -3;

struct Event {
  double time;
  std::uint64_t number;  // of events at one time the first made is the first to happen
  EventKind kind;
  std::int32_t subject;   // a rank, a route, a message inside a host, or a receive
  std::uint32_t version;  // of a route's next end; another one is out of date
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : number > other.number;
  }
};

// The messages that are on their way from one port to another: all of them have one rate, so that the one
// with the least left ends first, whatever happens to the rate.
struct Route {
  struct Flow {
    double ends;  // once so many bytes have passed of each flow of the route
    std::int32_t send, receive;
    bool operator>(const Flow& other) const { return ends > other.ends; }
  };
  std::priority_queue<Flow, std::vector<Flow>, std::greater<>> flows;
  std::int32_t out, in;
  double passed = 0;  // bytes of each flow at `since`
  double since = 0;
  double rate = 0;  // bytes per second of each flow
  std::uint32_t version = 0;
};

struct PortState {
  std::vector<std::int32_t> routes;
  std::size_t flows = 0;
  double idle_since = 0;
};

struct Rank {
  std::priority_queue<std::int32_t, std::vector<std::int32_t>, std::greater<>> ready;  // the first goes first
  std::vector<std::int32_t> come;  // receives whose messages are here, and that it has not noticed
  std::int32_t running = kStarts;  // step, or what else it does on a core
  std::size_t left = 0;            // steps
  bool queued = false;             // for a core
  bool asleep = false;
  double since = 0;  // that it has had its core
  double idle = 0;   // since when it has had nothing to do
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
        ranks_(machine->pool.size()),
        ports_(machine->ports.size()),
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
    while (!events_.empty()) {
      const Event event = events_.top();
      events_.pop();
      now_ = event.time;
      handle(event);
    }
    for (std::size_t p = 0; p < ports_.size(); ++p) refill(p);
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

  void push(double time, EventKind what, std::int32_t subject, std::uint32_t version = 0) {
    events_.push({time, number_++, what, subject, version});
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
        if (routes_[event.subject].version == event.version) flowed(event.subject);
        break;
      case EventKind::kArrived:
        arrived(event.subject);
        break;
      case EventKind::kWoken:
        woken(event.subject);
        break;
    }
  }

  // All that a step waits for has ended.
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
      times_.begins[receive] = std::max(times_.begins[receive], now_);
      ++line.posted;
      if (arrival_[receive] <= now_) {
        push(now_, EventKind::kArrived, receive);
      }
    }
    match(line);
  }

  // Give a rank something to do. It is on a core, or gets one: only its own steps make others of its steps
  // ready, or what it has noticed.
  void task(std::int32_t g) { ranks_[s_.rank[g]].ready.push(g); }

  // Go on on a core: with the first step that is ready, else with looking for messages.
  void work(std::int32_t r) {
    Rank& rank = ranks_[r];
    if (rank.running == kStarts) {
      times_.busy[r] += m_.start;
      push(now_ + m_.start, EventKind::kWorked, r);
      return;
    }
    if (rank.ready.empty()) {
      rank.running = kLooks;
      times_.busy[r] += m_.look;
      push(now_ + m_.look, EventKind::kWorked, r);
      return;
    }
    const std::int32_t g = rank.ready.top();
    rank.ready.pop();
    rank.running = g;
    if (kind(g) == StepKind::kCompute) times_.begins[g] = now_;
    times_.busy[r] += s_.work[g];
    push(now_ + s_.work[g], EventKind::kWorked, r);
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
      rank.idle = now_;
      // It keeps its core unless another rank waits for one and its time is up.
      if (waiting_[pool].empty() || now_ - rank.since < m_.quantum)
        work(r);
      else
        yield(r);
      return;
    }
    if (!looked) rank.idle = now_;
    if (rank.left == 0 || (looked && now_ - rank.idle >= m_.patience)) {
      rank.asleep = true;
      ++free_[pool];
      dispatch(pool);
    } else if (m_.look > 0) {
      yield(r);
    } else {
      rank.asleep = true;
      ++free_[pool];
      dispatch(pool);
    }
  }

  // The steps of a rank that wait for nothing.
  void begin(std::int32_t r) {
    for (std::int32_t g = range_[r]; g < range_[r + 1]; ++g)
      if (s_.edges[g + 1] == s_.edges[g]) ready(g);
  }

  // Give the core to the next one that waits for one, and wait for another.
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
    rank.idle = now_;
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
      ranks_[r].since = now_;
      work(r);
    }
  }

  // Let the messages of a line go whose time has come.
  void match(Line& line) {
    while (line.matched < line.sent && line.matched < line.receives.size()) {
      const std::int32_t send = line.sends[line.matched], receive = line.receives[line.matched];
      if (line.matched >= line.posted && s_.bytes[send] > m_.eager) return;
      ++line.matched;
      depart(send, receive);
    }
  }

  void depart(std::int32_t send, std::int32_t receive) {
    times_.begins[send] = now_;
    times_.begins[receive] = std::max(times_.begins[receive], now_ + s_.latency[send]);
    const std::int32_t out = s_.out[send], in = s_.in[send];
    if (out < 0 || in < 0) {
      inside_.push_back({0, send, receive});
      push(now_ + s_.bytes[send] / m_.inside, EventKind::kPassed,
           static_cast<std::int32_t>(inside_.size()) - 1);
      return;
    }
    double credit = s_.bytes[send];
    for (const std::int32_t port : {out, in}) {
      if (!ports_[port].flows) refill(port);
      credit = std::min(credit, m_.ports[port].credit);
    }
    for (const std::int32_t port : {out, in}) m_.ports[port].credit -= credit;
    Route& route = routes_[route_of(out, in)];
    route.passed += route.rate * (now_ - route.since);
    route.since = now_;
    route.flows.push({route.passed + s_.bytes[send] - credit, send, receive});
    ++ports_[out].flows;
    ++ports_[in].flows;
    route.rate = 0;  // whatever it was, it has another one, or another first flow
    share(out, in);
  }

  std::int32_t route_of(std::int32_t out, std::int32_t in) {
    const auto [at, fresh] = route_numbers_.try_emplace({out, in}, static_cast<std::int32_t>(routes_.size()));
    if (fresh) {
      routes_.emplace_back();
      routes_.back().out = out;
      routes_.back().in = in;
      ports_[out].routes.push_back(at->second);
      ports_[in].routes.push_back(at->second);
    }
    return at->second;
  }

  void refill(std::size_t port) {
    Port& p = m_.ports[port];
    if (!ports_[port].flows && p.burst > 0)
      p.credit = std::min(p.burst, p.credit + p.rate * (now_ - ports_[port].idle_since));
    ports_[port].idle_since = now_;
  }

  // The flows of two ports have changed: find the rates of their routes, and when their first flows end.
  void share(std::int32_t out, std::int32_t in) {
    for (const std::int32_t port : {out, in}) {
      for (const std::int32_t r : ports_[port].routes) {
        Route& route = routes_[r];
        if (route.flows.empty()) continue;
        const double rate = std::min(m_.ports[route.out].rate / static_cast<double>(ports_[route.out].flows),
                                     m_.ports[route.in].rate / static_cast<double>(ports_[route.in].flows));
        if (rate == route.rate) continue;
        route.passed += route.rate * (now_ - route.since);
        route.since = now_;
        route.rate = rate;
        const double left = std::max(0.0, route.flows.top().ends - route.passed);
        push(now_ + left / rate, EventKind::kFlowed, r, ++route.version);
      }
    }
  }

  // The first flow of a route has ended.
  void flowed(std::int32_t r) {
    Route& route = routes_[r];
    const Route::Flow flow = route.flows.top();
    route.flows.pop();
    route.passed = flow.ends;
    route.since = now_;
    route.rate = 0;
    ++route.version;
    for (const std::int32_t port : {route.out, route.in})
      if (!--ports_[port].flows) ports_[port].idle_since = now_;
    share(route.out, route.in);
    left(flow);
  }

  // A message has left its sender.
  void left(const Route::Flow& flow) {
    push(now_ + s_.latency[flow.send], EventKind::kArrived, flow.receive);
    end(flow.send);
    if (!ranks_[s_.rank[flow.send]].ready.empty()) wake(s_.rank[flow.send]);
  }

  // A message is at its receiver.
  void arrived(std::int32_t receive) {
    arrival_[receive] = std::min(arrival_[receive], now_);
    if (!posted_[receive]) return;
    const std::int32_t r = s_.rank[receive];
    ranks_[r].come.push_back(receive);
    wake(r);
  }

  // Something has come for a rank: one that sleeps is woken.
  void wake(std::int32_t r) {
    if (ranks_[r].asleep) push(now_ + m_.wake, EventKind::kWoken, r);
  }

  void end(std::int32_t g) {
    times_.ends[g] = now_;
    ++ended_;
    --ranks_[s_.rank[g]].left;
    for (std::int32_t e = first_[g]; e < first_[g + 1]; ++e)
      if (!--missing_[following_[e]]) ready(following_[e]);
  }

  const Steps& s_;
  Machine& m_;
  Times times_;
  std::vector<Rank> ranks_;
  std::vector<PortState> ports_;
  std::vector<std::int32_t> free_;                 // cores, by pool
  std::vector<std::deque<std::int32_t>> waiting_;  // ranks, by pool
  std::vector<std::int32_t> missing_, first_, following_;
  std::vector<std::int32_t> range_;  // by rank, the first of its steps
  std::vector<double> arrival_;      // of receives
  std::vector<bool> posted_;
  std::vector<Line> lines_;
  std::vector<Route> routes_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> route_numbers_;
  std::vector<Route::Flow> inside_;  // messages inside hosts
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::uint64_t number_ = 0;
  std::size_t ended_ = 0;
  double now_ = 0;
};

}  // namespace

Times simulate(const Steps& steps, Machine* machine, std::size_t* stuck) {
  return Simulation(steps, machine).run(stuck);
}

}  // namespace hybridcomp::model
