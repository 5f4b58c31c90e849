#include "codecs/convert/convert.hpp"
#include "codecs/messages/encoder.hpp"
#include "codecs/messages/sums.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

void convert(nb::handle src, int src_dtype, nb::handle dst, int dst_dtype, bool add) {
  const DTypeCode from_type = float_dtype(src_dtype);
  const DTypeCode to_type = add ? sum_dtype(dst_dtype) : float_dtype(dst_dtype);
  const Buffer from(src, false), to(dst, true);
  const std::size_t n = from.elements(size_of(from_type), "src");
  if (to.elements(size_of(to_type), "dst") != n) Buffer::fail("dst must have as many elements as src");
  nb::gil_scoped_release release;
  convert_all(kernels(), from.data(), from_type, n, thread_count(), to.data(), to_type, add);
}

// `target` 0: the elements' own type.
Encoder cast_encoder(int target, std::uint8_t codec, std::uint32_t params) {
  if (target) float_dtype(target);
  const auto type_for = [target](DTypeCode dtype) { return target ? static_cast<DTypeCode>(target) : dtype; };
  return {{codec, params},
          [=](std::size_t n, DTypeCode dtype) { return sizeof(Header) + n * size_of(type_for(dtype)); },
          [=](const Kernels& k, const std::uint8_t* src, DTypeCode dtype, std::size_t n, int threads,
              std::uint8_t* out) {
            return cast_message(k, src, dtype, n, type_for(dtype), codec, params, threads, out);
          },
          [=](const Kernels& k, const Sum& sum, int threads, std::uint8_t* out) {
            return cast_sum(k, sum, type_for(sum.dtype), codec, params, threads, out);
          }};
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def("convert", &convert, "src"_a, "src_dtype"_a, "dst"_a, "dst_dtype"_a, "add"_a);
  m.def("cast_encoder", &cast_encoder, "target"_a, "codec"_a, "params"_a);
}

}  // namespace hybridcomp
