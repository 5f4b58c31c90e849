// Whole messages of the sparse codecs whose values go as they are: nearly all of them. Where the values have
// another codec, Python puts the message together from its parts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codecs/common/kernels.hpp"
#include "codecs/messages/codec_identity.hpp"
#include "codecs/sparse/select.hpp"

namespace hybridcomp {

// Return the most bytes of a message of k out of n elements.
std::size_t sparse_message_bound(std::size_t n, std::size_t k, DTypeCode dtype);

// Write the message of these elements; `plain` is the hash of the spec of `none`, the codec of its values.
// Returns its bytes.
std::size_t write_sparse_message(const Kernels& kernels, const Selected& selected, CodecId id,
                                 std::uint32_t plain, std::uint8_t* out);

// Decode the payload of a message of n elements of `dtype`, whose values are of the same type and by `none`,
// to `out`; with `add` (kFloat32 or kFloat64) add them. Returns a Status; kOtherValues if the values have
// another type or codec. `out` may be partly written when it is not kOk. The values' own CRC is not checked:
// the whole message's covers it.
int read_sparse_payload(const Kernels& kernels, const std::uint8_t* payload, std::size_t bytes, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, bool add, int threads);

// Set the elements that a message of write_sparse_message holds to zero in `out`, n elements of `dtype`.
void clear_sparse_message(const std::uint8_t* message, std::size_t bytes, std::size_t n, DTypeCode dtype,
                          std::uint8_t* out);

// Check the payloads of such messages, each of n elements of `dtype` (kFloat32 or kFloat64), and write the
// sum of their values, added to zero in this order, to `out`. Returns a Status, as read_sparse_payload does.
struct SparsePayload {
  const std::uint8_t* data;
  std::size_t bytes;
};
int sum_sparse_payloads(const Kernels& kernels, const std::vector<SparsePayload>& payloads, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, int threads);

}  // namespace hybridcomp
