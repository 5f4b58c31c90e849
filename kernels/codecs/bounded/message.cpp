// Messages of error-bounded compression around its kernels.
#include <array>
#include <cstring>
#include <utility>

#include "codecs/bounded/bounded.hpp"
#include "codecs/bounded/coders.hpp"
#include "codecs/common/parallel.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/opening.hpp"

namespace hybridcomp {
namespace {

constexpr std::size_t kStep = 8192;     // elements encoded between two looks at the CRC
constexpr std::size_t kSpan = 262144;   // elements whose range is found at a time
constexpr std::size_t kCrcUnit = 6144;  // bytes that the CRC takes at its full speed

double relative_bound(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                      double relative, int threads) {
  double low[kMaxThreads], high[kMaxThreads];
  const int ranges = ranges_of(n, kStep, threads);
  split(n, kStep, ranges, [&](int r, std::size_t begin, std::size_t end) {
    low[r] = float_of(Real<double>::kInfinity);
    high[r] = -low[r];
    // The last spans are read first: the beginning is then still in the caches when the encoder starts there.
    for (std::size_t e = end; e > begin;) {
      const std::size_t at = begin + (e - begin - 1) / kSpan * kSpan;
      double least, largest;
      k.bounded->range(src + at * size_of(dtype), dtype, e - at, &least, &largest);
      low[r] = std::min(low[r], least);
      high[r] = std::max(high[r], largest);
      e = at;
    }
  });
  return bounded_relative(*std::min_element(low, low + ranges), *std::max_element(high, high + ranges),
                          relative);
}

// Bytes and CRCs of one range's encoded blocks.
struct Part {
  std::size_t codes, bytes;
  std::uint32_t crc_codes, crc_bytes;
};

Part encode_range(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, double bound,
                  std::uint8_t* codes, std::uint8_t* data) {
  const std::size_t size = size_of(dtype), room = n * size;
  Part part{blocks_of(n, kBoundedBlock), 0, 0, 0};
  std::size_t summed = 0;
  for (std::size_t at = 0; at < n; at += kStep) {
    const std::size_t m = std::min(kStep, n - at);
    part.bytes += k.bounded->encode(src + at * size, dtype, m, bound, codes + at / kBoundedBlock,
                                    data + part.bytes, room - part.bytes);
    const std::size_t whole = (part.bytes - summed) / kCrcUnit * kCrcUnit;
    part.crc_bytes = k.crc32c(data + summed, whole, part.crc_bytes);
    summed += whole;
  }
  part.crc_bytes = k.crc32c(data + summed, part.bytes - summed, part.crc_bytes);
  part.crc_codes = k.crc32c(codes, part.codes, 0);
  return part;
}

// Result of sum_sizes if a block has no valid code.
constexpr std::size_t kBadCode = ~std::size_t(0);

using Sizes = std::array<std::uint16_t, 256>;

Sizes block_sizes(DTypeCode dtype) {
  Sizes sizes;
  for (std::size_t c = 0; c < sizes.size(); ++c)
    sizes[c] = static_cast<std::uint16_t>(
        bounded_bytes(static_cast<std::uint8_t>(c), kBoundedBlock, size_of(dtype)));
  return sizes;
}

std::size_t sum_sizes(const Sizes& sizes, const std::uint8_t* codes, std::size_t count) {
  std::size_t sum = 0;
  unsigned any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += sizes[codes[i]];
    any |= sizes[codes[i]];
  }
  return any & 0x8000u ? kBadCode : sum;
}

std::size_t most_bytes(std::size_t n, DTypeCode dtype) {
  return sizeof(BoundedPrefix) + blocks_of(n, kBoundedBlock) + n * size_of(dtype);
}

BoundedPrefix prefix_of(const std::uint8_t* payload) {
  BoundedPrefix prefix;
  std::memcpy(&prefix, payload, sizeof(prefix));
  return prefix;
}

// Return the coder of a code; null for blocks, and where there is no such coder.
const BoundedCoder* coder_of(std::uint32_t code) {
  return code == kBoundedRows ? &kRowCoder : code == kBoundedHuffman ? &kHuffmanCoder : nullptr;
}

int check_head(const std::uint8_t* head, std::size_t bytes, DTypeCode, std::size_t n) {
  if (bytes < sizeof(BoundedPrefix)) return kBadLength;
  const BoundedPrefix prefix = prefix_of(head);
  const BoundedCoder* const coder = coder_of(prefix.coder);
  if (prefix.coder == kBoundedPlanes && prefix.block != kBoundedBlock) return kBadBoundedBlock;
  if (prefix.coder != kBoundedPlanes && (!coder || !coder->takes(prefix.block))) return kBadCoder;
  if (bits_of(prefix.bound) >= Real<double>::kInfinity) return kBadBound;  // negative, infinite or NaN
  const std::size_t least = coder ? coder->least(n, prefix.block) : blocks_of(n, kBoundedBlock);
  return least <= bytes - sizeof(prefix) ? kOk : kBadLength;
}

// Check a payload of blocks and find where the data of each of `ranges` ranges of elements begins.
int open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int ranges,
         std::size_t* starts) {
  const int status = check_head(payload, bytes, dtype, n);
  if (status != kOk) return status;
  const std::uint8_t* codes = payload + sizeof(BoundedPrefix);
  const Sizes sizes = block_sizes(dtype);
  split(n, kStep, ranges, [&](int r, std::size_t begin, std::size_t end) {
    const std::size_t full = end / kBoundedBlock - begin / kBoundedBlock, rest = end % kBoundedBlock;
    starts[r] = sum_sizes(sizes, codes + begin / kBoundedBlock, full);
    if (!rest || starts[r] == kBadCode) return;
    const std::uint32_t last = bounded_bytes(codes[end / kBoundedBlock], rest, size_of(dtype));
    starts[r] = last & 0x8000u ? kBadCode : starts[r] + last;
  });
  std::size_t sum = sizeof(BoundedPrefix) + blocks_of(n, kBoundedBlock);
  for (int r = 0; r < ranges; ++r) {
    if (starts[r] == kBadCode) return kBadBoundedCode;
    sum += std::exchange(starts[r], sum);
  }
  return sum == bytes ? kOk : kBadLength;
}

std::size_t write_blocks(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                         double bound, CodecId id, int threads, std::uint8_t* out) {
  const BoundedPrefix prefix{bound, kBoundedBlock, kBoundedPlanes};
  std::memcpy(out + sizeof(Header), &prefix, sizeof(prefix));
  std::uint8_t* const codes = out + sizeof(Header) + sizeof(prefix);
  std::uint8_t* const data = codes + blocks_of(n, kBoundedBlock);

  // Each range of elements has room for all of them as they are; gaps are closed afterwards.
  Part parts[kMaxThreads];
  std::size_t begins[kMaxThreads];
  const int ranges = ranges_of(n, kStep, threads);
  split(n, kStep, ranges, [&](int r, std::size_t begin, std::size_t end) {
    begins[r] = begin * size_of(dtype);
    parts[r] = encode_range(k, src + begins[r], dtype, end - begin, bound, codes + begin / kBoundedBlock,
                            data + begins[r]);
  });
  std::size_t bytes = 0;
  for (int r = 0; r < ranges; ++r) {
    if (bytes != begins[r]) std::memmove(data + bytes, data + begins[r], parts[r].bytes);
    bytes += parts[r].bytes;
  }

  const std::size_t payload = sizeof(prefix) + blocks_of(n, kBoundedBlock) + bytes;
  const Header header = header_of(id, dtype, n, payload);
  std::memcpy(out, &header, sizeof(header));
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  crc = k.crc32c(out + sizeof(header), sizeof(prefix), crc);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_codes, parts[r].codes);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_bytes, parts[r].bytes);
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + payload;
}

std::size_t write_coded(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                        BoundedPrefix prefix, CodecId id, int threads, std::uint8_t* out) {
  std::uint8_t* const data = out + sizeof(Header) + sizeof(prefix);
  std::memcpy(out + sizeof(Header), &prefix, sizeof(prefix));
  const std::size_t bytes =
      coder_of(prefix.coder)->encode(k, src, dtype, n, prefix.bound, prefix.block, threads, data);
  const Header header = header_of(id, dtype, n, sizeof(prefix) + bytes);
  std::memcpy(out, &header, sizeof(header));
  const std::uint32_t crc = k.crc32c(out + sizeof(header), sizeof(prefix) + bytes, k.crc32c(out, kCrcAt, 0));
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + sizeof(prefix) + bytes;
}

// Return the prefix, with a bound of 0, for the coder that the parameters name.
BoundedPrefix coded_by(const Parameters& parameters) {
  const std::string& coder = parameters.word("coder");
  if (coder == "planes") return {0, kBoundedBlock, kBoundedPlanes};
  if (coder == "huffman") return {0, kHuffmanChunk, kBoundedHuffman};
  if (coder != "lz") Parameters::refuse("coder", "planes, lz or huffman");
  return {0, parameters.whole<std::uint32_t>("vector", 1, kMostRow), kBoundedRows};
}

Encoder make(CodecId id, const Parameters& parameters) {
  const bool relative = !parameters.has("abs");
  const char* const name = relative ? "rel" : "abs";
  const double error = parameters.number(name);
  if (bits_of(error) == 0 || bits_of(error) >= Real<double>::kInfinity)
    Parameters::refuse(name, "a number above 0");
  const BoundedPrefix like = coded_by(parameters);
  const BoundedCoder* const coder = coder_of(like.coder);
  return {{id},
          [=](std::size_t n, DTypeCode dtype) {
            return sizeof(Header) +
                   (coder ? sizeof(like) + coder->most(n, dtype, like.block) : most_bytes(n, dtype));
          },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            const double bound = relative ? relative_bound(k, src, dtype, n, error, threads) : error;
            if (!coder) return write_blocks(k, src, dtype, n, bound, id, threads, out);
            return write_coded(k, src, dtype, n, {bound, like.block, like.coder}, id, threads, out);
          }};
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  const int status = check_head(payload, bytes, dtype, n);
  if (status != kOk) return status;
  const BoundedPrefix prefix = prefix_of(payload);
  if (const BoundedCoder* const coder = coder_of(prefix.coder))
    return coder->check(payload + sizeof(prefix), bytes - sizeof(prefix), dtype, n, prefix.block);
  std::size_t start;
  return open(payload, bytes, dtype, n, 1, &start);
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  int status = check_head(payload, bytes, dtype, n);
  if (status != kOk) return status;
  const BoundedPrefix prefix = prefix_of(payload);
  if (const BoundedCoder* const coder = coder_of(prefix.coder))
    return coder->decode(k, {payload + sizeof(prefix), bytes - sizeof(prefix), dtype, n, prefix.bound},
                         prefix.block, threads, {out, out_dtype, add});
  std::size_t starts[kMaxThreads];
  const int ranges = ranges_of(n, kStep, threads);
  status = open(payload, bytes, dtype, n, ranges, starts);
  if (status != kOk) return status;
  split(n, kStep, ranges, [&](int r, std::size_t begin, std::size_t end) {
    k.bounded->decode(payload + sizeof(prefix) + begin / kBoundedBlock, payload + starts[r],
                      bytes - starts[r], dtype, end - begin, prefix.bound, out + begin * size_of(out_dtype),
                      out_dtype, add);
  });
  return kOk;
}

}  // namespace

extern const CodecEntry kBoundedCodec = {
    .id = 11, .encoder = make, .check_head = check_head, .check = check, .decode = decode};

}  // namespace hybridcomp
