// Several messages in one call from Python: opened, decoded, encoded, or summed.
#include <nanobind/stl/vector.h>

#include <deque>
#include <vector>

#include "engine/messages.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// Memory of a list's objects, held for as long as this lives.
class Buffers {
 public:
  Buffers(const nb::list& objects, bool writable) {
    for (nb::handle object : objects) all_.emplace_back(object, writable);
  }
  std::size_t size() const { return all_.size(); }
  const Buffer& operator[](std::size_t i) const { return all_[i]; }

 private:
  std::deque<Buffer> all_;  // a deque, since buffers cannot be moved
};

// Return the index of the first message that is not whole, or not of this codec and these elements; None if
// all are. `crc`: whether checksums are checked.
nb::object open_messages(const nb::list& messages, std::uint8_t codec, std::uint32_t params, int dtype,
                         const std::vector<std::uint64_t>& counts, bool crc) {
  const Buffers from(messages, false);
  if (counts.size() != from.size()) Buffer::fail("one count for every message");
  std::size_t i = 0;
  {
    nb::gil_scoped_release release;
    for (; i < from.size(); ++i) {
      // Any dtype is checked: messages of other types than floats have a header, too.
      const Expected expected{codec, params, static_cast<DTypeCode>(dtype), counts[i]};
      if (!check_message(from[i].data(), from[i].bytes(), expected, crc)) break;
    }
  }
  return i < from.size() ? nb::cast(i) : nb::none();
}

// Decode each message, as many elements as its output has; returns how many messages, from the first, were
// decoded. `stream`: past the caches where that is possible.
std::size_t decode_many(const nb::list& messages, const nb::list& outs, int out_dtype, bool stream) {
  const DTypeCode type = float_dtype(out_dtype);
  const Buffers from(messages, false), to(outs, true);
  if (from.size() != to.size()) Buffer::fail("one output for every message");
  nb::gil_scoped_release release;
  const Kernels& k = kernels();
  for (std::size_t i = 0; i < from.size(); ++i) {
    const std::size_t n = to[i].bytes() / size_of(type);
    if (to[i].bytes() % size_of(type)) return i;
    if (!decode_message(k, from[i].data(), from[i].bytes(), n, to[i].data(), type, stream)) return i;
  }
  return from.size();
}

// Find the payloads of messages of n elements that can be added to elements of `dtype`; returns false if one
// cannot.
bool payloads_of(const Buffers& messages, DTypeCode dtype, std::size_t n, std::vector<Payload>* payloads) {
  payloads->resize(messages.size());
  for (std::size_t i = 0; i < messages.size(); ++i)
    if (!payload_of(messages[i].data(), messages[i].bytes(), dtype, n, &(*payloads)[i])) return false;
  return true;
}

int divisor(int ranks) {
  if (ranks < 1) Buffer::fail("ranks must be at least 1");
  return ranks;
}

// Encode a sum; returns its bytes, or 0 if it must be done in separate steps. `own` is then unchanged.
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
  const Sum sum{from.data(), own_type, {}, n, ranks, type, wanted ? decoded.data() : nullptr,
                result_type, stream};
  return encode_sum(kernels(), encoder, sum, payloads, to.data());
}

// Write a sum as elements of `dtype`; returns false, with nothing written, if it must be done in separate
// steps.
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
  const Sum sum{from.data(), own_type, {}, n, ranks, type, to.data(), type, stream};
  return store_sum(kernels(), sum, payloads);
}

}  // namespace

void bind_sums(nb::module_& m) {
  m.def("open_messages", &open_messages, "messages"_a, "codec"_a, "params"_a, "dtype"_a, "counts"_a, "crc"_a,
        "The index of the first message that is not whole or not as expected, or None.");
  m.def("decode_many", &decode_many, "messages"_a, "outs"_a, "out_dtype"_a, "stream"_a,
        "Returns how many messages, from the first, were decoded.");
  m.def("sum_encode", &sum_encode, "encoder"_a, "own"_a, "own_dtype"_a, "messages"_a, "ranks"_a, "dtype"_a,
        "out"_a, "result"_a.none(), "result_dtype"_a, "stream"_a,
        "Returns the message's bytes, or 0 if it must be done in separate steps.");
  m.def("sum_into", &sum_into, "own"_a, "own_dtype"_a, "messages"_a, "ranks"_a, "out"_a, "dtype"_a,
        "stream"_a, "Whether it could be done in one pass.");
}

}  // namespace hybridcomp
