// Error feedback around sparse messages whose values go as they are. The residual is the values that were not
// sent: the corrected values, with zeros in the places of those sent. So the residual is corrected in place,
// encoded from there, and cleared where a value was sent.
#include "codecs/common/parallel.hpp"
#include "codecs/feedback/feedback.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/sparse/message.hpp"

namespace hybridcomp {

std::size_t encode_sparse_residual(const Kernels& k, const Encoder& encoder, const Source& x, std::size_t n,
                                   std::uint8_t* e, double ranks, int threads, std::uint8_t* out) {
  constexpr std::size_t kStep = 2048;
  alignas(64) static constexpr std::uint8_t kZeros[kStep * sizeof(double)] = {};
  const bool wide = x.dtype == kFloat64;
  const DTypeCode type = wide ? kFloat64 : kFloat32;
  const std::size_t size = size_of(type);
  const auto each = [&](auto f) {
    split(n, kStep, ranges_of(n, kStep, threads), [&](int, std::size_t begin, std::size_t end) {
      for (std::size_t at = begin; at < end; at += kStep) f(at, std::min(kStep, end - at));
    });
  };
  each([&](std::size_t at, std::size_t m) {
    k.feedback->add(x.from(at), e + at * size, e + at * size, m, false);
    if (ranks != 1) k.feedback->divide(e + at * size, wide, m, ranks);
  });
  const std::size_t bytes = encoder.write(k, e, type, n, threads, out);
  clear_sparse_message(out, bytes, n, type, e);
  if (ranks != 1)
    each([&](std::size_t at, std::size_t m) {
      k.feedback->lose(e + at * size, kZeros, e + at * size, wide, m, ranks);
    });
  return bytes;
}

}  // namespace hybridcomp
