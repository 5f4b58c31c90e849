// Messages of codec `exponent` around its kernels.
#include <array>
#include <cstring>
#include <utility>

#include "codecs/common/parallel.hpp"
#include "codecs/convert/convert.hpp"
#include "codecs/lossless/exponent.hpp"
#include "codecs/messages/codec_entry.hpp"
#include "codecs/messages/opening.hpp"
#include "codecs/messages/parts.hpp"

namespace hybridcomp {

extern const CodecEntry kNoneCodec;  // it carries elements that are no floats

namespace {

// Bytes of elements handled at a time: few, so that their output leaves for memory while the next are read;
// and enough for the CRC to run at its full speed over their output.
constexpr std::size_t kStepBytes = 8192;
constexpr std::size_t step_of(DTypeCode dtype) { return kStepBytes / size_of(dtype); }

// Bytes of output from which on it goes past the caches, which it would not stay in.
constexpr std::size_t kStreamed = std::size_t(4) << 20;

// Bytes and CRCs of one range's encoded blocks.
struct Part {
  std::size_t codes, bytes;
  std::uint32_t crc_codes, crc_bytes;
};

Part encode_range(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, bool streams,
                  std::uint8_t* codes, std::uint8_t* data) {
  alignas(64) std::uint8_t buffer[kStepBytes];
  const std::size_t step = step_of(dtype);
  Part part{blocks_of(n, kExponentBlock), 0, 0, 0};
  for (std::size_t at = 0; at < n; at += step) {
    std::uint8_t* const to = streams ? buffer : data + part.bytes;
    const std::size_t bytes = k.exponent->encode(src + at * size_of(dtype), dtype, std::min(step, n - at),
                                                 codes + at / kExponentBlock, to);
    part.crc_bytes = k.crc32c(to, bytes, part.crc_bytes);
    if (streams) k.convert->stream(buffer, data + part.bytes, bytes);
    part.bytes += bytes;
  }
  part.crc_codes = k.crc32c(codes, part.codes, 0);
  if (streams) streamed();
  return part;
}

// Result of sum_sizes if a block has no valid code.
constexpr std::size_t kBadCode = ~std::size_t(0);

using Sizes = std::array<std::uint16_t, 256>;

Sizes block_sizes(DTypeCode dtype) {
  Sizes sizes;
  for (std::size_t c = 0; c < sizes.size(); ++c)
    sizes[c] =
        static_cast<std::uint16_t>(exponent_block_bytes(static_cast<std::uint8_t>(c), kExponentBlock, dtype));
  return sizes;
}

std::size_t sum_sizes(const Sizes& sizes, const std::uint8_t* codes, std::size_t count) {
  std::size_t sum = 0;
  unsigned any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += sizes[codes[i]];
    any |= sizes[codes[i]];
  }
  return any & kExponentNone ? kBadCode : sum;
}

std::size_t most_bytes(std::size_t n, DTypeCode dtype) {
  return blocks_of(n, kExponentBlock) + n * size_of(dtype);
}

int check_head(const std::uint8_t* head, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  if (!is_float(dtype)) return kNoneCodec.check_head(head, bytes, dtype, n);
  // The checks come in this order: after the first, n is not so large that the arithmetic could overflow.
  return blocks_of(n, kExponentBlock) <= bytes && bytes <= most_bytes(n, dtype) ? kOk : kBadLength;
}

// Check a payload of floats and find where the data of each of `ranges` ranges of elements begins.
int open(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n, int ranges,
         std::size_t* starts) {
  const int status = check_head(payload, bytes, dtype, n);
  if (status != kOk) return status;
  const Sizes sizes = block_sizes(dtype);
  split(n, step_of(dtype), ranges, [&](int r, std::size_t begin, std::size_t end) {
    const std::size_t full = end / kExponentBlock - begin / kExponentBlock, rest = end % kExponentBlock;
    starts[r] = sum_sizes(sizes, payload + begin / kExponentBlock, full);
    if (!rest || starts[r] == kBadCode) return;
    const std::size_t last = exponent_block_bytes(payload[end / kExponentBlock], rest, dtype);
    starts[r] = last == kExponentNone ? kBadCode : starts[r] + last;
  });
  std::size_t sum = blocks_of(n, kExponentBlock);
  for (int r = 0; r < ranges; ++r) {
    if (starts[r] == kBadCode) return kBadExponentCode;
    sum += std::exchange(starts[r], sum);
  }
  return sum == bytes ? kOk : kBadLength;
}

std::size_t write(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, CodecId id,
                  int threads, std::uint8_t* out) {
  std::uint8_t* const codes = out + sizeof(Header);
  std::uint8_t* const data = codes + blocks_of(n, kExponentBlock);
  const bool streams = n * size_of(dtype) >= kStreamed;

  // Each range of elements has room for all of them as they are; gaps are closed afterwards.
  Part parts[kMaxThreads];
  std::size_t begins[kMaxThreads];
  const int ranges = ranges_of(n, step_of(dtype), threads);
  split(n, step_of(dtype), ranges, [&](int r, std::size_t begin, std::size_t end) {
    begins[r] = begin * size_of(dtype);
    parts[r] = encode_range(k, src + begins[r], dtype, end - begin, streams, codes + begin / kExponentBlock,
                            data + begins[r]);
  });
  std::size_t bytes = 0;
  for (int r = 0; r < ranges; ++r) {
    if (bytes != begins[r]) std::memmove(data + bytes, data + begins[r], parts[r].bytes);
    bytes += parts[r].bytes;
  }

  const std::size_t payload = blocks_of(n, kExponentBlock) + bytes;
  const Header header = header_of(id, dtype, n, payload);
  std::memcpy(out, &header, sizeof(header));
  std::uint32_t crc = k.crc32c(out, kCrcAt, 0);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_codes, parts[r].codes);
  for (int r = 0; r < ranges; ++r) crc = crc32c_combine(crc, parts[r].crc_bytes, parts[r].bytes);
  std::memcpy(out + kCrcAt, &crc, sizeof(crc));
  return sizeof(header) + payload;
}

Encoder make(CodecId id, const Parameters& parameters) {
  const Encoder plain = kNoneCodec.encoder(id, parameters);
  return {{id},
          [=](std::size_t n, DTypeCode dtype) {
            return is_float(dtype) ? sizeof(Header) + most_bytes(n, dtype) : plain.bound(n, dtype);
          },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return is_float(dtype) ? write(k, src, dtype, n, id, threads, out)
                                   : plain.write(k, src, dtype, n, threads, out);
          }};
}

int check(const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n) {
  if (!is_float(dtype)) return check_head(payload, bytes, dtype, n);
  std::size_t start;
  return open(payload, bytes, dtype, n, 1, &start);
}

int decode(const Kernels& k, const std::uint8_t* payload, std::size_t bytes, DTypeCode dtype, std::size_t n,
           int threads, std::uint8_t* out, DTypeCode out_dtype, bool add) {
  if (!is_float(dtype)) return kNoneCodec.decode(k, payload, bytes, dtype, n, threads, out, out_dtype, add);
  std::size_t starts[kMaxThreads];
  int status[kMaxThreads] = {};
  const int ranges = ranges_of(n, step_of(dtype), threads);
  const int checked = open(payload, bytes, dtype, n, ranges, starts);
  if (checked != kOk) return checked;
  const bool same = dtype == out_dtype && !add;
  const bool streams = same && n * size_of(dtype) >= kStreamed;
  const Sizes sizes = block_sizes(dtype);
  const std::size_t step = step_of(dtype) / 2;  // no CRC here
  split(n, step_of(dtype), ranges, [&](int r, std::size_t begin, std::size_t end) {
    alignas(64) std::uint8_t buffer[kStepBytes];
    const std::uint8_t* from = payload + starts[r];
    for (std::size_t at = begin; at < end; at += step) {
      const std::size_t m = std::min(step, end - at);
      const std::uint8_t* const codes = payload + at / kExponentBlock;
      std::uint8_t* const to = out + at * size_of(out_dtype);
      status[r] = k.exponent->decode(codes, from, dtype, m, same && !streams ? to : buffer);
      if (status[r] != kOk) return;
      if (streams)
        k.convert->stream(buffer, to, m * size_of(dtype));
      else if (!same)
        k.convert->convert(buffer, dtype, to, out_dtype, m, add);
      from += sum_sizes(sizes, codes, m / kExponentBlock);
    }
    if (streams) streamed();
  });
  for (int r = 0; r < ranges; ++r)
    if (status[r] != kOk) return status[r];
  return kOk;
}

}  // namespace

extern const CodecEntry kExponentCodec = {
    .id = 14, .exact = true, .encoder = make, .check_head = check_head, .check = check, .decode = decode};

}  // namespace hybridcomp
