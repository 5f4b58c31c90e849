#include "bind.hpp"
#include "fixed.hpp"
#include "message.hpp"
#include "sign.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::size_t mean_bytes(std::size_t blocks, DTypeCode dtype) { return blocks * (dtype == kFloat64 ? 8 : 4); }

std::size_t sign_payload(std::size_t n, DTypeCode dtype, std::uint32_t block) {
  return sizeof(QuantizePrefix) + mean_bytes(blocks_of(n, block), dtype) + (n + 7) / 8;
}

std::size_t sign_encode(nb::handle src, int dtype, std::uint32_t block, int codec, std::uint32_t params,
                        nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  if (!valid_block(block)) Buffer::fail("block is not allowed");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + sign_payload(n, type, block)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  const Kernels& k = kernels();
  const QuantizePrefix prefix{block, 0};
  return write_fixed(
      k, {static_cast<std::uint8_t>(codec), type, params, &prefix, sizeof(prefix)}, n, block, thread_count(),
      to.data(), [&](std::size_t e) { return mean_bytes(blocks_of(e, block), type); },
      [](std::size_t e) { return (e + 7) / 8; },
      [&](std::size_t at, std::size_t m, std::uint8_t* means, std::uint8_t* bits) {
        k.sign->encode(from.data() + at * size_of(type), type, m, block, means, bits);
      });
}

// Check a payload of n elements and read its block size; returns a Status.
int open_payload(const Buffer& payload, std::size_t n, DTypeCode dtype, std::uint32_t* block) {
  QuantizePrefix prefix;
  if (payload.bytes() < sizeof(prefix)) return kBadLength;
  std::memcpy(&prefix, payload.data(), sizeof(prefix));
  if (!valid_block(prefix.block) || prefix.flags) return kBadBlock;
  *block = prefix.block;
  // First of all before n enters any arithmetic that could overflow.
  return n / 8 <= payload.bytes() && payload.bytes() == sign_payload(n, dtype, prefix.block) ? kOk
                                                                                             : kBadLength;
}

int sign_check(nb::handle payload, std::size_t n, int dtype) {
  std::uint32_t block;
  return open_payload(Buffer(payload, false), n, float_dtype(dtype), &block);
}

int sign_decode(nb::handle payload, std::size_t n, int dtype, nb::handle out, int out_dtype, bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  std::uint32_t block;
  const int status = open_payload(from, n, type, &block);
  if (status != kOk) return status;
  nb::gil_scoped_release release;
  const Kernels& k = kernels();
  const std::uint8_t* means = from.data() + sizeof(QuantizePrefix);
  const std::uint8_t* bits = means + mean_bytes(blocks_of(n, block), type);
  split(n, block, ranges_of(n, block, thread_count()), [&](int, std::size_t begin, std::size_t end) {
    k.sign->decode(means + mean_bytes(begin / block, type), bits + begin / 8, type == kFloat64, end - begin,
                   block, to.data() + begin * size_of(out_type), out_type, add);
  });
  return kOk;
}

}  // namespace

void bind_sign(nb::module_& m) {
  m.def("sign_encode", &sign_encode, "src"_a, "dtype"_a, "block"_a, "codec"_a, "params"_a, "out"_a);
  m.def("sign_check", &sign_check, "payload"_a, "n"_a, "dtype"_a);
  m.def("sign_decode", &sign_decode, "payload"_a, "n"_a, "dtype"_a, "out"_a, "out_dtype"_a, "add"_a);
}

}  // namespace hybridcomp
