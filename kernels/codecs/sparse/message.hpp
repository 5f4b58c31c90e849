// Whole messages of the sparse codecs whose values go as they are: nearly all of them. What the values' own
// codec needs, if it is another, Python puts together from the parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/common/kernels.hpp"
#include "codecs/messages/codec_identity.hpp"
#include "codecs/sparse/select.hpp"

namespace hybridcomp {

// The most bytes of a message of k out of n elements.
std::size_t sparse_message_bound(std::size_t n, std::size_t k, DTypeCode dtype);

// Write the message of these elements; `plain` is the hash of the spec of `none`, which its
// values go by. Returns its bytes.
std::size_t write_sparse_message(const Kernels& kernels, const Selected& selected, CodecId id,
                                 std::uint32_t plain, std::uint8_t* out);

// Decode the payload of a message of n elements of `dtype`, whose values are of the same type and by `none`,
// to `out`; with `add` (kFloat32 or kFloat64) add them. Returns a Status; kOtherValues if the values are not
// so. `out` may be partly written when it is not kOk. The values' own CRC is not looked at: the whole
// message's covers it.
int read_sparse_payload(const Kernels& kernels, const std::uint8_t* payload, std::size_t bytes, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, bool add, int threads);

// Set the elements that a message of write_sparse_message holds to zero in `out`, n elements of `dtype`.
void clear_sparse_message(const std::uint8_t* message, std::size_t bytes, std::size_t n, DTypeCode dtype,
                          std::uint8_t* out);

// Check the payloads of such messages, each of n elements of `dtype` (kFloat32 or kFloat64), and write the
// sum of their values, added to zero in this order, to `out`. A Status, as of read_sparse_payload.
struct SparsePayload {
  const std::uint8_t* data;
  std::size_t bytes;
};
int sum_sparse_payloads(const Kernels& kernels, const std::vector<SparsePayload>& payloads, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, int threads);

}  // namespace hybridcomp
