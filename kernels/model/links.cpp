#include "model/links.hpp"

#include <algorithm>

namespace hybridcomp::model {

void Links::start(std::int32_t out, std::int32_t in, double bytes, std::int32_t send, std::int32_t receive) {
  double credit = bytes;
  for (const std::int32_t port : {out, in}) {
    if (!states_[port].messages) refill(port);
    credit = std::min(credit, ports_[port].credit);
  }
  for (const std::int32_t port : {out, in}) {
    ports_[port].credit -= credit;
    ++states_[port].messages;
  }
  Route& on = route(out, in);
  go_on(&on);
  on.messages.push({on.passed + bytes - credit, send, receive});
  on.rate = 0;  // forces share() to push an event: the rate or the first message is new
  share(out, in);
}

Links::Message Links::end(const Event& event) {
  Route& on = routes_[event.subject];
  const Message message = on.messages.top();
  on.messages.pop();
  on.passed = message.ends;
  on.since = events_.now();
  on.rate = 0;
  ++on.version;
  for (const std::int32_t port : {on.out, on.in})
    if (!--states_[port].messages) states_[port].idle_since = events_.now();
  share(on.out, on.in);
  return message;
}

void Links::rest() {
  for (std::size_t port = 0; port < states_.size(); ++port) refill(port);
}

Links::Route& Links::route(std::int32_t out, std::int32_t in) {
  const auto [at, fresh] = numbers_.try_emplace({out, in}, static_cast<std::int32_t>(routes_.size()));
  if (fresh) {
    routes_.emplace_back();
    routes_.back().out = out;
    routes_.back().in = in;
    states_[out].routes.push_back(at->second);
    states_[in].routes.push_back(at->second);
  }
  return routes_[at->second];
}

void Links::refill(std::size_t port) {
  Port& p = ports_[port];
  if (!states_[port].messages && p.burst > 0)
    p.credit = std::min(p.burst, p.credit + p.rate * (events_.now() - states_[port].idle_since));
  states_[port].idle_since = events_.now();
}

// The messages of two ports have changed: find the rates of their routes, and when their first messages end.
void Links::share(std::int32_t out, std::int32_t in) {
  const auto part = [this](std::int32_t port) {
    return ports_[port].rate / static_cast<double>(states_[port].messages);
  };
  for (const std::int32_t port : {out, in}) {
    for (const std::int32_t r : states_[port].routes) {
      Route& on = routes_[r];
      if (on.messages.empty()) continue;
      const double rate = std::min(part(on.out), part(on.in));
      if (rate == on.rate) continue;
      go_on(&on);
      on.rate = rate;
      const double left = std::max(0.0, on.messages.top().ends - on.passed);
      events_.push(events_.now() + left / rate, EventKind::kFlowed, r, ++on.version);
    }
  }
}

// Bring the bytes that have passed of a route's messages up to now.
void Links::go_on(Route* route) {
  route->passed += route->rate * (events_.now() - route->since);
  route->since = events_.now();
}

}  // namespace hybridcomp::model
