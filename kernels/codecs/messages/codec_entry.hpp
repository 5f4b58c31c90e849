// Entry of a codec in C++'s table (table.hpp), which the codec's family defines beside its messages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/messages/parameters.hpp"

namespace hybridcomp {

struct Parts;

// Bytes of a payload that `check_head` may look at.
constexpr std::size_t kHeadBytes = 32;

// Functions of a codec. A payload is one of n elements of `dtype`, and none of its fields has been checked. A
// function that an entry leaves out is null.
struct CodecEntry {
  std::uint8_t id;     // on the wire
  bool exact = false;  // takes elements of every type that a header names, and gives back their bits

  // Make the encoder of these parameters; std::invalid_argument if one of them is out of its range.
  Encoder (*encoder)(CodecId id, const Parameters& parameters);

  // Check a payload's length and its first kHeadBytes (or all, if it has fewer): a Status. A device's
  // messages are checked by this before their kernels start.
  int (*check_head)(const std::uint8_t* head, std::size_t bytes, DTypeCode dtype, std::size_t n) = nullptr;

  // Check the rest of a payload that must be right to decode it, or all of it: a Status. Left out if the head
  // tells.
  int (*check)(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) = nullptr;

  // Check a payload and decode it to `out`, or with `add` (out_dtype is the sums' type of dtype) add it; a
  // Status. `out` may be partly written when it is not kOk. Elements that are no floats are decoded as they
  // are.
  int (*decode)(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

  // Check a payload of floats and open it to be read in stretches; false if it cannot be. Left out if none
  // can.
  bool (*open)(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
               Parts* parts) = nullptr;
};

}  // namespace hybridcomp
