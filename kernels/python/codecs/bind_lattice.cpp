#include "codecs/lattice/message.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

void check_bits(int bits, std::uint32_t ranks) {
  if (!valid_bits(bits)) Buffer::fail("bits must be 8, 16 or 32");
  if (ranks == 0 || ranks > lattice_most(bits)) Buffer::fail("ranks is out of range");
}

std::uint64_t peak(nb::handle src, int dtype) {
  const DTypeCode type = float_dtype(dtype);
  const Buffer from(src, false);
  const std::size_t n = from.elements(size_of(type), "src");
  nb::gil_scoped_release release;
  return lattice_peak(kernels(), from.data(), type, n, thread_count());
}

nb::tuple scale(std::uint64_t peak, int dtype, int bits, std::uint32_t ranks) {
  const DTypeCode type = float_dtype(dtype);
  check_bits(bits, ranks);
  const LatticeScale s = lattice_scale_of(peak, type, bits, ranks);
  return nb::make_tuple(s.scale, s.inverse);
}

void quantize(nb::handle src, int dtype, int bits, std::uint32_t ranks, double inverse, bool stochastic,
              std::uint64_t seed, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  check_bits(bits, ranks);
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.elements(static_cast<std::size_t>(bits / 8), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  lattice_quantize(kernels(), from.data(), type, n, bits,
                   lattice_rounding(ranks, bits, inverse, stochastic, seed), thread_count(), to.data());
}

void dequantize(nb::handle q, int dtype, int bits, double scale, nb::handle out, int out_dtype, bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  check_bits(bits, 1);
  const Buffer from(q, false), to(out, true);
  const std::size_t n = from.elements(static_cast<std::size_t>(bits / 8), "q");
  if (to.elements(size_of(out_type), "out") != n) Buffer::fail("out must have n elements");
  nb::gil_scoped_release release;
  lattice_dequantize(kernels(), from.data(), type, n, bits, scale, thread_count(), to.data(), out_type, add);
}

std::size_t encode(nb::handle src, int dtype, int bits, std::uint32_t ranks, double scale, double inverse,
                   bool stochastic, std::uint64_t seed, int codec, std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  check_bits(bits, ranks);
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < lattice_message_bytes(n, bits)) Buffer::fail("out is too small");
  const LatticePrefix prefix{static_cast<std::uint32_t>(bits), ranks, 1, 0, scale};
  nb::gil_scoped_release release;
  return lattice_message(kernels(), from.data(), type, n, prefix,
                         lattice_rounding(ranks, bits, inverse, stochastic, seed),
                         {static_cast<std::uint8_t>(codec), params}, thread_count(), to.data());
}

}  // namespace

void bind_lattice(nb::module_& m) {
  m.def("lattice_peak", &peak, "src"_a, "dtype"_a);
  m.def("lattice_scale", &scale, "peak"_a, "dtype"_a, "bits"_a, "ranks"_a);
  m.def("lattice_quantize", &quantize, "src"_a, "dtype"_a, "bits"_a, "ranks"_a, "inverse"_a, "stochastic"_a,
        "seed"_a, "out"_a);
  m.def("lattice_dequantize", &dequantize, "q"_a, "dtype"_a, "bits"_a, "scale"_a, "out"_a, "out_dtype"_a,
        "add"_a);
  m.def("lattice_encode", &encode, "src"_a, "dtype"_a, "bits"_a, "ranks"_a, "scale"_a, "inverse"_a,
        "stochastic"_a, "seed"_a, "codec"_a, "params"_a, "out"_a);
}

}  // namespace hybridcomp
