// Stand-in for Python: computes the steps of an execution that the engine asks for.
#pragma once

#include <cstring>
#include <vector>

#include "codecs/feedback/memories.hpp"
#include "engine/engine.hpp"

namespace checked {

using namespace hybridcomp;
using namespace hybridcomp::engine;

// The arrays of floats of one operation.
struct Arrays {
  const float* send;
  float* recv;
  PlainMemory* memory;  // or null
};

class Answer {
 public:
  Answer(const Program& program, const Asked& asked, const Arrays& arrays)
      : program_(program),
        encoder_(*program.carriage.encoder),
        step_(program.steps[asked.step]),
        asked_(asked),
        arrays_(arrays) {}

  // Compute the step; return the bytes of the message that it has made.
  std::size_t compute() const {
    if (step_.kind == kEncode) return encode();
    if (step_.kind == kDecode) {
      decode(asked_.messages[0]);
      return 0;
    }
    std::vector<Payload> payloads;
    const auto slots = program_.list(step_.slots);
    for (std::size_t i = 0; i < slots.size(); ++i)
      payloads.push_back(payload(asked_.messages[i], program_.slots[slots[i]].plain));
    return step_.memory >= 0 ? sum_with_feedback(payloads) : sum(payloads);
  }

 private:
  std::uint8_t* at(BufferId buffer, std::size_t element) const {
    float* const base = buffer == kSendBuffer   ? const_cast<float*>(arrays_.send)
                        : buffer == kRecvBuffer ? arrays_.recv
                                                : reinterpret_cast<float*>(asked_.scratch.data());
    return buffer == kNoBuffer ? nullptr : reinterpret_cast<std::uint8_t*>(base + element);
  }
  std::uint8_t* own() const { return at(step_.span, step_.span_at); }
  std::uint8_t* out() const { return at(step_.out, step_.out_at); }
  int divisor() const { return step_.divide ? program_.carriage.ranks : 1; }

  Payload payload(std::span<const std::uint8_t> message, bool plain) const {
    Payload found{kNoneId, message.data(), message.size(), kFloat32};
    if (!plain) payload_of(message.data(), message.size(), kFloat32, step_.count, &found);
    return found;
  }

  std::size_t encode() const {
    if (step_.memory < 0)
      return encoder_.write(kernels(), own(), kFloat32, step_.count, 1, asked_.room.data());
    return arrays_.memory->encode(kernels(), encoder_, own(), kFloat32, step_.count,
                                  static_cast<std::size_t>(step_.memory), 1, asked_.room.data());
  }

  void decode(std::span<const std::uint8_t> message) const {
    decode_stretches(kernels(), payload(message, false), step_.count, out(), kFloat32, false);
  }

  std::size_t sum(std::span<const Payload> payloads) const {
    const Sum sum{own(), kFloat32, {}, step_.count, divisor(), kFloat32, out(), kFloat32, false};
    if (step_.kind == kSumEncode) return encode_sum(kernels(), encoder_, sum, payloads, asked_.room.data());
    store_sum(kernels(), sum, payloads);
    return 0;
  }

  std::size_t sum_with_feedback(std::span<const Payload> payloads) const {
    std::vector<float> total(step_.count);
    auto* const to = reinterpret_cast<std::uint8_t*>(total.data());
    store_sum(kernels(), {own(), kFloat32, {}, step_.count, 1, kFloat32, to, kFloat32, false}, payloads);
    const std::size_t bytes =
        arrays_.memory->encode_sum(kernels(), encoder_, to, step_.count,
                                   static_cast<std::size_t>(step_.memory), divisor(), 1, asked_.room.data());
    if (step_.out != kNoBuffer) decode(asked_.room.first(bytes));
    return bytes;
  }

  const Program& program_;
  const Encoder& encoder_;
  const Step& step_;
  const Asked& asked_;
  const Arrays& arrays_;
};

}  // namespace checked
