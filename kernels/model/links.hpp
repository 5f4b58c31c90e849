// The links between hosts: messages that are in one port share its rate evenly, at every moment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "model/events.hpp"
#include "model/simulator.hpp"

namespace hybridcomp::model {

class Links {
 public:
  struct Message {
    double ends;  // bytes that must have passed of each message of its route
    std::int32_t send, receive;
    bool operator>(const Message& other) const { return ends > other.ends; }
  };

  // Push events of the kind kFlowed at the ends of messages.
  Links(std::vector<Port>* ports, Events* events)
      : ports_(*ports), events_(*events), states_(ports->size()) {}

  // Start a message of `bytes`, which leaves by one port and enters by another.
  void start(std::int32_t out, std::int32_t in, double bytes, std::int32_t send, std::int32_t receive);

  // Whether an event is at a message's end, not at the end expected before other messages came or went.
  bool valid(const Event& event) const { return routes_[event.subject].version == event.version; }

  // Remove and return the message that ends by a valid event.
  Message end(const Event& event);

  // Add the credit that idle ports have saved up since they were busy.
  void rest();

 private:
  // Messages on their way from one port to another: all of them have one rate, so that the one with the least
  // left ends first, however the rate changes.
  struct Route {
    std::priority_queue<Message, std::vector<Message>, std::greater<>> messages;
    std::int32_t out, in;
    double passed = 0;  // bytes of each message at `since`
    double since = 0;
    double rate = 0;  // bytes per second of each message
    std::uint32_t version = 0;
  };
  struct State {
    std::vector<std::int32_t> routes;
    std::size_t messages = 0;
    double idle_since = 0;
  };

  Route& route(std::int32_t out, std::int32_t in);
  void refill(std::size_t port);
  void share(std::int32_t out, std::int32_t in);
  void go_on(Route* route);

  std::vector<Port>& ports_;
  Events& events_;
  std::vector<State> states_;
  std::vector<Route> routes_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> numbers_;
};

}  // namespace hybridcomp::model
