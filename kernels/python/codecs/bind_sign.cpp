#include "codecs/block/message.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/sign/sign.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder sign_encoder(std::uint32_t block, std::uint8_t codec, std::uint32_t params) {
  if (!valid_block(block)) Buffer::fail("block is not allowed");
  return {
      {codec, params},
      [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + sign_payload(n, dtype, block); },
      [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
          std::uint8_t* out) { return sign_message(k, src, dtype, n, block, codec, params, threads, out); }};
}

}  // namespace

void bind_sign(nb::module_& m) { m.def("sign_encoder", &sign_encoder, "block"_a, "codec"_a, "params"_a); }

}  // namespace hybridcomp
