// Kernels of MPC.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/mpc.hpp"

namespace hybridcomp {

struct MpcKernels {
  // Encode a chunk of m (1 .. kMpcChunk) words of `width` (2, 4, 8) bytes to `out`, which has `room` bytes,
  // at least those of m words; return the chunk's bytes: those of m words if it is the words themselves. The
  // bytes after it in `out` may be overwritten.
  std::size_t (*encode)(const std::uint8_t* src, std::size_t m, int width, std::uint32_t lag,
                        std::uint8_t* out, std::size_t room);

  // Decode a chunk of m words from exactly `bytes` bytes; returns a Status.
  int (*decode)(const std::uint8_t* src, std::size_t bytes, std::size_t m, int width, std::uint32_t lag,
                std::uint8_t* out);
};

// The payload begins with this, then a 16-bit size for each chunk, the chunks, and the bytes that are less
// than a word.
struct MpcPrefix {
  std::uint32_t lag;
  std::uint32_t reserved;  // zero
};
static_assert(sizeof(MpcPrefix) == 8, "MPC's prefix is 8 bytes on the wire");

}  // namespace hybridcomp
