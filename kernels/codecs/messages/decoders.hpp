// Payloads of any codec that is decoded in C++ alone, by the codec's wire id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/common/kernels.hpp"
#include "codecs/common/status.hpp"

namespace hybridcomp {

// Whether the lengths and fields of a payload of n elements are right: a Status, kOtherCodec if it is decoded
// elsewhere. Of a sparse codec's only kOtherCodec.
int check_payload(std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype,
                  std::size_t n);

// Check a payload and decode it to `out`, or with `add` (out_dtype is the sums' type of dtype) add it; a
// Status. kOtherCodec, and for a sparse codec kOtherValues, says that it is decoded elsewhere. `out` may be
// partly written when it is not kOk.
int decode_payload(const Kernels& k, std::uint8_t codec, const std::uint8_t* payload, std::size_t bytes,
                   DTypeCode dtype, std::size_t n, int threads, std::uint8_t* out, DTypeCode out_dtype,
                   bool add);

}  // namespace hybridcomp
