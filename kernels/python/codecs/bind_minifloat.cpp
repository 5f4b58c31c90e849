#include "codecs/block/message.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/minifloat/minifloat.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder minifloat_encoder(std::uint32_t format, bool mx, std::uint32_t block, std::uint8_t codec,
                          std::uint32_t params) {
  if (format > kE2M1 || (format == kE2M1 && !mx)) Buffer::fail("format must be 0, 1 or, with mx, 2");
  if (mx ? block != kMxBlock : !valid_block(block))
    Buffer::fail("block must be a multiple of 8 from 8 to 65536, with mx 32");
  const MinifloatKind kind{static_cast<MinifloatFormat>(format), mx};
  return {{codec, params},
          [=](std::size_t n, DTypeCode) { return sizeof(Header) + minifloat_payload(n, block, kind); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return minifloat_message(k, src, dtype, n, block, kind, codec, params, threads, out);
          }};
}

}  // namespace

void bind_minifloat(nb::module_& m) {
  m.def("minifloat_encoder", &minifloat_encoder, "format"_a, "mx"_a, "block"_a, "codec"_a, "params"_a);
}

}  // namespace hybridcomp
