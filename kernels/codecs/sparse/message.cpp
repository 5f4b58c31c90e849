#include "codecs/sparse/message.hpp"

#include <algorithm>
#include <cstring>

#include "codecs/messages/opening.hpp"
#include "codecs/sparse/indices.hpp"

namespace hybridcomp {
namespace {

struct Prefix {
  std::uint64_t k;
  std::uint64_t index_bytes;
};
static_assert(sizeof(Prefix) == 16, "the sparse codecs' prefix is 16 bytes on the wire");

constexpr std::size_t kBeforeIndices = sizeof(Header) + sizeof(Prefix);

// Write a header before its payload, with the CRC of both.
void seal(const Kernels& kernels, CodecId id, DTypeCode dtype, std::size_t n, std::size_t payload,
          std::uint8_t* out) {
  const Header header = header_of(id, dtype, n, payload);
  std::memcpy(out, &header, sizeof(header));
  const std::uint32_t crc = kernels.crc32c(out + sizeof(header), payload, kernels.crc32c(out, kCrcAt, 0));
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
}

// Find the parts of a payload whose values are of `dtype` and by `none`. Returns a Status; kOtherValues if
// the values have another type or codec.
int part_of(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, SparsePart* part) {
  Prefix prefix;
  if (bytes < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload, sizeof(prefix));
  const std::size_t after = bytes - sizeof(prefix);
  if (prefix.index_bytes > after || after - prefix.index_bytes < sizeof(Header)) return kBadLength;
  const std::uint8_t* const indices = payload + sizeof(prefix);
  Header inner;
  std::memcpy(&inner, indices + prefix.index_bytes, sizeof(inner));
  if (inner.magic != kMagic || inner.codec != kNoneId || inner.dtype != dtype || inner.flags)
    return kOtherValues;
  const std::size_t values = after - prefix.index_bytes - sizeof(inner);
  if (inner.count != prefix.k || inner.payload != values || values % size_of(dtype) ||
      values / size_of(dtype) != prefix.k)
    return kBadLength;
  *part = {indices, prefix.index_bytes, prefix.k, indices + prefix.index_bytes + sizeof(inner)};
  return kOk;
}

}  // namespace

std::size_t sparse_message_bound(std::size_t n, std::size_t k, DTypeCode dtype) {
  return kBeforeIndices + index_bound(n, k) + sizeof(Header) + k * size_of(dtype);
}

std::size_t write_sparse_message(const Kernels& kernels, const Selected& selected, CodecId id,
                                 std::uint32_t plain, std::uint8_t* out) {
  const DTypeCode dtype = selected.dtype();
  const std::size_t k = selected.count(), index_bytes = selected.index_bytes();
  const Prefix prefix{k, index_bytes};
  std::memcpy(out + sizeof(Header), &prefix, sizeof(prefix));
  selected.write_indices(out + kBeforeIndices);
  std::uint8_t* const inner = out + kBeforeIndices + index_bytes;
  const std::size_t values = k * size_of(dtype);
  selected.copy_values(inner + sizeof(Header));
  seal(kernels, {kNoneId, plain}, dtype, k, values, inner);
  const std::size_t payload = sizeof(Prefix) + index_bytes + sizeof(Header) + values;
  seal(kernels, id, dtype, selected.elements(), payload, out);
  return sizeof(Header) + payload;
}

int read_sparse_payload(const Kernels& kernels, const std::uint8_t* payload, std::size_t bytes, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, bool add, int threads) {
  SparsePart part;
  const int status = part_of(payload, bytes, dtype, &part);
  return status == kOk ? scatter(kernels, part, n, dtype, out, add, threads) : status;
}

void clear_sparse_message(const std::uint8_t* message, std::size_t bytes, std::size_t n, DTypeCode dtype,
                          std::uint8_t* out) {
  SparsePart part;
  if (part_of(message + sizeof(Header), bytes - sizeof(Header), dtype, &part) == kOk)
    clear(part, n, size_of(dtype), out);
}

int sum_sparse_payloads(const Kernels& kernels, const std::vector<SparsePayload>& payloads, std::size_t n,
                        DTypeCode dtype, std::uint8_t* out, int threads) {
  std::vector<SparsePart> parts(payloads.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const int status = part_of(payloads[i].data, payloads[i].bytes, dtype, &parts[i]);
    if (status != kOk) return status;
  }
  return scatter_sum(kernels, parts, n, dtype, out, threads);
}

}  // namespace hybridcomp
