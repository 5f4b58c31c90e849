#include "codecs/bounded/bounded.hpp"
#include "codecs/messages/encoder.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

Encoder bounded_encoder(double error, bool relative, std::uint8_t codec, std::uint32_t params) {
  if (bits_of(error) == 0 || bits_of(error) >= Real<double>::kInfinity)
    Buffer::fail("error must be a number above 0");
  return {{codec, params},
          [](std::size_t n, DTypeCode dtype) { return sizeof(Header) + bounded_payload(n, dtype); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return bounded_message(k, src, dtype, n, error, relative, codec, params, threads, out);
          }};
}

}  // namespace

void bind_bounded(nb::module_& m) {
  m.def("bounded_encoder", &bounded_encoder, "error"_a, "relative"_a, "codec"_a, "params"_a);
}

}  // namespace hybridcomp
