#include "bind.hpp"
#include "convert.hpp"
#include "fixed.hpp"

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
  const Kernels& k = kernels();
  split(n, kGroup, ranges_of(n, kGroup, thread_count()), [&](int, std::size_t begin, std::size_t end) {
    k.convert->convert(from.data() + begin * size_of(from_type), from_type,
                       to.data() + begin * size_of(to_type), to_type, end - begin, add);
  });
}

std::size_t cast_encode(nb::handle src, int dtype, int target, int codec, std::uint32_t params,
                        nb::handle out) {
  const DTypeCode type = float_dtype(dtype), to_type = float_dtype(target);
  const Buffer from(src, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "src");
  if (to.bytes() < sizeof(Header) + n * size_of(to_type)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  const Kernels& k = kernels();
  return write_fixed(
      k, {static_cast<std::uint8_t>(codec), type, params, nullptr, 0}, n, kGroup, thread_count(), to.data(),
      [](std::size_t) { return std::size_t(0); }, [&](std::size_t e) { return e * size_of(to_type); },
      [&](std::size_t at, std::size_t m, std::uint8_t*, std::uint8_t* values) {
        k.convert->convert(from.data() + at * size_of(type), type, values, to_type, m, false);
      });
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def("convert", &convert, "src"_a, "src_dtype"_a, "dst"_a, "dst_dtype"_a, "add"_a);
  m.def("cast_encode", &cast_encode, "src"_a, "dtype"_a, "target"_a, "codec"_a, "params"_a, "out"_a);
}

}  // namespace hybridcomp
