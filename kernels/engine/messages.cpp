#include "engine/messages.hpp"

#include <cstring>

#include "codecs/common/parallel.hpp"
#include "codecs/messages/opening.hpp"
#include "codecs/messages/table.hpp"

namespace hybridcomp {
namespace {

// Open payloads of n elements to be read in stretches; returns false if one cannot be.
bool open_all(std::span<const Payload> payloads, std::size_t n, std::vector<Parts>* parts) {
  parts->resize(payloads.size());
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    const Payload& m = payloads[i];
    if (!open_parts(m.codec, m.data, m.bytes, m.dtype, n, &(*parts)[i])) return false;
  }
  return true;
}

}  // namespace

bool check_message(const std::uint8_t* message, std::size_t bytes, const Expected& expected, bool crc) {
  Header h;
  if (!read_header(message, bytes, &h)) return false;
  if (h.codec != expected.codec || h.params != expected.params || h.dtype != expected.dtype ||
      h.count != expected.n)
    return false;
  return !crc || crc_of(message, h.payload) == h.crc;
}

bool decode_stretches(const Kernels& k, const Payload& payload, std::size_t n, std::uint8_t* out,
                      DTypeCode type, bool stream) {
  Parts parts;
  if (stream && open_parts(payload.codec, payload.data, payload.bytes, payload.dtype, n, &parts)) {
    decode_streaming(k, parts, n, thread_count(), out, type);
    return true;
  }
  return decode_payload(k, payload.codec, payload.data, payload.bytes, payload.dtype, n, thread_count(), out,
                        type, false) == kOk;
}

bool decode_message(const Kernels& k, const std::uint8_t* message, std::size_t bytes, std::size_t n,
                    std::uint8_t* out, DTypeCode type, bool stream) {
  Header h;
  if (!read_header(message, bytes, &h) || h.dtype > kBFloat16 || h.count != n) return false;
  return decode_stretches(k, {h.codec, message + sizeof(h), h.payload, static_cast<DTypeCode>(h.dtype)}, n,
                          out, type, stream);
}

bool payload_of(const std::uint8_t* message, std::size_t bytes, DTypeCode dtype, std::size_t n,
                Payload* payload) {
  Header h;
  if (!read_header(message, bytes, &h) || h.dtype > kBFloat16) return false;
  if (h.count != n || (h.dtype == kFloat64) != (dtype == kFloat64)) return false;
  *payload = {h.codec, message + sizeof(h), h.payload, static_cast<DTypeCode>(h.dtype)};
  return true;
}

std::size_t encode_sum(const Kernels& k, const Encoder& encoder, Sum sum, std::span<const Payload> payloads,
                       std::uint8_t* out) {
  std::vector<Parts> parts;
  const bool stretches = encoder.write_sum && open_all(payloads, sum.n, &parts);
  sum.messages = parts;
  if (stretches && sum.unit()) return encoder.write_sum(k, sum, thread_count(), out);
  Scratch memory;
  const std::uint8_t* const values = sum_whole(k, sum, payloads, thread_count(), &memory);
  if (!values) return 0;
  const std::size_t bytes = encoder.write(k, values, sum.dtype, sum.n, thread_count(), out);
  const bool done =
      !sum.result || decode_message(k, out, bytes, sum.n, sum.result, sum.result_dtype, sum.stream);
  return done ? bytes : 0;
}

bool store_sum(const Kernels& k, Sum sum, std::span<const Payload> payloads) {
  return store_sum_twice(k, sum, payloads, nullptr);
}

bool store_sum_twice(const Kernels& k, Sum sum, std::span<const Payload> payloads, std::uint8_t* also) {
  std::vector<Parts> parts;
  const bool stretches = open_all(payloads, sum.n, &parts);
  sum.messages = parts;
  if (stretches && sum.unit()) {
    write_sum(k, sum, thread_count(), also);
    return true;
  }
  Scratch memory;
  const std::uint8_t* const values = sum_whole(k, sum, payloads, thread_count(), &memory);
  if (!values) return false;
  std::memcpy(sum.result, values, sum.n * size_of(sum.dtype));
  if (also) std::memcpy(also, values, sum.n * size_of(sum.dtype));
  return true;
}

}  // namespace hybridcomp
