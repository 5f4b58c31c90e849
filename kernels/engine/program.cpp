#include "engine/program.hpp"

#include <algorithm>
#include <climits>
#include <map>
#include <tuple>
#include <utility>

namespace hybridcomp::engine {
namespace {

constexpr std::int64_t kMost = std::int64_t(1) << 48;  // most elements, and largest value of other fields

bool reads_slot(Kind kind) { return kind == kSend || kind == kCheck || kind == kDecode; }
bool fills_slot(Kind kind) {
  return kind == kEncode || kind == kRecv || kind == kSumEncode || kind == kSizes;
}

// Whether at most one of two steps is ever carried out.
bool exclude(const Step& a, const Step& b) {
  return a.region != kAlways && a.region == b.region && a.owner != b.owner;
}

}  // namespace

Program::Program(const Carriage& given, std::span<const std::int64_t> rows,
                 std::span<const std::int64_t> rooms, std::span<const std::int64_t> refs,
                 const std::size_t (&limits)[kBuffers], int rank, int ranks, int channels, std::string* fault)
    : carriage(given),
      scratch_bytes(limits[kScratch] * bytes_of(wide())),
      send_elements(limits[kSendBuffer]),
      recv_elements(limits[kRecvBuffer]) {
  *fault = compile(rows, rooms, refs, limits, rank, ranks, channels);
}

std::string Program::compile(std::span<const std::int64_t> rows, std::span<const std::int64_t> rooms,
                             std::span<const std::int64_t> refs, const std::size_t (&limits)[kBuffers],
                             int rank, int ranks, int channels) {
  if (rows.size() % kStepWords || rooms.size() % kSlotWords) return "steps or slots are not whole";
  if (carriage.fold != Fold::kNone && (!folds(carriage.fold, carriage.dtype) || carriage.encoder))
    return "such elements are not folded so, or are encoded";
  const bool sums = carriage.fold != Fold::kNone || is_float(carriage.dtype);
  if (!bytes_of(carriage.dtype)) return "there is no such type of elements";
  if (carriage.bounds && carriage.bounds->size() != rooms.size() / kSlotWords)
    return "every slot has a bound, or none";
  for (std::size_t at = 0; at < rooms.size(); at += kSlotWords) {
    const std::int64_t count = rooms[at];
    if (count < 0 || count > kMost) return "a slot has no such length";
    const auto n = static_cast<std::size_t>(count);
    const DTypeCode dtype = rooms[at + 1] ? wide() : carriage.dtype;
    const bool sizes = rooms[at + 2] == 2;
    Slot slot{rooms[at + 2] == 1, sizes, dtype, n * bytes_of(dtype), n * bytes_of(dtype), n};
    const std::string problem = size(slot, slots.size());
    if (!problem.empty()) return problem;
    slots.push_back(slot);
  }

  const std::string problem = find_regions(rows);
  if (!problem.empty()) return problem;

  const std::size_t count = rows.size() / kStepWords;
  Edges after(count);
  Edges sends(count);  // by step that encodes the caller's elements as they are: the sends of its message
  std::vector<std::uint32_t> lands(count, kNowhere);
  std::vector<std::vector<std::uint32_t>> writers(
      slots.size());  // steps that may have filled each slot; one of them is carried out
  std::vector<bool> after_cut(count);
  std::map<std::tuple<bool, int, int>, std::vector<std::uint32_t>> posts;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::int64_t* const w = rows.data() + i * kStepWords;
    for (std::size_t f = 0; f < kStepWords; ++f)
      if (w[f] < -1 || w[f] > kMost) return "a step has a field out of range";
    if (w[0] < 0 || w[0] >= kKinds) return "a step is of an unknown kind";
    if (w[5] >= kBuffers || w[7] >= kBuffers) return "a step has an unknown buffer";
    const Kind kind = static_cast<Kind>(w[0]);
    Step step{};
    step.kind = kind;
    step.span = static_cast<BufferId>(w[5]);
    step.out = static_cast<BufferId>(w[7]);
    step.divide = w[9] == 1;
    if (step.divide && carriage.fold != Fold::kNone) return "what is folded is not divided";
    step.peer = static_cast<int>(w[2]);
    step.channel = static_cast<int>(w[3]);
    if (w[4] <= 0 || w[6] < 0 || w[8] < 0) return "a step has no elements, or begins before its buffer";
    step.count = static_cast<std::size_t>(w[4]);
    step.span_at = static_cast<std::size_t>(w[6]);
    step.out_at = static_cast<std::size_t>(w[8]);
    step.memory = w[10];
    if (w[15] >= static_cast<std::int64_t>(regions) || w[16] >= ranks || (w[15] < 0) != (w[16] < 0))
      return "a step depends on a region or an owner that there is not";
    step.region = static_cast<std::int32_t>(w[15]);
    step.owner = static_cast<std::int32_t>(w[16]);
    if (step.span != kNoBuffer && step.span_at + step.count > limits[step.span])
      return "a step reads past the end of its buffer";
    if (step.out != kNoBuffer && step.out_at + step.count > limits[step.out])
      return "a step writes past the end of its buffer";
    const bool one = reads_slot(kind) || fills_slot(kind);
    if (one && (w[1] < 0 || w[1] >= static_cast<std::int64_t>(slots.size())))
      return "a step has no such slot";
    step.slot = one ? static_cast<std::uint32_t>(w[1]) : 0;
    const bool needs_span = kind == kEncode || kind == kCopy;
    const bool needs_out = kind == kDecode || kind == kSum || kind == kCopy;
    if ((kind == kSum || kind == kSumEncode) && !sums) return "only numbers are summed";
    if ((needs_span && step.span == kNoBuffer) || (needs_out && step.out == kNoBuffer))
      return "a step lacks a span";
    if (step.memory >= 0) {
      if (!carriage.encoder && !carriage.bounds) return "a step corrects by a memory, and there is no codec";
      if (kind == kSum && step.span == kNoBuffer)
        return "a step sums what a memory corrects, and has no part of its own";
    }
    if (kind == kCopy && dtype_of(step.span) != dtype_of(step.out)) return "a copy is between two dtypes";
    const auto within = [&](std::int64_t at, std::int64_t n) {
      return at >= 0 && n >= 0 && at + n <= static_cast<std::int64_t>(refs.size());
    };
    if (!within(w[11], w[12]) || !within(w[13], w[14])) return "a step refers past the end of the lists";

    // A step that reads a slot is counted with the step that filled it last; where that depends on an owner,
    // with each that may be carried out when this one is. A received message is read under the condition of
    // its receive, or it would stay leased.
    const auto read = [&](std::int64_t slot) {
      if (slot < 0 || slot >= static_cast<std::int64_t>(slots.size())) return false;
      if (kind != kSend && slots[static_cast<std::size_t>(slot)].sizes != (kind == kCut)) return false;
      std::size_t found = 0, conditional = 0;
      for (const std::uint32_t other : writers[static_cast<std::size_t>(slot)]) {
        Step& from = steps[other];
        if (exclude(from, step)) continue;
        const bool same = from.region == step.region && from.owner == step.owner;
        if (from.region != kAlways && !same && step.region != kAlways) return false;
        if (from.kind == kRecv && step.region != kAlways && !same) return false;
        if (from.count != step.count && kind != kSizes) return false;
        conditional += from.region != kAlways && !same;
        if (kind == kSend && from.kind == kEncode && from.span == kSendBuffer && slots[from.slot].plain)
          sends[other].push_back(i);
        ++from.readers;
        ++found;
      }
      return found && (!conditional || found == static_cast<std::size_t>(ranks));
    };
    if (reads_slot(kind) && !read(w[1])) return "a step reads a slot that holds no message of its length";
    step.slots = {static_cast<std::uint32_t>(lists.size()), static_cast<std::uint32_t>(w[12])};
    if (carriage.fold != Fold::kNone && (kind == kSum || kind == kSumEncode) && step.span == kNoBuffer &&
        !w[12])
      return "a step folds nothing";
    for (std::int64_t s = 0; s < w[12]; ++s) {
      const std::int64_t slot = refs[static_cast<std::size_t>(w[11] + s)];
      if (!read(slot)) return "a step reads a slot that holds no message of its length";
      lists.push_back(static_cast<std::uint32_t>(slot));
    }
    if (fills_slot(kind)) {
      const Slot& slot = slots[step.slot];
      if (step.count > slot.count) return "a message is longer than its slot";
      if (kind != kRecv && slot.sizes != (kind == kSizes)) return "a slot is for sizes, and for nothing else";
      if (kind == kEncode && slot.dtype != dtype_of(step.span) && step.memory < 0)
        return "a message is of another dtype than its span";
      auto& now = writers[step.slot];
      const auto excluded = [&](std::uint32_t other) { return exclude(steps[other], step); };
      if (!std::all_of(now.begin(), now.end(), excluded)) now.clear();
      now.push_back(i);
    }
    if ((kind == kSizes && step.slots.count != step.count) ||
        (kind == kCut && step.slots.count != static_cast<std::uint32_t>(ranks)))
      return "a step lacks messages whose sizes it writes, or sizes of some ranks";
    for (std::int64_t d = 0; d < w[14]; ++d) {
      const std::int64_t before = refs[static_cast<std::size_t>(w[13] + d)];
      if (before < 0 || before >= i) return "a step waits for a later one";
      after[i].push_back(static_cast<std::uint32_t>(before));
      if (after_cut[static_cast<std::size_t>(before)]) after_cut[i] = true;
    }
    if (step.region != kAlways && !after_cut[i]) return "a step does not wait for what it depends on";
    if (kind == kCut) after_cut[i] = true;
    if (kind == kSend || kind == kRecv) {
      if (w[2] < 0 || w[2] >= ranks || w[2] == rank) return "a message has no such peer";
      if (w[3] < 0 || w[3] >= channels) return "a message has no such channel";
      posts[{kind == kSend, step.peer, step.channel}].push_back(i);
    }
    step.python = carriage.bounds && for_python(step);
    // A message that is only copied, by a step that waits for no other, may be received in place.
    if (kind == kDecode && after[i].size() == 1 && slots[step.slot].plain &&
        slots[step.slot].dtype == dtype_of(step.out) && steps[after[i][0]].kind == kRecv &&
        steps[after[i][0]].region == step.region)
      lands[after[i][0]] = i;
    steps.push_back(step);
  }

  for (const auto& [key, members] : posts) {
    for (const std::uint32_t i : members) steps[i].queue = static_cast<std::uint32_t>(queues.size());
    queues.push_back(
        {static_cast<std::uint32_t>(queue_steps.size()), static_cast<std::uint32_t>(members.size())});
    queue_steps.insert(queue_steps.end(), members.begin(), members.end());
  }
  apart = ordered(after, std::move(lands), std::vector<bool>(count, true));
  in_place = ordered_in_place(std::move(after), sends);
  return check_queues();
}

// Set `regions` to how many the step cuts that finds owners, which is unconditional and the only one.
std::string Program::find_regions(std::span<const std::int64_t> rows) {
  for (std::size_t at = 0; at < rows.size(); at += kStepWords) {
    if (rows[at] != kCut) continue;
    if (regions || rows[at + 15] != kAlways) return "owners are found once";
    if (rows[at + 4] <= 0 || rows[at + 4] > INT_MAX) return "a step has no elements";
    regions = static_cast<std::size_t>(rows[at + 4]);
  }
  return {};
}

// Check that no message of a queue that always goes waits for one that may not go.
std::string Program::check_queues() const {
  for (const Range range : queues) {
    const auto members = std::span(queue_steps).subspan(range.first, range.count);
    const bool always = steps[members[0]].region == kAlways;
    for (const std::uint32_t i : members)
      if ((steps[i].region == kAlways) != always) return "some messages of a queue depend on owners";
  }
  return {};
}

// Give an encoded slot the bytes of its longest message.
std::string Program::size(Slot& slot, std::size_t index) const {
  if (slot.sizes) {
    slot.bytes = slot.room = sizeof(Header) + slot.count * sizeof(std::uint32_t);
  } else if (!slot.plain) {
    if (!carriage.encoder && !carriage.bounds) return "a slot is encoded, and there is no codec";
    slot.bytes =
        carriage.bounds ? (*carriage.bounds)[index] : carriage.encoder->bound(slot.count, slot.dtype);
    slot.room = std::max(slot.bytes, sizeof(Header) + slot.count * bytes_of(wide()));
    if (!slot.bytes) return "the codec does not take this dtype";
    if (carriage.framed) {
      ++slot.bytes;  // made odd: see Carriage::framed
      slot.room = carriage.framed;
    }
  }
  if (slot.room > INT_MAX) return "a message is longer than MPI's counts reach; make chunks smaller";
  return {};
}

std::string Program::recode(const Carriage& other) {
  carriage = other;
  if (carriage.bounds && carriage.bounds->size() != slots.size()) return "every slot has a bound, or none";
  for (std::size_t i = 0; i < slots.size(); ++i) {
    std::string problem = size(slots[i], i);
    if (!problem.empty()) return problem;
  }
  return {};
}

// Whether a step needs the codec, or a memory of error feedback with it. Checking messages needs neither.
bool Program::for_python(const Step& step) const {
  const auto encoded = [this](std::uint32_t slot) { return !slots[slot].plain; };
  switch (step.kind) {
    case kEncode:
    case kDecode:
      return encoded(step.slot);
    case kSumEncode:
      if (encoded(step.slot)) return true;
      [[fallthrough]];
    case kSum: {
      const auto summed = list(step.slots);
      return step.memory >= 0 || std::any_of(summed.begin(), summed.end(), encoded);
    }
    default:
      return false;
  }
}

Order Program::ordered(const Edges& after, std::vector<std::uint32_t> lands, std::vector<bool> lends) {
  Order order;
  order.lands = std::move(lands);
  order.lends = std::move(lends);
  Edges waiting(after.size());
  for (std::uint32_t i = 0; i < after.size(); ++i) {
    order.waits.push_back(static_cast<std::uint32_t>(after[i].size()));
    if (after[i].empty()) order.first.push_back(i);
    for (const std::uint32_t before : after[i]) waiting[before].push_back(i);
  }
  for (const auto& steps : waiting) {
    order.after.push_back(
        {static_cast<std::uint32_t>(order.next.size()), static_cast<std::uint32_t>(steps.size())});
    order.next.insert(order.next.end(), steps.begin(), steps.end());
  }
  return order;
}

// Have each step that writes to the caller's result wait for the sends of what is there before. All of them
// come earlier in the schedule, by whose order no rank waits for ever: MPI ends them without a step of the
// receiver's. Nothing is received there, since a receive that waited for a send might keep the peer's from
// ending.
std::optional<Order> Program::ordered_in_place(Edges after, const Edges& sends) const {
  std::vector<bool> lends(steps.size());
  std::vector<std::uint32_t> lent;  // steps that encode, by the first element
  std::size_t longest = 0;
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    // What this rank adds up itself might be overwritten by the sum.
    if (sends[i].empty() || sends[i].size() != steps[i].readers) continue;
    lends[i] = true;
    lent.push_back(i);
    longest = std::max(longest, steps[i].count);
  }
  if (lent.empty() || regions) return std::nullopt;
  const auto begins = [&](std::uint32_t i) { return steps[i].span_at; };
  std::ranges::sort(lent, {}, begins);
  for (std::uint32_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    if (step.out != kRecvBuffer) continue;
    const std::size_t least = step.out_at < longest ? 0 : step.out_at - longest;
    for (auto at = std::ranges::lower_bound(lent, least, {}, begins);
         at != lent.end() && begins(*at) < step.out_at + step.count; ++at) {
      if (begins(*at) + steps[*at].count <= step.out_at) continue;
      for (const std::uint32_t send : sends[*at]) {
        if (send > i) return std::nullopt;
        if (std::ranges::find(after[i], send) == after[i].end()) after[i].push_back(send);
      }
    }
  }
  return ordered(after, std::vector<std::uint32_t>(steps.size(), kNowhere), std::move(lends));
}

}  // namespace hybridcomp::engine
