// A schedule made ready to run: hybridcomp/schedules/schedule.py defines its steps.
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
constexpr std::size_t kStepWords = 17;  // fields of a step from Python, in the order of Schedule.packed
constexpr std::size_t kSlotWords = 3;

constexpr std::uint32_t kNowhere = UINT32_MAX;
constexpr std::int32_t kAlways = -1;

// Range of one of the program's lists.
struct Range {
  std::uint32_t first = 0, count = 0;
};

struct Step {
  Kind kind;
  BufferId span, out;
  bool divide;
  std::uint32_t slot;
  std::uint32_t queue;    // queue of a send or receive
  std::uint32_t readers;  // for a step that fills a slot: steps that read that message
  int peer, channel;
  std::size_t count, span_at, out_at;  // elements
  std::int64_t memory;
  std::int32_t region, owner;  // carried out only if `owner` owns `region`; or kAlways
  bool python;                 // Python computes it: python_steps.cpp
  Range slots;                 // slots that it sums, in Program::lists
};

// Order of a program's steps: which wait for which.
struct Order {
  std::vector<std::uint32_t> waits;  // by step: how many must end before it begins
  std::vector<Range> after;          // by step: those that wait for it, in `next`
  std::vector<std::uint32_t> next;
  std::vector<std::uint32_t> first;  // those that wait for none
  // By step, for a receive of plain elements: the step that copies them to their place, where they may be
  // received; else kNowhere.
  std::vector<std::uint32_t> lands;
  std::vector<bool>
      lends;  // by step that encodes the caller's elements as they are: whether they are sent from there
};

struct Slot {
  bool plain;
  bool sizes;  // holds messages' sizes, in a message by the codec `none` of kUint32
  DTypeCode dtype;
  std::size_t bytes;  // bytes of the longest message made here
  std::size_t room;   // bytes for a received one; other codecs' messages fit, so that a fault names them
  std::size_t count;  // elements of the longest message
};

// Encoding of the caller's elements in messages.
struct Carriage {
  std::optional<Encoder> encoder;  // empty if all slots are plain, or Python encodes
  std::uint8_t codec;
  std::uint32_t params;
  DTypeCode dtype;    // type of the caller's elements; others than floats only with a fold
  int ranks;          // divisor of sums whose steps divide
  bool stream;        // results are written past the caches
  std::size_t bytes;  // uncompressed, for priorities
  // For a send or receive: bytes of the receiver's room. It takes a message of any codec and of any number of
  // elements that fit, with an odd number of bytes, or the elements as they are, with an even number. 0 for
  // messages whose codec and length both ends know.
  std::size_t framed = 0;
  // For reductions of uncompressed elements other than sums of floats: the operation that joins two.
  Fold fold = Fold::kNone;
  // Set if Python encodes, decodes and sums encoded messages: for each slot, bytes of its longest message.
  std::optional<std::vector<std::size_t>> bounds = std::nullopt;
};

class Program {
 public:
  // Check and compile; `fault` gets the fault found, or stays empty. `limits` has the elements of the send
  // buffer, the receive buffer and the scratch memory.
  Program(const Carriage& carriage, std::span<const std::int64_t> steps, std::span<const std::int64_t> slots,
          std::span<const std::int64_t> lists, const std::size_t (&limits)[kBuffers], int rank, int ranks,
          int channels, std::string* fault);

  // Carry the elements by a codec with messages of other lengths; returns a fault, or an empty string.
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
  std::vector<std::uint32_t> lists;  // slots that steps sum
  // Where the caller's two arrays have no memory in common, and where they are one and no message is read in
  // memory that is shared: what is sent from there is not overwritten before it has left. None where that
  // cannot be, or nothing is sent from there.
  Order apart;
  std::optional<Order> in_place;
  std::vector<Range> queues;               // sends to, or receives from, a peer on a channel
  std::vector<std::uint32_t> queue_steps;  // steps in the order in which they are posted
  std::size_t regions = 0;                 // number of regions whose owners a step finds
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
  using Edges = std::vector<std::vector<std::uint32_t>>;  // by step: those that must end before it begins
  static Order ordered(const Edges& after, std::vector<std::uint32_t> lands, std::vector<bool> lends);
  std::optional<Order> ordered_in_place(Edges after, const Edges& sends) const;
};

}  // namespace hybridcomp::engine
