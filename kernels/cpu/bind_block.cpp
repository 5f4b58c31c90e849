#include "bind.hpp"
#include "encoder.hpp"
#include "message.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder quantize_encoder(int bits, std::uint32_t block, bool symmetric, bool hadamard, bool stochastic,
                         std::uint64_t seed, std::uint8_t codec, std::uint32_t params) {
  if (bits != 8 && bits != 4 && bits != 2) Buffer::fail("bits must be 8, 4 or 2");
  const BlockFormat format{block, bits, symmetric, hadamard, seed};
  if (!valid_format(format)) Buffer::fail("block is not allowed");
  const bool plain = symmetric && !hadamard && !stochastic;
  return {
      {codec, params, plain ? bits : 0, plain ? block : 0},
      [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + quantized_payload(n, dtype, format); },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
          std::uint8_t* out) {
        return quantize_message(k, src, dtype, n, format, stochastic, codec, params, threads, out);
      },
      [=](const Kernels& k, const Sum& sum, int threads, std::uint8_t* out) {
        return quantize_sum(k, sum, format, stochastic, codec, params, threads, out);
      }};
}

}  // namespace

void bind_block(nb::module_& m) {
  m.def("quantize_encoder", &quantize_encoder, "bits"_a, "block"_a, "symmetric"_a, "hadamard"_a,
        "stochastic"_a, "seed"_a, "codec"_a, "params"_a);
}

}  // namespace hybridcomp
