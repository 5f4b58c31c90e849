#include "codecs/lossless/mpc.hpp"
#include "python/bind.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

void check_width(int width) {
  if (width != 2 && width != 4 && width != 8) Buffer::fail("width must be 2, 4 or 8");
}

std::size_t bound(std::size_t bytes, int width) {
  check_width(width);
  return mpc_bound(bytes, width);
}

std::size_t encode(nb::handle src, int width, std::uint32_t lag, int codec, int dtype, std::uint64_t count,
                   std::uint32_t params, nb::handle out) {
  check_width(width);
  if (lag < 1 || lag > kMpcMaxLag) Buffer::fail("lag must be from 1 to 32");
  if (codec < 0 || codec > 255 || dtype < 0 || dtype > 255) Buffer::fail("codec and dtype must fit a byte");
  const Buffer from(src, false), to(out, true);
  if (to.bytes() < sizeof(Header) + mpc_bound(from.bytes(), width)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return mpc_message(kernels(), from.data(), from.bytes(), width, lag, static_cast<std::uint8_t>(codec),
                     static_cast<std::uint8_t>(dtype), count, params, thread_count(), to.data());
}

int check(nb::handle payload, std::size_t bytes, int width) {
  check_width(width);
  const Buffer from(payload, false);
  return check_mpc(from.data(), from.bytes(), bytes, width);
}

int decode(nb::handle payload, int width, nb::handle out) {
  check_width(width);
  const Buffer from(payload, false), to(out, true);
  nb::gil_scoped_release release;
  return mpc_values(kernels(), from.data(), from.bytes(), to.bytes(), width, thread_count(),
                    {to.data(), kFloat32, kFloat32, false, false});
}

}  // namespace

void bind_mpc(nb::module_& m) {
  m.def("mpc_bound", &bound, "bytes"_a, "width"_a);
  m.def("mpc_encode", &encode, "src"_a, "width"_a, "lag"_a, "codec"_a, "dtype"_a, "count"_a, "params"_a,
        "out"_a);
  m.def("mpc_check", &check, "payload"_a, "bytes"_a, "width"_a);
  m.def("mpc_decode", &decode, "payload"_a, "width"_a, "out"_a);
}

}  // namespace hybridcomp
