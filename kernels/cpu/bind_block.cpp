#include "bind.hpp"
#include "block.hpp"
#include "message.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

void check_bits(int bits) {
  if (bits != 8 && bits != 4 && bits != 2) Buffer::fail("bits must be 8, 4 or 2");
}

std::size_t quantize_encode(nb::handle src, int dtype, int bits, std::uint32_t block, bool symmetric,
                            bool hadamard, bool stochastic, std::uint64_t seed, int codec,
                            std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  check_bits(bits);
  const BlockFormat format{block, bits, symmetric, hadamard, seed};
  if (!valid_format(format)) Buffer::fail("block is not allowed");
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + quantized_payload(n, type, format)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return quantize_message(kernels(), from.data(), type, n, format, stochastic,
                          static_cast<std::uint8_t>(codec), params, thread_count(), to.data());
}

int quantize_decode(nb::handle payload, std::size_t n, int dtype, int bits, nb::handle out, int out_dtype,
                    bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  check_bits(bits);
  const Buffer from(payload, false), to(out, true);
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  return dequantize_payload(kernels(), from.data(), from.bytes(), type, n, bits, thread_count(), to.data(),
                            out_type, add);
}

int quantize_check(nb::handle payload, std::size_t n, int dtype, int bits) {
  const DTypeCode type = float_dtype(dtype);
  check_bits(bits);
  const Buffer from(payload, false);
  return check_quantized(from.data(), from.bytes(), type, n, bits);
}

}  // namespace

void bind_block(nb::module_& m) {
  m.def("quantize_encode", &quantize_encode, "src"_a, "dtype"_a, "bits"_a, "block"_a, "symmetric"_a,
        "hadamard"_a, "stochastic"_a, "seed"_a, "codec"_a, "params"_a, "out"_a);
  m.def("quantize_decode", &quantize_decode, "payload"_a, "n"_a, "dtype"_a, "bits"_a, "out"_a, "out_dtype"_a,
        "add"_a);
  m.def("quantize_check", &quantize_check, "payload"_a, "n"_a, "dtype"_a, "bits"_a);
}

}  // namespace hybridcomp
