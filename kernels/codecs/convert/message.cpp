#include "codecs/convert/convert.hpp"
#include "codecs/messages/fixed.hpp"
#include "codecs/messages/sums.hpp"

namespace hybridcomp {

void convert_all(const Kernels& k, const std::uint8_t* src, DTypeCode src_dtype, std::size_t n, int threads,
                 std::uint8_t* dst, DTypeCode dst_dtype, bool add) {
  split(n, kGroup, ranges_of(n, kGroup, threads), [&](int, std::size_t begin, std::size_t end) {
    k.convert->convert(src + begin * size_of(src_dtype), src_dtype, dst + begin * size_of(dst_dtype),
                       dst_dtype, end - begin, add);
  });
}

std::size_t cast_message(const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n,
                         DTypeCode to, std::uint8_t codec, std::uint32_t params, int threads,
                         std::uint8_t* out) {
  return write_fixed(
      k, {codec, dtype, params, nullptr, 0}, n, kGroup, threads, out,
      [](std::size_t) { return std::size_t(0); }, [&](std::size_t e) { return e * size_of(to); },
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* values) {
        k.convert->convert(src + at * size_of(dtype), dtype, values, to, m, false);
      });
}

std::size_t cast_sum(const Kernels& k, const Sum& sum, DTypeCode to, std::uint8_t codec, std::uint32_t params,
                     int threads, std::uint8_t* out) {
  if (!sum.fits(1)) return 0;
  return write_fixed(
      k, {codec, sum.dtype, params, nullptr, 0}, sum.n, kPartTile, threads, out,
      [](std::size_t) { return std::size_t(0); }, [&](std::size_t e) { return e * size_of(to); },
      [&](std::size_t begin, std::size_t count, std::uint8_t*, std::uint8_t* values) {
        Sum::Buffer buffer;
        for (std::size_t at = begin; at < begin + count; at += kPartTile) {
          const std::size_t m = std::min(kPartTile, begin + count - at);
          std::uint8_t* const stored = values + (at - begin) * size_of(to);
          k.convert->convert(sum.tile(k, at, m, &buffer), sum.dtype, stored, to, m, false);
          sum.put(k, at, m, &buffer, [&](std::uint8_t* out) {
            k.convert->convert(stored, to, out, sum.result_dtype, m, false);
          });
        }
        if (sum.stream) streamed();
      });
}

}  // namespace hybridcomp
