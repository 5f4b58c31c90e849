// Steps that Python computes: those of codecs that have no encoder here.
//
// A step that is ready is checked and put aside until a thread of Python's takes it, computes it without any
// lock of the engine's, and answers. The operation's other steps go on meanwhile.
#include <algorithm>
#include <functional>
#include <new>

#include "codecs/messages/opening.hpp"
#include "engine/engine.hpp"
#include "engine/execution.hpp"

namespace hybridcomp::engine {
namespace {

constexpr std::size_t kLong = std::size_t(1) << 16;  // least elements of a step during which the thread looks

}  // namespace

// Check the messages that a step reads, and put it aside for Python.
void Execution::ask(std::uint32_t index) {
  const Step& step = program_->steps[index];
  if (step.kind != kEncode) {
    const double began = now();
    bool good = step.kind != kDecode || check(index, step, step.slot);
    for (const std::uint32_t slot : program_->list(step.slots)) good = good && check(index, step, slot);
    const double ended = now();
    tally_.decode_seconds += ended - began;
    if (traced_) intervals_.push_back({false, began, ended});
    if (!good) return;
  }
  asked_.push_back(index);
  std::push_heap(asked_.begin(), asked_.end(), std::greater<>());
  engine_.count_asked(1);
}

std::optional<Asked> Execution::take() {
  if (taken_ != kNowhere || asked_.empty()) return std::nullopt;
  const std::uint32_t index = asked_.front();
  const Step& step = program_->steps[index];
  Asked asked;
  asked.step = index;
  if (step.kind == kEncode || step.kind == kSumEncode) {
    const std::size_t bytes = program_->slots[step.slot].bytes;
    try {
      asked.room = {room(step.slot, bytes), bytes};
    } catch (const std::bad_alloc&) {
      fail(Fault::kMemory, index, -1);
      return std::nullopt;
    }
  }
  if (step.span == kScratch || step.out == kScratch) asked.scratch = {scratch_, program_->scratch_bytes};
  const auto read = [&](std::uint32_t slot) {
    const Held& held = held_[slot];
    std::size_t bytes = held.bytes;
    Header header;
    if (!program_->slots[slot].plain && read_header(held.data, held.bytes, &header))
      bytes = sizeof(header) + header.payload;
    asked.messages.push_back({held.data, bytes});
  };
  if (step.kind == kDecode) read(step.slot);
  for (const std::uint32_t slot : program_->list(step.slots)) read(slot);
  std::pop_heap(asked_.begin(), asked_.end(), std::greater<>());
  asked_.pop_back();
  if (!pin_) pin_ = std::make_shared<Pin>();
  asked.pin = pin_;
  taken_ = index;
  engine_.count_asked(-1);
  engine_.count_taken(1);
  return asked;
}

// Take Python's answer for a step. One that comes after the operation has failed, or was given up, is
// ignored.
void Execution::answer(std::uint32_t index, std::size_t bytes) {
  if (done() || taken_ != index) return;
  taken_ = kNowhere;
  engine_.count_taken(-1);
  const Step& step = program_->steps[index];
  if (step.kind == kEncode || step.kind == kSumEncode)
    filled(step, held_[step.slot].block, bytes, false, true);
  end(index);
}

// Drop the steps that wait for Python. It may finish the step it is at: the memory stays.
void Execution::ask_no_more() {
  engine_.count_asked(-static_cast<int>(asked_.size()));
  asked_.clear();
  if (taken_ == kNowhere) return;
  taken_ = kNowhere;
  engine_.count_taken(-1);
}

void Engine::give(std::vector<std::uint8_t*> given, std::shared_ptr<Pin> pin) {
  if (pin && pin.use_count() > 1) return pinned_.emplace_back(std::move(pin), std::move(given)), void();
  for (std::uint8_t* const block : given) give(block);
}

// Give back blocks that no object in Python refers to any more.
void Engine::collect() {
  std::erase_if(pinned_, [this](const auto& one) {
    if (one.first.use_count() > 1) return false;
    for (std::uint8_t* const block : one.second) give(block);
    return true;
  });
}

std::optional<Asked> Engine::take(Execution& execution) {
  if (!asked_.load() && !waiters_.load()) poll();
  if (!asked_.load()) return std::nullopt;
  std::optional<Asked> asked;
  {
    const std::lock_guard lock(mutex_);
    asked = execution.take();
    if (!asked) retire();
  }
  // The steps that wait are other operations', whose threads may be long in coming to them.
  if (!asked && !waiters_.load()) poll();
  if (asked && execution.program().steps[asked->step].count >= kLong && !waiters_.load()) wake();
  return asked;
}

void Engine::answer(Execution& execution, std::uint32_t step, std::size_t bytes, double seconds) {
  const std::lock_guard lock(mutex_);
  execution.answer(step, bytes);
  for (const double until = now() + seconds; execution.ready() && now() < until;) execution.compute();
  retire();
}

}  // namespace hybridcomp::engine
