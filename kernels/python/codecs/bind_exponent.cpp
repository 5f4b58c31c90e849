#include "codecs/lossless/exponent.hpp"
#include "codecs/messages/encoder.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder exponent_encoder(std::uint8_t codec, std::uint32_t params) {
  return {{codec, params},
          [](std::size_t n, DTypeCode dtype) { return sizeof(Header) + exponent_payload(n, dtype); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) { return exponent_message(k, src, dtype, n, codec, params, threads, out); }};
}

}  // namespace

void bind_exponent(nb::module_& m) { m.def("exponent_encoder", &exponent_encoder, "codec"_a, "params"_a); }

}  // namespace hybridcomp
