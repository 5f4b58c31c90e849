// Kernels of MPC, and whole messages around them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/mpc.hpp"

namespace hybridcomp {

struct MpcKernels {
  // Encode a chunk of m (1 .. kMpcChunk) words of `width` (2, 4, 8) bytes to `out`, which has `room` bytes,
  // at least those of m words; return the chunk's bytes: those of m words if it is the words themselves. What
  // follows it in `out` may be overwritten.
  std::size_t (*encode)(const std::uint8_t* src, std::size_t m, int width, std::uint32_t lag,
                        std::uint8_t* out, std::size_t room);

  // Decode a chunk of m words from exactly `bytes` bytes; returns a Status.
  int (*decode)(const std::uint8_t* src, std::size_t bytes, std::size_t m, int width, std::uint32_t lag,
                std::uint8_t* out);
};

// The payload begins with this, then a 16-bit size for each chunk, the chunks, and what is less than a word.
struct MpcPrefix {
  std::uint32_t lag;
  std::uint32_t reserved;  // zero
};
static_assert(sizeof(MpcPrefix) == 8, "MPC's prefix is 8 bytes on the wire");

// Largest payload of `bytes` bytes of data.
std::size_t mpc_bound(std::size_t bytes, int width);

// Write the message of `bytes` bytes (`count` elements of type `dtype`, any of the header's codes) to `out`,
// which has room for the header and mpc_bound; returns its bytes.
std::size_t mpc_message(const Kernels& k, const std::uint8_t* src, std::size_t bytes, int width,
                        std::uint32_t lag, std::uint8_t codec, std::uint8_t dtype, std::uint64_t count,
                        std::uint32_t params, int threads, std::uint8_t* out);

// Whether a payload's lengths add up; returns a Status.
int check_mpc(const std::uint8_t* payload, std::size_t payload_bytes, std::size_t bytes, int width);

// Where the values go: as the bytes they are, or, with `convert`, as floats of type `to` (written, or added).
struct MpcTarget {
  std::uint8_t* out;
  DTypeCode from, to;
  bool convert, add;
};

// Decode a payload of `bytes` bytes of data; returns a Status. Where it is not kOk, some of the target may
// have been written.
int mpc_values(const Kernels& k, const std::uint8_t* payload, std::size_t payload_bytes, std::size_t bytes,
               int width, int threads, const MpcTarget& target);

}  // namespace hybridcomp
