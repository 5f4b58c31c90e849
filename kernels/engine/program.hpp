// A schedule made ready to run: hybridcomp/schedules/schedule.py says what its steps mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/fold.hpp"
#include "engine/messages.hpp"

namespace hybridcomp::engine {

enum Kind : std::uint8_t {
  kEncode,
  kSend,
  kRecv,
  kCheck,
  kDecode,
  kSum,
  kSumEncode,
  kCopy,
  kSizes,
  kCut,
  kKinds
};
enum BufferId : std::int8_t { kNoBuffer = -1, kSendBuffer, kRecvBuffer, kScratch, kBuffers };
constexpr std::size_t kStepWords = 17;  // of a step from Python, in the order of Schedule.packed
constexpr std::size_t kSlotWords = 3;

constexpr std::uint32_t kNowhere = UINT32_MAX;
constexpr std::int32_t kAlways = -1;

// A range of one of the program's lists.
struct Range {
  std::uint32_t first = 0, count = 0;
};

struct Step {
  Kind kind;
  BufferId span, out;
  bool divide;
  std::uint32_t slot;
  std::uint32_t waits;    // steps that must end before it begins
  std::uint32_t queue;    // of a send or receive
  std::uint32_t readers;  // of a step that fills a slot: steps that read what it put there
  int peer, channel;
  std::size_t count, span_at, out_at;  // elements
  std::int64_t memory;
  std::int32_t region, owner;  // it is carried out only where this rank owns that region; kAlways
  std::uint32_t lands;  // of a receive of plain elements: the step that copies them to where they belong
  bool python;          // Python computes it: python_steps.cpp
  Range slots;          // in Program::lists
  Range next;           // in Program::next: the steps that wait for it
};

struct Slot {
  bool plain;
  bool sizes;  // of messages, in a message by the codec `none` of kUint32
  DTypeCode dtype;
  std::size_t bytes;  // of the longest message made here
  std::size_t room;   // for a received one: what another codec would make of it has room, too, and is named
  std::size_t count;  // elements of the longest message
};

// How the caller's elements are carried.
struct Carriage {
  std::optional<Encoder> encoder;  // none where all slots are plain, or where Python encodes
  std::uint8_t codec;
  std::uint32_t params;
  DTypeCode dtype;    // of the caller's elements; of integers only where there is a fold
  int ranks;          // what sums are divided by where their steps say so
  bool stream;        // results are written past the caches
  std::size_t bytes;  // uncompressed, for priorities
  // Of a send or receive: the receiver takes a message of any codec and of any number of elements that fit,
  // which has an odd number of bytes, or the elements as they are, which have an even number. It has room for
  // so many bytes. 0 for messages of which both ends know all.
  std::size_t framed = 0;
  // Of sums of integers as they are, what adds two up.
  Fold fold = Fold::kNone;
  // Where Python encodes, decodes and sums what is encoded: for each slot, bytes of its longest message.
  std::optional<std::vector<std::size_t>> bounds = std::nullopt;
};

class Program {
 public:
  // Check and compile; `fault` says what is wrong, and is empty if nothing is. `limits` has the elements of
  // the send buffer, the receive buffer and the scratch memory.
  Program(const Carriage& carriage, std::span<const std::int64_t> steps, std::span<const std::int64_t> slots,
          std::span<const std::int64_t> lists, const std::size_t (&limits)[kBuffers], int rank, int ranks,
          int channels, std::string* fault);

  // Carry the elements by a codec with messages of other lengths; what is wrong, or nothing.
  std::string recode(const Carriage& other);

  DTypeCode wide() const {
    if (carriage.fold != Fold::kNone) return carriage.dtype;
    return carriage.dtype == kFloat64 ? kFloat64 : kFloat32;
  }
  DTypeCode dtype_of(BufferId buffer) const { return buffer == kScratch ? wide() : carriage.dtype; }
  int dtype_of(const Slot& slot) const { return slot.sizes ? int{kUint32} : int{slot.dtype}; }
  std::span<const std::uint32_t> list(Range range) const {
    return std::span(lists).subspan(range.first, range.count);
  }

  Carriage carriage;
  std::vector<Step> steps;
  std::vector<Slot> slots;
  std::vector<std::uint32_t> lists;  // what steps sum
  std::vector<std::uint32_t> next;
  std::vector<Range> queues;               // of sends, and of receives, of a peer and channel
  std::vector<std::uint32_t> queue_steps;  // in the order in which they are posted
  std::vector<std::uint32_t> first;        // steps that wait for none
  std::size_t regions = 0;                 // whose owners a step finds
  std::size_t scratch_bytes;
  std::size_t send_elements, recv_elements;

 private:
  std::string compile(std::span<const std::int64_t> rows, std::span<const std::int64_t> rooms,
                      std::span<const std::int64_t> refs, const std::size_t (&limits)[kBuffers], int rank,
                      int ranks, int channels);
  std::string size(Slot& slot, std::size_t index) const;
  std::string find_regions(std::span<const std::int64_t> rows);
  std::string check_queues() const;
  bool for_python(const Step& step) const;
  void link(const std::vector<std::vector<std::uint32_t>>& after);
};

}  // namespace hybridcomp::engine
