// Several messages in one call from Python: opened, decoded, encoded, or summed.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <deque>
#include <vector>

#include "bind.hpp"
#include "decoders.hpp"
#include "encoder.hpp"
#include "opening.hpp"
#include "sums.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// The memory of a list's objects, held for as long as this lives.
class Buffers {
 public:
  Buffers(const nb::list& objects, bool writable) {
    for (nb::handle object : objects) all_.emplace_back(object, writable);
  }
  std::size_t size() const { return all_.size(); }
  const Buffer& operator[](std::size_t i) const { return all_[i]; }

 private:
  std::deque<Buffer> all_;  // which cannot be moved
};

// The first of the messages that is not whole, or not of this codec and these elements; None if all are.
nb::object open_messages(const nb::list& messages, std::uint8_t codec, std::uint32_t params, int dtype,
                         const std::vector<std::uint64_t>& counts, bool crc) {
  const Buffers from(messages, false);
  if (counts.size() != from.size()) Buffer::fail("one count for every message");
  std::size_t i = 0;
  {
    nb::gil_scoped_release release;
    for (; i < from.size(); ++i) {
      Header h;
      if (!read_header(from[i].data(), from[i].bytes(), &h)) break;
      if (h.codec != codec || h.params != params || h.dtype != dtype || h.count != counts[i]) break;
      if (crc && crc_of(from[i].data(), h.payload) != h.crc) break;
    }
  }
  return i < from.size() ? nb::cast(i) : nb::none();
}

// Decode a message of n elements; false if it is malformed, or decoded elsewhere.
bool decode_one(const Kernels& k, const std::uint8_t* message, std::size_t bytes, std::size_t n,
                std::uint8_t* out, DTypeCode type, bool stream) {
  Header h;
  if (!read_header(message, bytes, &h) || h.dtype > kBFloat16 || h.count != n) return false;
  const DTypeCode dtype = static_cast<DTypeCode>(h.dtype);
  const std::uint8_t* const payload = message + sizeof(h);
  Parts parts;
  if (stream && open_parts(h.codec, payload, h.payload, dtype, n, &parts)) {
    decode_streaming(k, parts, n, thread_count(), out, type);
    return true;
  }
  return decode_payload(k, h.codec, payload, h.payload, dtype, n, thread_count(), out, type, false) == kOk;
}

// Decode each message, as many elements as its output has; returns how many of them, from the first, could
// be. `stream`: past the caches where that is possible.
std::size_t decode_many(const nb::list& messages, const nb::list& outs, int out_dtype, bool stream) {
  const DTypeCode type = float_dtype(out_dtype);
  const Buffers from(messages, false), to(outs, true);
  if (from.size() != to.size()) Buffer::fail("one output for every message");
  nb::gil_scoped_release release;
  const Kernels& k = kernels();
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t n = to[i].bytes() / size_of(type);
    if (to[i].bytes() % size_of(type)) return i;
    if (!decode_one(k, from[i].data(), from[i].bytes(), n, to[i].data(), type, stream)) return i;
  }
  return from.size();
}

// The bytes of each message.
std::vector<std::size_t> encode_many(const Encoder& encoder, const nb::list& sources, int dtype,
                                     const nb::list& outs) {
  const DTypeCode type = float_dtype(dtype);
  const Buffers from(sources, false), to(outs, true);
  if (from.size() != to.size()) Buffer::fail("one output for every source");
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t need = encoder.bound(from[i].elements(size_of(type), "a source"), type);
    if (!need) Buffer::fail("the codec does not take this dtype");
    if (to[i].bytes() < need) Buffer::fail("an output is too small");
  }
  std::vector<std::size_t> sizes(from.size());
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < from.size(); ++i)
    sizes[i] = encoder.write(kernels(), from[i].data(), type, from[i].bytes() / size_of(type), thread_count(),
                             to[i].data());
  return sizes;
}

// Check payloads of n elements that are read in stretches; false if one cannot.
bool open_all(const std::vector<Payload>& payloads, std::size_t n, std::vector<Parts>* parts) {
  parts->resize(payloads.size());
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    const Payload& m = payloads[i];
    if (!open_parts(m.codec, m.data, m.bytes, m.dtype, n, &(*parts)[i])) return false;
  }
  return true;
}

// The payloads of messages of n elements that can be added to elements of `dtype`; false if one cannot.
bool payloads_of(const Buffers& messages, DTypeCode dtype, std::size_t n, std::vector<Payload>* payloads) {
  for (std::size_t i = 0; i < messages.size(); ++i) {
    Header h;
    if (!read_header(messages[i].data(), messages[i].bytes(), &h) || h.dtype > kBFloat16) return false;
    if (h.count != n || (h.dtype == kFloat64) != (dtype == kFloat64)) return false;
    payloads->push_back(
        {h.codec, messages[i].data() + sizeof(h), h.payload, static_cast<DTypeCode>(h.dtype)});
  }
  return true;
}

// Sum whole arrays, and encode that; as sum_encode below.
std::size_t encode_whole(const Encoder& encoder, const Sum& sum, const std::vector<Payload>& payloads,
                         std::uint8_t* out) {
  const Kernels& k = kernels();
  Scratch memory;
  const std::uint8_t* const values = sum_whole(k, sum, payloads, thread_count(), &memory);
  if (!values) return 0;
  const std::size_t bytes = encoder.write(k, values, sum.dtype, sum.n, thread_count(), out);
  const bool done = !sum.result || decode_one(k, out, bytes, sum.n, sum.result, sum.result_dtype, sum.stream);
  return done ? bytes : 0;
}

int divisor(int ranks) {
  if (ranks < 1) Buffer::fail("ranks must be at least 1");
  return ranks;
}

// Encode a sum; its bytes, or 0 if it must be done in separate steps. `own` is as it was then.
std::size_t sum_encode(const Encoder& encoder, nb::handle own, int own_dtype, const nb::list& messages,
                       int ranks, int dtype, nb::handle out, nb::handle result, int result_dtype,
                       bool stream) {
  const DTypeCode own_type = float_dtype(own_dtype), type = float_dtype(dtype);
  const DTypeCode result_type = float_dtype(result_dtype);
  const Buffer from(own, false), to(out, true);
  const Buffers others(messages, false);
  const bool wanted = !result.is_none();
  const Buffer decoded(wanted ? result : out, true);
  const std::size_t n = from.elements(size_of(own_type), "own");
  if (wanted && decoded.elements(size_of(result_type), "result") != n)
    Buffer::fail("result must have as many elements as own");
  const std::size_t need = encoder.bound(n, type);
  if (!need) Buffer::fail("the codec does not take this dtype");
  if (to.bytes() < need) Buffer::fail("out is too small");
  divisor(ranks);
  std::vector<Payload> payloads;
  if (!payloads_of(others, own_type, n, &payloads)) return 0;
  nb::gil_scoped_release release;
  std::vector<Parts> parts;
  const bool stretches = encoder.write_sum && open_all(payloads, n, &parts);
  const Sum sum{from.data(), own_type, parts, n, ranks, type, wanted ? decoded.data() : nullptr,
                result_type, stream};
  if (!stretches || !sum.unit()) return encode_whole(encoder, sum, payloads, to.data());
  return encoder.write_sum(kernels(), sum, thread_count(), to.data());
}

// Write a sum as elements of `dtype`; false if it must be done in separate steps. Nothing has been written
// then.
bool sum_into(nb::handle own, int own_dtype, const nb::list& messages, int ranks, nb::handle out, int dtype,
              bool stream) {
  const DTypeCode own_type = float_dtype(own_dtype), type = float_dtype(dtype);
  const Buffer from(own, false), to(out, true);
  const Buffers others(messages, false);
  const std::size_t n = from.elements(size_of(own_type), "own");
  if (to.elements(size_of(type), "out") != n) Buffer::fail("out must have as many elements as own");
  divisor(ranks);
  std::vector<Payload> payloads;
  if (!payloads_of(others, own_type, n, &payloads)) return false;
  nb::gil_scoped_release release;
  std::vector<Parts> parts;
  const bool stretches = open_all(payloads, n, &parts);
  const Sum sum{from.data(), own_type, parts, n, ranks, type, to.data(), type, stream};
  if (stretches && sum.unit()) {
    write_sum(kernels(), sum, thread_count());
    return true;
  }
  Scratch memory;
  const std::uint8_t* const values = sum_whole(kernels(), sum, payloads, thread_count(), &memory);
  if (values) std::memcpy(to.data(), values, n * size_of(type));
  return values != nullptr;
}

}  // namespace

void bind_sums(nb::module_& m) {
  m.def("open_messages", &open_messages, "messages"_a, "codec"_a, "params"_a, "dtype"_a, "counts"_a, "crc"_a,
        "The index of the first message that is not whole or not as expected, or None.");
  m.def("decode_many", &decode_many, "messages"_a, "outs"_a, "out_dtype"_a, "stream"_a,
        "Returns how many messages, from the first, were decoded.");
  m.def("encode_many", &encode_many, "encoder"_a, "sources"_a, "dtype"_a, "outs"_a,
        "Returns the messages' bytes.");
  m.def("sum_encode", &sum_encode, "encoder"_a, "own"_a, "own_dtype"_a, "messages"_a, "ranks"_a, "dtype"_a,
        "out"_a, "result"_a.none(), "result_dtype"_a, "stream"_a,
        "Returns the message's bytes, or 0 if it must be done in separate steps.");
  m.def("sum_into", &sum_into, "own"_a, "own_dtype"_a, "messages"_a, "ranks"_a, "out"_a, "dtype"_a,
        "stream"_a, "Whether it could be done in one pass.");
}

}  // namespace hybridcomp
