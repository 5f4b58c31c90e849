#include "engine/execution.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>

#include "engine/engine.hpp"

namespace hybridcomp::engine {

Execution::Execution(Engine& engine, std::shared_ptr<Group> group, std::shared_ptr<const Program> program,
                     std::uint32_t first, const Envelope* envelope, const std::uint8_t* send,
                     std::uint8_t* recv, Memory* memory, bool traced)
    : engine_(engine),
      group_(std::move(group)),
      program_(std::move(program)),
      send_(send),
      recv_(recv),
      memory_(memory),
      sequence_(first),
      traced_(traced),
      states_(program_->steps.size(), kWaiting),
      posted_(program_->queues.size()),
      held_(program_->slots.size()),
      left_(program_->steps.size()) {
  if (envelope) envelope_ = *envelope;
  const std::size_t size = bytes_of(program_->carriage.dtype);
  const std::uint8_t* const received = recv_;
  const bool apart = send_ + program_->send_elements * size <= received ||
                     received + program_->recv_elements * size <= send_;
  unshared_ = group_->neighbours.empty();
  const bool in_place = !apart && unshared_ && send_ == received && program_->in_place;
  order_ = in_place ? &*program_->in_place : &program_->apart;
  lends_ = unshared_ && (apart || in_place);
  waits_ = order_->waits;
}

Execution::~Execution() = default;

std::uint8_t* Execution::address(BufferId buffer, std::size_t at) const {
  const std::size_t offset = at * bytes_of(program_->dtype_of(buffer));
  if (buffer == kScratch) return scratch_ + offset;
  return (buffer == kSendBuffer ? const_cast<std::uint8_t*>(send_) : recv_) + offset;
}

void Execution::start() {
  try {
    if (program_->scratch_bytes) scratch_ = engine_.take(program_->scratch_bytes);
  } catch (const std::bad_alloc&) {
    return fail(Fault::kMemory, 0, -1);
  }
  for (const std::uint32_t step : order_->first) {
    begin(step);
    if (done()) return;
  }
  if (!left_) finish();
}

// Begin a step whose predecessors have all ended.
void Execution::begin(std::uint32_t index) {
  const Step& step = program_->steps[index];
  if (left_out(step)) return skipped_.push_back(index);
  states_[index] = kReady;
  if (step.kind == kSend || step.kind == kRecv) return post_next(step.queue);
  ready_.push_back(index);
  std::push_heap(ready_.begin(), ready_.end(), std::greater<>());
}

// Post the steps of a queue that are ready, in the order of the schedule.
void Execution::post_next(std::uint32_t queue) {
  const Range range = program_->queues[queue];
  while (!done() && posted_[queue] < range.count) {
    const std::uint32_t index = program_->queue_steps[range.first + posted_[queue]];
    const bool skip = left_out(program_->steps[index]);
    if (!skip && states_[index] != kReady) return;
    ++posted_[queue];
    if (skip) continue;
    states_[index] = kPosted;
    program_->steps[index].kind == kSend ? post_send(index) : post_receive(index);
  }
}

void Execution::post_send(std::uint32_t index) {
  const Step& step = program_->steps[index];
  Held& held = held_[step.slot];
  tally_.wire_bytes += held.bytes;
  if (group_->leaves(peer(step))) tally_.between_bytes += held.bytes;
  if (group_->neighbour(peer(step))) {
    tally_.shared_bytes += held.bytes;
    if (blocked(step.queue, blocked_.size()) || !push(index)) blocked_.push_back(index);
    return;
  }
  if (group_->shares(peer(step))) tally_.shared_bytes += held.bytes;
  engine_.send(*this, index, *group_, peer(step), tag(step), held.data, held.bytes);
}

// Tell a neighbour the place of a message; returns false if its ring is full.
bool Execution::push(std::uint32_t index) {
  const Step& step = program_->steps[index];
  const Held& held = held_[step.slot];
  Neighbour& neighbour = *group_->neighbour(step.peer);
  Entry entry{};
  entry.sequence = sequence(step);
  entry.bytes = held.bytes;
  const bool own = held.data == held.block;
  const int owner = own ? group_->rank : held.owner;
  const Arena& arena = own ? engine_.blocks.arena() : group_->neighbour(owner)->arena;
  entry.owner = static_cast<std::uint32_t>(owner);
  entry.offset = static_cast<std::uint64_t>(held.data - arena.base);
  lease_of(held.data).fetch_add(1, std::memory_order_relaxed);  // before the entry is pushed
  if (!neighbour.to.push(entry)) {
    lease_of(held.data).fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  Bell::of(neighbour.arena).ring();
  // A message in another rank's arena is not overwritten here, so this send need not last until it is read.
  if (own)
    leased_.push_back(index);
  else
    end(index);
  return true;
}

void Execution::post_receive(std::uint32_t index) {
  const Step& step = program_->steps[index];
  if (Neighbour* const neighbour = group_->neighbour(peer(step))) {
    const std::uint32_t sequence = this->sequence(step);
    const auto early = std::find_if(neighbour->early.begin(), neighbour->early.end(),
                                    [&](const Entry& entry) { return entry.sequence == sequence; });
    if (early == neighbour->early.end()) {
      neighbour->posted.push_back({sequence, index, this});
      return;
    }
    const Entry entry = *early;
    neighbour->early.erase(early);
    return received(index, entry);
  }
  const Slot& slot = program_->slots[step.slot];
  // A message of an exchange is read where it is.
  if (engine_.carried)
    return engine_.receive(*this, index, *group_, peer(step), tag(step), nullptr, slot.room);
  const std::uint32_t copies = order_->lands[index];
  const bool lands = copies != kNowhere && step.readers == 1 && lends_;
  std::size_t bytes = slot.room;
  std::uint8_t* data = nullptr;
  if (lands) {
    const Step& copy = program_->steps[copies];
    data = address(copy.out, copy.out_at);
    bytes = step.count * bytes_of(slot.dtype);  // other elements follow these: the slot may be longer
  } else {
    try {
      data = room(step.slot, slot.room);
    } catch (const std::bad_alloc&) {
      return fail(Fault::kMemory, index, -1);
    }
  }
  held_[step.slot].data = data;
  engine_.receive(*this, index, *group_, peer(step), tag(step), data, bytes);
}

void Execution::received(std::uint32_t index, const Entry& entry) {
  const Step& step = program_->steps[index];
  const Neighbour* const owner =
      entry.owner < group_->place.size() ? group_->neighbour(static_cast<int>(entry.owner)) : nullptr;
  Held found;
  found.bytes = entry.bytes;
  if (!owner || !owner->arena.holds(entry.offset, entry.bytes) ||
      entry.bytes > program_->slots[step.slot].room)
    return fail(Fault::kLength, index, step.peer, 0, &found);
  filled(step, owner->arena.base + entry.offset, entry.bytes, true, true);
  held_[step.slot].owner = owner->rank;
  end(index);
}

void Execution::left(std::uint32_t index) {
  if (!done()) end(index);
}

void Execution::arrived(std::uint32_t index, const std::uint8_t* data, std::size_t bytes, bool trusted) {
  const Step& step = program_->steps[index];
  // Nobody writes to it: the steps that read it take what they are given.
  filled(step, const_cast<std::uint8_t*>(data), bytes, false, trusted);
  if (bytes > program_->slots[step.slot].room)
    return fail(Fault::kLength, index, peer(step), 0, &held_[step.slot]);
  end(index);
}

// Handle a request of MPI's that is done.
void Execution::completed(std::uint32_t index, const Requests::Done& done) {
  const Step& step = program_->steps[index];
  if (done.code) return fail(Fault::kMpi, index, peer(step), done.code);
  if (step.kind == kRecv) {
    std::size_t bytes = static_cast<std::size_t>(done.bytes);
    if (program_->carriage.framed) {
      const Mpi& mpi = engine_.mpi();
      status_.assign(done.status, done.status + mpi.status_bytes);
      int cancelled = 0;
      mpi.test_cancelled(done.status, &cancelled);
      cancelled_ = cancelled;
      if (cancelled_) bytes = 0;
    }
    filled(step, held_[step.slot].data, bytes, false, false);
  }
  end(index);
}

void Execution::refused(std::uint32_t index, int code) {
  fail(Fault::kMpi, index, peer(program_->steps[index]), code);
}

// Return this rank's own block for a slot.
std::uint8_t* Execution::room(std::uint32_t slot, std::size_t bytes) {
  Held& held = held_[slot];
  if (!held.block) {
    const Slot& made = program_->slots[slot];
    held.block = engine_.take(std::max(bytes, made.bytes));
  }
  return held.block;
}

// Note that a slot has its message.
void Execution::filled(const Step& step, std::uint8_t* data, std::size_t bytes, bool leased, bool trusted) {
  Held& held = held_[step.slot];
  held.data = data;
  held.bytes = bytes;
  held.uses = step.readers;
  held.leased = leased;
  held.trusted = trusted;
  held.peer = step.kind == kRecv ? peer(step) : group_->rank;
}

void Execution::used(std::uint32_t slot) {
  Held& held = held_[slot];
  if (--held.uses || !held.leased) return;
  held.leased = false;
  // This follows all reads of the block: a rank that then sees no reader left may write to it. The bell is
  // looked at after this.
  if (lease_of(held.data).fetch_sub(1) == 1) Bell::of(group_->neighbour(held.owner)->arena).ring();
}

void Execution::end(std::uint32_t index) {
  const Step& step = program_->steps[index];
  states_[index] = kEnded;
  --left_;
  if (step.kind == kSend || step.kind == kCheck || step.kind == kDecode) used(step.slot);
  for (const std::uint32_t slot : program_->list(step.slots)) used(slot);
  begin_next(index);
  while (!skipped_.empty() && !done()) {
    const std::uint32_t other = skipped_.back();
    skipped_.pop_back();
    states_[other] = kEnded;
    --left_;
    begin_next(other);
  }
  finish_if_ended();
}

// Begin the steps that waited only for one that has ended.
void Execution::begin_next(std::uint32_t index) {
  const Range range = order_->after[index];
  const auto next = std::span(order_->next).subspan(range.first, range.count);
  for (const std::uint32_t other : next) {
    if (--waits_[other] == 0) begin(other);
    if (done()) return;
  }
}

// Finish once only messages that other ranks still read are left: their blocks wait for the readers after the
// end, unless too many blocks wait already.
bool Execution::finish_if_ended() {
  if (done() || left_ != leased_.size() || (left_ && engine_.blocks.crowded())) return false;
  finish();
  return true;
}

// End the sends whose messages all readers have read.
bool Execution::settle() {
  bool moved = false;
  for (std::size_t i = 0; i < leased_.size() && !done();) {
    const std::uint32_t index = leased_[i];
    if (lease_of(held_[program_->steps[index].slot].data).load()) {
      ++i;
      continue;
    }
    leased_.erase(leased_.begin() + static_cast<std::ptrdiff_t>(i));
    moved = true;
    end(index);
  }
  return finish_if_ended() || moved;
}

// Whether one of the first `first` sends that found their ring full is of a queue: no other send of the queue
// may pass it.
bool Execution::blocked(std::uint32_t queue, std::size_t first) const {
  return std::any_of(blocked_.begin(), blocked_.begin() + static_cast<std::ptrdiff_t>(first),
                     [&](std::uint32_t index) { return program_->steps[index].queue == queue; });
}

// Retry the sends that found their ring full.
bool Execution::retry() {
  bool moved = false;
  for (std::size_t i = 0; i < blocked_.size() && !done();) {
    const std::uint32_t index = blocked_[i];
    // Sends that begin when this one ends are appended behind all of these.
    if (blocked(program_->steps[index].queue, i) || !push(index)) {
      ++i;
      continue;
    }
    blocked_.erase(blocked_.begin() + static_cast<std::ptrdiff_t>(i));
    moved = true;
  }
  return moved;
}

bool Execution::compute() {
  if (ready_.empty()) return false;
  const std::uint32_t index = ready_.front();
  std::pop_heap(ready_.begin(), ready_.end(), std::greater<>());
  ready_.pop_back();
  if (program_->steps[index].python) {
    ask(index);
    return true;
  }
  const double began = now();
  const bool encodes = program_->steps[index].kind == kEncode;
  const bool good = run(index);
  const double ended = now();
  (encodes ? tally_.encode_seconds : tally_.decode_seconds) += ended - began;
  if (traced_) intervals_.push_back({encodes, began, ended});
  if (good) end(index);
  return true;
}

void Execution::finish() {
  give_back();
  done_.store(true, std::memory_order_release);
}

void Execution::give_back() {
  std::vector<std::uint8_t*> blocks;
  for (Held& held : held_)
    if (held.block) blocks.push_back(held.block);
  if (scratch_) blocks.push_back(scratch_);
  scratch_ = nullptr;
  for (Held& held : held_) held.block = nullptr;
  engine_.give(std::move(blocks), std::move(pin_));
}

void Execution::fail(Fault fault, std::uint32_t step, int peer, int code, const Held* held) {
  failure_ = {fault, step, peer, code, 0, {}};
  if (held) {
    failure_.bytes = held->bytes;
    if (held->data) failure_.message.assign(held->data, held->data + held->bytes);
  }
  abandon();
}

// Give the operation up. Its blocks are not given back where MPI may still write to them, or another rank
// read them; those of an exchange have leases while they are read.
void Execution::abandon() {
  if (failure_.fault == Fault::kNone) failure_.fault = Fault::kGivenUp;
  engine_.forget(this);
  for (Neighbour& neighbour : group_->neighbours)
    std::erase_if(neighbour.posted, [this](const auto& posted) { return posted.execution == this; });
  ready_.clear();
  ask_no_more();
  if (engine_.carried) give_back();
  done_.store(true, std::memory_order_release);
}

std::vector<Unfinished> Execution::unfinished() const {
  const auto among = [](const std::vector<std::uint32_t>& steps, std::uint32_t index) {
    return std::find(steps.begin(), steps.end(), index) != steps.end();
  };
  std::vector<Unfinished> found;
  for (std::uint32_t i = 0; i < states_.size(); ++i) {
    if (states_[i] != kPosted) continue;
    const Step& step = program_->steps[i];
    Unfinished one{i, peer(step), step.channel, Unfinished::kInMpi, 0};
    if (step.kind == kRecv) {
      one.reason = Unfinished::kNoMessage;
    } else if (among(leased_, i)) {
      one.reason = Unfinished::kUnread;
      one.readers = lease_of(held_[step.slot].data).load();
    } else if (among(blocked_, i)) {
      one.reason = Unfinished::kRingFull;
    }
    found.push_back(one);
  }
  return found;
}

}  // namespace hybridcomp::engine
