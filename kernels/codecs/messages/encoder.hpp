// Encoder: a codec with its parameters, which Python makes once and calls for every array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "codecs/common/kernels.hpp"
#include "codecs/messages/codec_identity.hpp"

namespace hybridcomp {

struct Sum;

struct Encoder {
  CodecIdentity identity;

  // The most bytes of a message of n elements, header included; 0 if the codec does not take this type.
  std::function<std::size_t(std::size_t n, DTypeCode dtype)> bound;

  // Write the message of n elements to `out`, which has room for it; return its bytes.
  std::function<std::size_t(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                            int threads, std::uint8_t* out)>
      write;

  // Write the message of a sum (sums.hpp) while it is made; return its bytes, 0 if that is not possible.
  // Empty if it never is.
  std::function<std::size_t(const Kernels& k, const Sum& sum, int threads, std::uint8_t* out)> write_sum = {};
};

}  // namespace hybridcomp
