// Kernels of error-bounded compression, and whole messages around them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"
#include "hybridcomp/bounded.hpp"

namespace hybridcomp {

struct BoundedKernels {
  // The least and the largest finite value, denormal numbers taken for zero; infinity and
  // -infinity if there is none.
  void (*range)(const void* src, DTypeCode dtype, std::size_t n, double* low, double* high);

  // Encode `n` elements: a byte for each block to `codes`, the blocks to `data`; returns the bytes of these,
  // at most n elements' own. `room` is what may be written at `data`, at least as much.
  std::size_t (*encode)(const void* src, DTypeCode dtype, std::size_t n, double bound, std::uint8_t* codes,
                        std::uint8_t* data, std::size_t room);

  // Decode to, or add to, `out`. The codes are valid and the blocks take no more than `bytes` at `data`.
  void (*decode)(const std::uint8_t* codes, const std::uint8_t* data, std::size_t bytes, DTypeCode dtype,
                 std::size_t n, double bound, void* out, DTypeCode out_dtype, bool add);
};

// The largest payload of n elements.
constexpr std::size_t bounded_payload(std::size_t n, DTypeCode dtype) {
  return sizeof(BoundedPrefix) + blocks_of(n, kBoundedBlock) + n * size_of(dtype);
}

// Write the message of `n` elements at `src` to `out`; returns its bytes. `error` is absolute, or relative to
// the range of the values. `params` is the header's hash.
std::size_t bounded_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                            double error, bool relative, std::uint8_t codec, std::uint32_t params,
                            int threads, std::uint8_t* out);

// Whether a payload's bound, codes and lengths are right; returns a Status.
int check_bounded(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n);

// Decode a payload of `n` elements to, or add it to, `out`; returns a Status. Writes nothing unless kOk.
int decode_bounded(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                   std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

}  // namespace hybridcomp
