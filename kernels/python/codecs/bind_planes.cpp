#include "codecs/lossless/planes.hpp"
#include "python/bind.hpp"

#include <deque>

namespace hybridcomp {
using namespace nb::literals;
namespace {

void check_width(int width) {
  if (width != 1 && width != 2 && width != 4 && width != 8) Buffer::fail("width must be 1, 2, 4 or 8");
}

bool rotates(int width, bool rotate) { return rotate && width > 1; }

// Memory of the planes: `width` buffers of m bytes.
struct Planes {
  std::deque<Buffer> buffers;
  std::uint8_t* data[kMaxPlanes];

  Planes(nb::list list, int width, std::size_t m, bool writable) {
    if (list.size() != static_cast<std::size_t>(width)) Buffer::fail("there must be a plane for each byte");
    for (int k = 0; k < width; ++k) {
      const Buffer& buffer = buffers.emplace_back(list[static_cast<std::size_t>(k)], writable);
      if (buffer.bytes() != m) Buffer::fail("each plane must have a byte for each word");
      data[k] = buffer.data();
    }
  }
};

unsigned planes_compressible(nb::handle src, int width, bool rotate) {
  check_width(width);
  const Buffer from(src, false);
  const std::size_t m = from.elements(static_cast<std::size_t>(width), "src");
  nb::gil_scoped_release release;
  return compressible_planes(from.data(), m, width, rotates(width, rotate));
}

void planes_split(nb::handle src, int width, bool rotate, nb::list planes) {
  check_width(width);
  const Buffer from(src, false);
  const std::size_t m = from.elements(static_cast<std::size_t>(width), "src");
  const Planes to(planes, width, m, true);
  nb::gil_scoped_release release;
  kernels().planes->split(from.data(), m, width, rotates(width, rotate), to.data);
}

void planes_join(nb::list planes, int width, bool rotate, nb::handle out) {
  check_width(width);
  const Buffer to(out, true);
  const std::size_t m = to.elements(static_cast<std::size_t>(width), "out");
  const Planes from(planes, width, m, false);
  nb::gil_scoped_release release;
  kernels().planes->join(from.data, m, width, rotates(width, rotate), to.data());
}

void planes_join_as(nb::list planes, int dtype, nb::handle out, int out_dtype, bool add) {
  const DTypeCode type = float_dtype(dtype);
  const DTypeCode out_type = add ? sum_dtype(out_dtype) : float_dtype(out_dtype);
  const Buffer to(out, true);
  const std::size_t m = to.elements(size_of(out_type), "out");
  const Planes from(planes, static_cast<int>(size_of(type)), m, false);
  nb::gil_scoped_release release;
  join_planes_as(kernels(), from.data, m, type, to.data(), out_type, add);
}

}  // namespace

void bind_planes(nb::module_& m) {
  m.def("planes_compressible", &planes_compressible, "src"_a, "width"_a, "rotate"_a);
  m.def("planes_split", &planes_split, "src"_a, "width"_a, "rotate"_a, "planes"_a);
  m.def("planes_join", &planes_join, "planes"_a, "width"_a, "rotate"_a, "out"_a);
  m.def("planes_join_as", &planes_join_as, "planes"_a, "dtype"_a, "out"_a, "out_dtype"_a, "add"_a);
}

}  // namespace hybridcomp
