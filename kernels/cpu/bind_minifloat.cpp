#include "bind.hpp"
#include "message.hpp"
#include "minifloat.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

MinifloatKind kind_of(std::uint32_t format, bool mx, std::uint32_t block) {
  if (format > kE2M1 || (format == kE2M1 && !mx)) Buffer::fail("format must be 0, 1 or, with mx, 2");
  if (mx ? block != kMxBlock : !valid_block(block))
    Buffer::fail("block must be a multiple of 8 from 8 to 65536, with mx 32");
  return {static_cast<MinifloatFormat>(format), mx};
}

void check_bits(int bits, bool mx) {
  if (bits != 8 && !(bits == 4 && mx)) Buffer::fail("bits must be 8 or, with mx, 4");
}

std::size_t minifloat_encode(nb::handle src, int dtype, std::uint32_t format, bool mx, std::uint32_t block,
                             int codec, std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const MinifloatKind kind = kind_of(format, mx, block);
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + minifloat_payload(n, block, kind)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return minifloat_message(kernels(), from.data(), type, n, block, kind, static_cast<std::uint8_t>(codec),
                           params, thread_count(), to.data());
}

int minifloat_decode(nb::handle payload, std::size_t n, int bits, bool mx, nb::handle out, int out_dtype,
                     bool add) {
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  check_bits(bits, mx);
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return decode_minifloat(kernels(), from.data(), from.bytes(), n, bits, mx, thread_count(), to.data(),
                          out_type, add);
}

int minifloat_check(nb::handle payload, std::size_t n, int bits, bool mx) {
  check_bits(bits, mx);
  const Buffer from(payload, false);
  return check_minifloat(from.data(), from.bytes(), n, bits, mx);
}

}  // namespace

void bind_minifloat(nb::module_& m) {
  m.def("minifloat_encode", &minifloat_encode, "src"_a, "dtype"_a, "format"_a, "mx"_a, "block"_a, "codec"_a,
        "params"_a, "out"_a);
  m.def("minifloat_decode", &minifloat_decode, "payload"_a, "n"_a, "bits"_a, "mx"_a, "out"_a, "out_dtype"_a,
        "add"_a);
  m.def("minifloat_check", &minifloat_check, "payload"_a, "n"_a, "bits"_a, "mx"_a);
}

}  // namespace hybridcomp
