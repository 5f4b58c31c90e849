// The events of a simulation, in the order in which they happen.
#pragma once

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

namespace hybridcomp::model {

enum class EventKind : std::uint8_t { kWorked, kPassed, kFlowed, kArrived, kWoken };

struct Event {
  double time;
  std::uint64_t number;  // order in which events were made; those at one time happen in it
  EventKind kind;
  std::int32_t subject;   // a rank, a route, a message inside a host, or a receive
  std::uint32_t version;  // version of a route's next end; events of another are out of date
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : number > other.number;
  }
};

class Events {
 public:
  bool empty() const { return queue_.empty(); }
  double now() const { return now_; }  // time of the last event

  void push(double time, EventKind what, std::int32_t subject, std::uint32_t version = 0) {
    queue_.push({time, number_++, what, subject, version});
  }

  Event pop() {
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.time;
    return event;
  }

 private:
  std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
  std::uint64_t number_ = 0;
  double now_ = 0;
};

}  // namespace hybridcomp::model
