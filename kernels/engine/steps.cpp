// Steps of an execution that compute.
#include <algorithm>
#include <cstring>
#include <new>

#include "codecs/common/crc32c.hpp"
#include "codecs/convert/convert.hpp"
#include "codecs/messages/opening.hpp"
#include "codecs/messages/table.hpp"
#include "engine/engine.hpp"
#include "engine/execution.hpp"

namespace hybridcomp::engine {
namespace {

constexpr std::size_t kFoldTile = std::size_t(1) << 15;  // bytes that stay in L1 while all messages are added

// Block held for the length of a step.
class Room {
 public:
  Room(Engine& engine, std::size_t bytes) : engine_(engine), data_(engine.take(bytes)) {}
  ~Room() { engine_.give(data_); }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  std::uint8_t* data() const { return data_; }

 private:
  Engine& engine_;
  std::uint8_t* data_;
};

}  // namespace

bool Execution::run(std::uint32_t index) {
  const Step& step = program_->steps[index];
  try {
    switch (step.kind) {
      case kEncode:
        return encode(index, step);
      case kCheck:
        return check(index, step, step.slot);
      case kDecode:
        return decode(index, step);
      case kSum:
      case kSumEncode:
        return sum(index, step);
      case kSizes:
        return write_sizes(index, step);
      case kCut:
        return cut(index, step);
      default: {
        const std::size_t size = bytes_of(program_->dtype_of(step.span));
        std::memmove(address(step.out, step.out_at), address(step.span, step.span_at), step.count * size);
        return true;
      }
    }
  } catch (const std::bad_alloc&) {
    fail(Fault::kMemory, index, -1);
    return false;
  }
}

bool Execution::encode(std::uint32_t index, const Step& step) {
  const Slot& slot = program_->slots[step.slot];
  std::uint8_t* const from = address(step.span, step.span_at);
  std::size_t bytes = step.count * bytes_of(slot.dtype);
  if (slot.plain && (step.span == kScratch ? unshared_ : lends_ && order_->lends[index])) {
    filled(step, from, bytes, false, true);
    return true;
  }
  std::uint8_t* const to = room(step.slot, slot.bytes);
  if (slot.plain)
    std::memcpy(to, from, bytes);
  else if (step.memory >= 0)
    bytes = memory_->encode(kernels(), *program_->carriage.encoder, from, program_->dtype_of(step.span),
                            step.count, static_cast<std::size_t>(step.memory), thread_count(), to);
  else
    bytes = program_->carriage.encoder->write(kernels(), from, slot.dtype, step.count, thread_count(), to);
  if (!bytes) {
    fail(Fault::kCodec, index, -1);
    return false;
  }
  if (program_->carriage.framed && bytes % 2 == 0) to[bytes++] = 0;
  filled(step, to, bytes, false, true);
  return true;
}

// Check the message in a slot, once.
bool Execution::check(std::uint32_t index, const Step& step, std::uint32_t at) {
  Held& held = held_[at];
  const Slot& slot = program_->slots[at];
  const Carriage& carriage = program_->carriage;
  bool good = false;
  if (slot.plain) {
    good = held.bytes == step.count * bytes_of(slot.dtype);
  } else {
    const Expected expected{carriage.codec, carriage.params, slot.dtype, step.count};
    good = check_message(held.data, held.bytes, expected, !held.trusted);
  }
  if (good)
    held.trusted = true;
  else
    fail(slot.plain ? Fault::kLength : Fault::kMessage, index, held_[at].peer, 0, &held);
  return good;
}

// Accept a message that its sender has framed; a message that is decoded elsewhere ends the operation, which
// then holds it.
bool Execution::accept(std::uint32_t index, const Step& step) {
  const Held& held = held_[step.slot];
  const Carriage& carriage = program_->carriage;
  const std::size_t size = bytes_of(carriage.dtype);
  std::uint8_t* const to = address(step.out, step.out_at);
  std::size_t elements = held.bytes / size;
  bool good = false;
  if (held.bytes % 2 == 0) {
    good = held.bytes <= step.count * size;
    if (good) std::memcpy(to, held.data, held.bytes);
  } else if (Header h; read_header(held.data, held.bytes, &h) && h.dtype == carriage.dtype) {
    elements = h.count;
    good = elements <= step.count && crc_of(held.data, h.payload) == h.crc &&
           decode_stretches(kernels(), {h.codec, held.data + sizeof(h), h.payload, carriage.dtype}, elements,
                            to, carriage.dtype, carriage.stream);
  }
  if (!good) {
    // No rank uses its memory any more: the operation ends like one that succeeded.
    failure_ = {Fault::kMessage, index, peer(step), 0, held.bytes, {held.data, held.data + held.bytes}};
    finish();
    return false;
  }
  const Mpi& mpi = engine_.mpi();
  const std::size_t bytes = held.bytes % 2 ? elements * size : held.bytes;
  mpi.set_elements(status_.data(), mpi.byte, static_cast<int>(bytes));
  return true;
}

bool Execution::decode(std::uint32_t index, const Step& step) {
  if (program_->carriage.framed) return accept(index, step);
  if (!check(index, step, step.slot)) return false;
  const Slot& slot = program_->slots[step.slot];
  const Held& held = held_[step.slot];
  const Kernels& k = kernels();
  std::uint8_t* const to = address(step.out, step.out_at);
  const DTypeCode type = program_->dtype_of(step.out);
  const bool stream = program_->carriage.stream && step.out == kRecvBuffer;
  if (slot.plain && slot.dtype == type) {
    if (held.data == to) {
      // The message was received in place.
    } else if (stream) {
      k.convert->stream(held.data, to, held.bytes);
      streamed();
    } else {
      std::memcpy(to, held.data, held.bytes);
    }
    return true;
  }
  Payload payload;
  if (!this->payload(index, step, step.slot, &payload)) return false;
  if (step.memory >= 0 ? decode_result(payload, step)
                       : decode_stretches(k, payload, step.count, to, type, stream))
    return true;
  fail(Fault::kMessage, index, held.peer, 0, &held);
  return false;
}

// Find the payload of the message in a slot.
bool Execution::payload(std::uint32_t index, const Step& step, std::uint32_t at, Payload* payload) {
  if (!check(index, step, at)) return false;
  const Slot& slot = program_->slots[at];
  const Held& held = held_[at];
  if (slot.plain) {
    *payload = {kNoneId, held.data, held.bytes, slot.dtype};
    return true;
  }
  if (payload_of(held.data, held.bytes, program_->carriage.dtype, step.count, payload)) return true;
  fail(Fault::kMessage, index, held_[at].peer, 0, &held);
  return false;
}

bool Execution::sum(std::uint32_t index, const Step& step) {
  const Carriage& carriage = program_->carriage;
  const auto slots = program_->list(step.slots);
  payloads_.resize(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (!payload(index, step, slots[i], &payloads_[i])) return false;

  if (carriage.fold != Fold::kNone) return fold(step);
  if (step.memory >= 0) return sum_with_feedback(index, step);
  const Kernels& k = kernels();
  const bool owned = step.span != kNoBuffer, wanted = step.out != kNoBuffer;
  const DTypeCode own = owned ? program_->dtype_of(step.span) : carriage.dtype;
  const bool stream = carriage.stream && step.out == kRecvBuffer;
  Sum sum{owned ? address(step.span, step.span_at) : nullptr,
          own,
          {},
          step.count,
          step.divide ? carriage.ranks : 1,
          own,
          wanted ? address(step.out, step.out_at) : nullptr,
          wanted ? program_->dtype_of(step.out) : own,
          stream};
  if (step.kind == kSum) {
    sum.dtype = sum.result_dtype;
    if (store_sum(k, sum, payloads_)) return true;
  } else {
    const Slot& slot = program_->slots[step.slot];
    sum.dtype = slot.dtype;
    if (slot.plain && unshared_ && wanted && sum.result_dtype == slot.dtype) {
      sum.stream = false;  // it is sent from there
      if (store_sum(k, sum, payloads_)) {
        filled(step, sum.result, step.count * bytes_of(slot.dtype), false, true);
        return true;
      }
      fail_sum(index, step);
      return false;
    }
    std::uint8_t* const to = room(step.slot, slot.bytes);
    std::size_t bytes = 0;
    if (slot.plain) {
      std::uint8_t* const also = sum.result;
      sum.result = to;
      sum.stream = stream && also;
      if (store_sum_twice(k, sum, payloads_, also)) bytes = step.count * bytes_of(slot.dtype);
    } else {
      bytes = encode_sum(k, *carriage.encoder, sum, payloads_, to);
    }
    if (bytes) {
      filled(step, to, bytes, false, true);
      return true;
    }
  }
  fail_sum(index, step);
  return false;
}

// Fold uncompressed elements: those of a span if there is one, and those of the payloads, in order.
bool Execution::fold(const Step& step) {
  const Fold how = program_->carriage.fold;
  const int dtype = program_->carriage.dtype;
  const std::size_t size = bytes_of(dtype), bytes = step.count * size;
  const std::uint8_t* const own = step.span == kNoBuffer ? nullptr : address(step.span, step.span_at);
  std::uint8_t* const out = step.out == kNoBuffer ? nullptr : address(step.out, step.out_at);
  const bool sends = step.kind == kSumEncode, there = out && (!sends || unshared_);  // where it is sent from
  std::uint8_t* const sum = there ? out : room(step.slot, program_->slots[step.slot].bytes);
  std::span<const Payload> others = payloads_;
  const std::uint8_t* first = own;
  if (!own) {
    first = others.front().data;
    others = others.subspan(1);
  }
  for (std::size_t at = 0; at < bytes; at += kFoldTile) {
    const std::size_t n = std::min(kFoldTile, bytes - at);
    std::memmove(sum + at, first + at, n);
    for (const Payload& p : others) kernels().fold->into(how, dtype, p.data + at, sum + at, n / size);
    if (out && !there) std::memcpy(out + at, sum + at, n);
  }
  if (sends) filled(step, sum, bytes, false, true);
  return true;
}

// Sum a span that this rank owns, with its memory of error feedback.
bool Execution::sum_with_feedback(std::uint32_t index, const Step& step) {
  const Kernels& k = kernels();
  const Encoder& encoder = *program_->carriage.encoder;
  const bool owned = step.span != kNoBuffer;  // else its own part is one of the messages, already corrected
  const DTypeCode wide = program_->wide(), own = owned ? program_->dtype_of(step.span) : wide;
  const std::uint8_t* const from = owned ? address(step.span, step.span_at) : nullptr;
  const auto start = static_cast<std::size_t>(step.memory);
  const int threads = thread_count(), ranks = step.divide ? program_->carriage.ranks : 1;
  const Room total(engine_, step.count * bytes_of(wide));
  bool good = true;
  if (!owned || memory_->adds_own()) {
    good = store_sum(k, {from, own, {}, step.count, 1, wide, total.data(), wide, false}, payloads_);
  } else {
    good = memory_->own(k, encoder, from, own, step.count, start, threads, total.data());
    for (const Payload& p : payloads_)
      good = good && decode_payload(k, p.codec, p.data, p.bytes, p.dtype, step.count, threads, total.data(),
                                    wide, true) == kOk;
  }
  if (!good) {
    fail_sum(index, step);
    return false;
  }
  if (step.kind == kSum) {
    if (ranks != 1) k.convert->divide(total.data(), wide == kFloat64, step.count, ranks);
    convert_all(k, total.data(), wide, step.count, threads, address(step.out, step.out_at),
                program_->dtype_of(step.out), false);
    return true;
  }
  std::uint8_t* const to = room(step.slot, program_->slots[step.slot].bytes);
  const std::size_t bytes =
      memory_->encode_sum(k, encoder, total.data(), step.count, start, ranks, threads, to);
  Payload own_message;
  if (!bytes || !payload_of(to, bytes, wide, step.count, &own_message) ||
      (step.out != kNoBuffer && !decode_result(own_message, step))) {
    fail(Fault::kCodec, index, -1);
    return false;
  }
  filled(step, to, bytes, false, true);
  return true;
}

// Write the result that a message of an owner's sum decodes to.
bool Execution::decode_result(const Payload& payload, const Step& step) {
  const Kernels& k = kernels();
  std::uint8_t* const to = address(step.out, step.out_at);
  const DTypeCode wide = program_->wide(), type = program_->dtype_of(step.out);
  if (!memory_->tracks())
    return decode_stretches(k, payload, step.count, to, type, program_->carriage.stream);
  const Room values(engine_, step.count * bytes_of(wide));
  if (!decode_stretches(k, payload, step.count, values.data(), wide, false)) return false;
  memory_->result(k, values.data(), step.count, static_cast<std::size_t>(step.memory), thread_count());
  convert_all(k, values.data(), wide, step.count, thread_count(), to, type, false);
  return true;
}

// Fail with the message of a sum that cannot be decoded: a checked payload may still turn out damaged as it
// is decoded.
void Execution::fail_sum(std::uint32_t index, const Step& step) {
  const DTypeCode wide = program_->wide();
  const Room values(engine_, step.count * bytes_of(wide));
  for (const std::uint32_t at : program_->list(step.slots)) {
    const Held& held = held_[at];
    Payload found;
    if (program_->slots[at].plain) continue;
    if (!payload_of(held.data, held.bytes, program_->carriage.dtype, step.count, &found) ||
        decode_payload(kernels(), found.codec, found.data, found.bytes, found.dtype, step.count,
                       thread_count(), values.data(), wide, false) != kOk)
      return fail(Fault::kMessage, index, held_[at].peer, 0, &held);
  }
  fail(Fault::kCodec, index, -1);
}

}  // namespace hybridcomp::engine
