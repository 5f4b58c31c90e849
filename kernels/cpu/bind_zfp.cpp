#include "bind.hpp"
#include "zfp.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::size_t zfp_encode(nb::handle src, int dtype, std::uint32_t bits, int codec, std::uint32_t params,
                       nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  if (!zfp_valid_bits(type, bits)) Buffer::fail("bits of a block are out of range for this dtype");
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + sizeof(ZfpPrefix) + zfp_bytes(n, bits)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return zfp_message(kernels(), from.data(), type, n, bits, static_cast<std::uint8_t>(codec), params,
                     thread_count(), to.data());
}

int zfp_decode(nb::handle payload, std::size_t n, int dtype, nb::handle out, int out_dtype, bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  if (add && (type == kFloat64) != (out_type == kFloat64))
    Buffer::fail("doubles, and only they, add to doubles");
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return zfp_decode_payload(kernels(), from.data(), from.bytes(), type, n, thread_count(), to.data(),
                            out_type, add);
}

int zfp_check_payload(nb::handle payload, std::size_t n, int dtype) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(payload, false);
  return zfp_check(from.data(), from.bytes(), type, n);
}

}  // namespace

void bind_zfp(nb::module_& m) {
  m.def("zfp_encode", &zfp_encode, "src"_a, "dtype"_a, "bits"_a, "codec"_a, "params"_a, "out"_a);
  m.def("zfp_decode", &zfp_decode, "payload"_a, "n"_a, "dtype"_a, "out"_a, "out_dtype"_a, "add"_a);
  m.def("zfp_check", &zfp_check_payload, "payload"_a, "n"_a, "dtype"_a);
}

}  // namespace hybridcomp
