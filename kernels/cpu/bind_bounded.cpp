#include "bind.hpp"
#include "bounded.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

std::size_t bounded_encode(nb::handle src, int dtype, double error, bool relative, int codec,
                           std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  if (bits_of(error) == 0 || bits_of(error) >= Real<double>::kInfinity)
    Buffer::fail("error must be a number above 0");
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + bounded_payload(n, type)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return bounded_message(kernels(), from.data(), type, n, error, relative, static_cast<std::uint8_t>(codec),
                         params, thread_count(), to.data());
}

int bounded_decode(nb::handle payload, std::size_t n, int dtype, nb::handle out, int out_dtype, bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return decode_bounded(kernels(), from.data(), from.bytes(), type, n, thread_count(), to.data(), out_type,
                        add);
}

int bounded_check(nb::handle payload, std::size_t n, int dtype) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(payload, false);
  nb::gil_scoped_release release;
  return check_bounded(from.data(), from.bytes(), type, n);
}

}  // namespace

void bind_bounded(nb::module_& m) {
  m.def("bounded_encode", &bounded_encode, "src"_a, "dtype"_a, "error"_a, "relative"_a, "codec"_a, "params"_a,
        "out"_a);
  m.def("bounded_decode", &bounded_decode, "payload"_a, "n"_a, "dtype"_a, "out"_a, "out_dtype"_a, "add"_a);
  m.def("bounded_check", &bounded_check, "payload"_a, "n"_a, "dtype"_a);
}

}  // namespace hybridcomp
