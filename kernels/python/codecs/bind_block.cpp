#include "codecs/block/message.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder make_encoder(int bits, std::uint32_t block, bool symmetric, bool hadamard, bool stochastic,
                     std::uint64_t seed, std::uint8_t codec, std::uint32_t params) {
  if (bits != 8 && bits != 4 && bits != 2) Buffer::fail("bits must be 8, 4 or 2");
  const BlockFormat format{block, bits, symmetric, hadamard, seed};
  if (!valid_format(format)) Buffer::fail("block is not allowed");
  return quantize_encoder(format, stochastic, codec, params);
}

}  // namespace

void bind_block(nb::module_& m) {
  m.def("quantize_encoder", &make_encoder, "bits"_a, "block"_a, "symmetric"_a, "hadamard"_a, "stochastic"_a,
        "seed"_a, "codec"_a, "params"_a);
}

}  // namespace hybridcomp
