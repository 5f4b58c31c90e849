// Kernels of the sign quantizer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"

namespace hybridcomp {

struct SignKernels {
  // Of `n` elements (whole blocks; the last may be short) write each block's mean magnitude to `means`
  // (float; double for kFloat64) and the signs, a bit each, to `bits`.
  void (*encode)(const void* src, DTypeCode dtype, std::size_t n, std::uint32_t block, std::uint8_t* means,
                 std::uint8_t* bits);

  // The inverse, writing to or adding to `out` of `out_dtype`. `wide`: the message is of doubles. With `add`,
  // `out_dtype` is kFloat32, or kFloat64 when `wide`.
  void (*decode)(const std::uint8_t* means, const std::uint8_t* bits, bool wide, std::size_t n,
                 std::uint32_t block, void* out, DTypeCode out_dtype, bool add);
};

// Bytes of the payload of n elements.
std::size_t sign_payload(std::size_t n, DTypeCode dtype, std::uint32_t block);

// Write the message of `n` elements at `src` to `out`; returns its bytes. `params` is the header's hash.
std::size_t sign_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                         std::uint32_t block, std::uint8_t codec, std::uint32_t params, int threads,
                         std::uint8_t* out);

// Whether a payload's prefix and length are right; returns a Status.
int check_sign(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n);

// Decode a payload of `n` elements to, or add it to, `out`; returns a Status. Writes nothing unless kOk.
int decode_sign(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype, bool add);

}  // namespace hybridcomp
