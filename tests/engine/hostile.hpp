// Programs that no schedule makes: each field of each step set to what it must not be, in turn. Program
// refuses them in words, and whatever it takes or not, it reads nothing out of bounds.
#pragma once

#include <random>

#include "ranks.hpp"

namespace checked {

constexpr std::int64_t kSizesForm = 2;  // form of a slot: see Schedule.packed

enum Field { kKind, kSlot, kPeer, kChannel, kCount, kSpan, kSpanAt, kOut, kOutAt, kDivide, kMemory, kSums };
constexpr std::size_t kSumCount = 12, kAfter = 13,
                      kAfterCount = 14,  // kSums is where the list of slots begins
    kRegion = 15, kOwner = 16;

class Hostile {
 public:
  Hostile(const Case& what, int rank)
      : case_(what), rank_(rank), packed_(what.packed[static_cast<std::size_t>(rank)]) {}

  // Try them all; return how many programs were refused.
  int all() {
    for (std::size_t i = 0; i < packed_.steps.size() / kStepWords; ++i) step(i);
    slots();
    if (packed_.steps.size()) {
      packed_.steps.pop_back();
      refused("a step that is cut off");
      packed_ = case_.packed[static_cast<std::size_t>(rank_)];
    }
    return refused_;
  }

  // Try programs with some fields at random, as many as are asked for.
  void random(int times, std::uint64_t seed) {
    if (packed_.steps.empty()) return;
    std::mt19937_64 random(seed);
    for (int time = 0; time < times; ++time) {
      for (int changes = 1 + static_cast<int>(random() % 3); changes-- > 0;) {
        auto* const parts = random() % 8 ? &packed_.steps : random() % 2 ? &packed_.slots : &packed_.lists;
        if (parts->empty()) continue;
        const std::int64_t values[] = {-1,
                                       0,
                                       1,
                                       2,
                                       7,
                                       static_cast<std::int64_t>(random() % 4096),
                                       std::int64_t(1) << random() % 63,
                                       static_cast<std::int64_t>(random())};
        (*parts)[random() % parts->size()] = values[random() % std::size(values)];
      }
      std::string fault;
      case_.compile(rank_, packed_, &fault);
      packed_ = case_.packed[static_cast<std::size_t>(rank_)];
    }
  }

 private:
  void refused(const std::string& what) {
    std::string fault;
    case_.compile(rank_, packed_, &fault);
    expect(!fault.empty(), case_.name + ": a program is taken: " + what);
    ++refused_;
  }

  // Try the program with a number changed.
  void with(std::vector<std::int64_t>& numbers, std::size_t at, std::int64_t value, const std::string& what) {
    const std::int64_t before = std::exchange(numbers[at], value);
    refused(what + " " + std::to_string(value));
    numbers[at] = before;
  }

  void step(std::size_t i) {
    const std::vector<std::int64_t> w(
        packed_.steps.begin() + static_cast<std::ptrdiff_t>(i * kStepWords),
        packed_.steps.begin() + static_cast<std::ptrdiff_t>((i + 1) * kStepWords));
    const auto set = [&](std::size_t field, std::initializer_list<std::int64_t> values) {
      for (const std::int64_t value : values)
        with(packed_.steps, i * kStepWords + field, value,
             "step " + std::to_string(i) + ", field " + std::to_string(field));
    };
    constexpr std::int64_t kMost = std::int64_t(1) << 48, kWrap = std::int64_t(1) << 32;
    const auto kind = static_cast<Kind>(w[kKind]);
    const auto slots = static_cast<std::int64_t>(packed_.slots.size() / kSlotWords);
    const auto lists = static_cast<std::int64_t>(packed_.lists.size());
    const auto limit = [&](std::int64_t buffer) {
      return static_cast<std::int64_t>(buffer == kScratch ? packed_.scratch : case_.count);
    };

    for (std::size_t field = 0; field < kStepWords; ++field)
      set(field, {-2, kMost + 1, INT64_MIN, INT64_MAX});
    set(kKind, {-1, kKinds, 255, kWrap + w[kKind]});
    set(kCount, {0, -1, kMost, kWrap * 2 + w[kCount]});
    if (kind != kSum && kind != kCopy && kind != kCut) set(kSlot, {-1, slots, kWrap + w[kSlot]});
    if (kind == kSend || kind == kRecv) {
      set(kPeer, {-1, rank_, case_.ranks(), kWrap + w[kPeer]});
      set(kChannel, {-1, 127, kWrap + w[kChannel]});
    }
    if (case_.folds) set(kDivide, {1});
    set(kSpan, {kBuffers, 256 + w[kSpan]});
    set(kOut, {kBuffers, 256 + w[kOut]});
    if (kind == kEncode || kind == kCopy) set(kSpan, {-1});
    if (kind == kSum && w[kMemory] >= 0) set(kSpan, {-1});
    if (case_.plain && kind != kSend && kind != kRecv) set(kMemory, {0, 5});
    if (kind == kDecode || kind == kSum || kind == kCopy) set(kOut, {-1});
    set(kSpanAt, {-1});
    set(kOutAt, {-1});
    if (w[kSpan] >= 0) set(kSpanAt, {limit(w[kSpan]), limit(w[kSpan]) - w[kCount] + 1, kMost});
    if (w[kOut] >= 0) set(kOutAt, {limit(w[kOut]), limit(w[kOut]) - w[kCount] + 1, kMost});
    for (const std::size_t field : {std::size_t(kSums), kAfter}) {
      set(field, {-1, lists + 1, lists - w[field + 1] + 1});
      set(field + 1, {-1, lists + 1, lists - w[field] + 1, kWrap + w[field + 1]});
    }

    // Regions and owners that there are not, or that are not known yet.
    if (w[kRegion] >= 0) {
      set(kRegion, {-1, case_.regions(rank_), kWrap + w[kRegion]});
      set(kOwner, {-1, case_.ranks(), kWrap + w[kOwner]});
      set(kAfterCount, {0});
    } else {
      set(kRegion, {0, case_.regions(rank_)});
      set(kOwner, {0});
    }

    // Slots that it sums, and steps that it waits for: itself, a later step, or none at all.
    const auto here = static_cast<std::int64_t>(i);
    for (std::int64_t d = 0; d < w[kAfterCount]; ++d)
      for (const std::int64_t other : {here, here + 1, std::int64_t(-1), kWrap, kMost})
        with(packed_.lists, static_cast<std::size_t>(w[kAfter] + d), other, "a step waits for step");
    for (std::int64_t s = 0; s < w[kSumCount]; ++s)
      for (const std::int64_t other : {slots, std::int64_t(-1), kWrap, INT64_MAX})
        with(packed_.lists, static_cast<std::size_t>(w[kSums] + s), other, "a step sums slot");

    // A slot that no step fills.
    packed_.slots.insert(packed_.slots.end(), {w[kCount], 0, 1});
    if (kind == kSend || kind == kCheck || kind == kDecode) set(kSlot, {slots});
    for (std::int64_t s = 0; s < w[kSumCount]; ++s)
      with(packed_.lists, static_cast<std::size_t>(w[kSums] + s), slots, "a step sums the empty slot");
    packed_.slots.resize(packed_.slots.size() - kSlotWords);
  }

  void slots() {
    for (std::size_t at = 0; at < packed_.slots.size(); at += kSlotWords)
      for (const std::int64_t count :
           {std::int64_t(-1), INT64_MIN, INT64_MAX, std::int64_t(1) << 48, std::int64_t(1) << 31})
        with(packed_.slots, at, count, "a slot of elements:");
    for (std::size_t at = 2; at < packed_.slots.size(); at += kSlotWords)
      with(packed_.slots, at, packed_.slots[at] == kSizesForm ? 1 : kSizesForm, "a slot of the form");
    if (!case_.plain || packed_.slots.empty()) return;
    with(packed_.slots, 2, 0, "a slot is encoded without a codec:");
  }

  const Case& case_;
  const int rank_;
  Packed packed_;
  int refused_ = 0;
};

}  // namespace checked
