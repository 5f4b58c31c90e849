#include "codecs/messages/encoder.hpp"
#include "codecs/zfp/zfp.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder zfp_encoder(std::uint32_t bits, std::uint8_t codec, std::uint32_t params) {
  return {
      {codec, params},
      [=](std::size_t n, DTypeCode dtype) {
        return zfp_valid_bits(dtype, bits) ? sizeof(Header) + sizeof(ZfpPrefix) + zfp_bytes(n, bits) : 0;
      },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
          std::uint8_t* out) { return zfp_message(k, src, dtype, n, bits, codec, params, threads, out); }};
}

}  // namespace

void bind_zfp(nb::module_& m) { m.def("zfp_encoder", &zfp_encoder, "bits"_a, "codec"_a, "params"_a); }

}  // namespace hybridcomp
