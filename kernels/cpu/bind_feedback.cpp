#include <atomic>

#include "bind.hpp"
#include "encoder.hpp"
#include "feedback.hpp"
#include "message.hpp"

namespace hybridcomp {
using namespace nb::literals;
namespace {

// A state's memory as `count` values of its type; ValueError unless it is aligned and just that long.
std::uint8_t* state_of(const Buffer& buffer, std::size_t count, bool wide, const char* name) {
  const std::size_t size = wide ? 8 : 4;
  if (buffer.bytes() != count * size || reinterpret_cast<std::uintptr_t>(buffer.data()) % size)
    Buffer::fail(std::string(name) + " must be " + std::to_string(count) +
                 (wide ? " aligned doubles" : " aligned floats"));
  return buffer.data();
}

std::uint8_t* state_of(const Buffer& buffer, bool wide, std::size_t* count) {
  *count = buffer.elements(wide ? 8 : 4, "state");
  return state_of(buffer, *count, wide, "state");
}

// Calls f(range, begin, end) like split, in tiles of a cache line's multiple.
template <typename F>
void over_threads(std::size_t n, F f) {
  split(n, 2048, ranges_of(n, 2048, thread_count()),
        [&](int, std::size_t begin, std::size_t end) { f(begin, end - begin); });
}

bool feedback_add(nb::handle x, int dtype, nb::handle e, nb::handle out, bool subtract) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const Buffer from(x, false), state(e, false), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x"), size = wide ? 8 : 4;
  const std::uint8_t* const add = state_of(state, n, wide, "e");
  std::uint8_t* const sum = state_of(to, n, wide, "out");
  nb::gil_scoped_release release;
  std::atomic<bool> finite{true};
  over_threads(n, [&](std::size_t at, std::size_t m) {
    if (!kernels().feedback->add(from.data() + at * size_of(type), type, add + at * size, sum + at * size, m,
                                 subtract))
      finite = false;
  });
  return finite;
}

bool feedback_lose(nb::handle corrected, nb::handle decoded, nb::handle out, bool wide, double weight) {
  const Buffer c(corrected, false), d(decoded, false), to(out, true);
  std::size_t n = 0;
  const std::uint8_t* const from = state_of(c, wide, &n);
  const std::uint8_t* const sent = state_of(d, n, wide, "decoded");
  std::uint8_t* const lost = state_of(to, n, wide, "out");
  const std::size_t size = wide ? 8 : 4;
  nb::gil_scoped_release release;
  std::atomic<bool> finite{true};
  over_threads(n, [&](std::size_t at, std::size_t m) {
    if (!kernels().feedback->lose(from + at * size, sent + at * size, lost + at * size, wide, m, weight))
      finite = false;
  });
  return finite;
}

void feedback_move(nb::handle x, int dtype, nb::handle velocity, nb::handle sum, nb::handle moved,
                   nb::handle out, double momentum) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const Buffer from(x, false), u(velocity, false), v(sum, false), next(moved, true), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x"), size = wide ? 8 : 4;
  const std::uint8_t* const pu = state_of(u, n, wide, "velocity");
  const std::uint8_t* const pv = state_of(v, n, wide, "sum");
  std::uint8_t* const pn = state_of(next, n, wide, "moved");
  std::uint8_t* const po = state_of(to, n, wide, "out");
  nb::gil_scoped_release release;
  over_threads(n, [&](std::size_t at, std::size_t m) {
    kernels().feedback->move(from.data() + at * size_of(type), type, pu + at * size, pv + at * size,
                             pn + at * size, po + at * size, m, momentum);
  });
}

bool feedback_mask(nb::handle corrected, nb::handle decoded, nb::handle moved, bool wide) {
  const Buffer c(corrected, false), d(decoded, true), u(moved, true);
  std::size_t n = 0;
  const std::uint8_t* const from = state_of(c, wide, &n);
  std::uint8_t* const sent = state_of(d, n, wide, "decoded");
  std::uint8_t* const kept = state_of(u, n, wide, "moved");
  const std::size_t size = wide ? 8 : 4;
  nb::gil_scoped_release release;
  std::atomic<bool> finite{true};
  over_threads(n, [&](std::size_t at, std::size_t m) {
    if (!kernels().feedback->mask(from + at * size, sent + at * size, kept + at * size, wide, m))
      finite = false;
  });
  return finite;
}

BlockCodec block_codec(int bits, std::uint32_t block, int codec, std::uint32_t params) {
  if (bits != 8 && bits != 4 && bits != 2) Buffer::fail("bits must be 8, 4 or 2");
  if (!valid_block(block) || block > kLongestFused) Buffer::fail("block must be a multiple of 8 up to 8192");
  if (codec < 0 || codec > 255) Buffer::fail("codec must fit a byte");
  return {static_cast<std::uint8_t>(codec), params, block, bits};
}

void check_out(const Buffer& out, std::size_t n, bool wide, const BlockCodec& codec) {
  if (out.bytes() < sizeof(Header) + quantized_payload(n, wide ? kFloat64 : kFloat32, format_of(codec)))
    Buffer::fail("out is too small");
}

nb::tuple feedback_encode(nb::handle x, int dtype, nb::handle e, nb::handle lost, int bits,
                          std::uint32_t block, int codec, std::uint32_t params, nb::handle out,
                          double ranks) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const BlockCodec made = block_codec(bits, block, codec, params);
  const Buffer from(x, false), state(e, false), next(lost, true), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x");
  const std::uint8_t* const pe = state_of(state, n, wide, "e");
  std::uint8_t* const pl = state_of(next, n, wide, "lost");
  check_out(to, n, wide, made);
  bool finite = true;
  std::size_t bytes = 0;
  {
    nb::gil_scoped_release release;
    bytes = encode_residual(kernels(), made, from.data(), type, n, pe, pl, ranks, thread_count(), to.data(),
                            &finite);
  }
  return nb::make_tuple(bytes, finite);
}

bool feedback_modest(nb::handle x, int dtype, nb::handle e) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const Buffer from(x, false), state(e, false);
  const std::size_t n = from.elements(size_of(type), "x");
  const std::uint8_t* const add = state_of(state, n, wide, "e");
  nb::gil_scoped_release release;
  std::atomic<bool> all{true};
  over_threads(n, [&](std::size_t at, std::size_t m) {
    if (!kernels().feedback->modest(from.data() + at * size_of(type), type, add + at * (wide ? 8 : 4), m))
      all = false;
  });
  return all;
}

// `e` must have been found modest.
std::size_t feedback_encode_sparse(const Encoder& encoder, nb::handle x, int dtype, nb::handle e,
                                   double ranks, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const Buffer from(x, false), state(e, true), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x");
  std::uint8_t* const pe = state_of(state, n, wide, "e");
  if (to.bytes() < encoder.bound(n, wide ? kFloat64 : kFloat32)) Buffer::fail("out is too small");
  nb::gil_scoped_release release;
  return encode_sparse_residual(kernels(), encoder, from.data(), type, n, pe, ranks, thread_count(),
                                to.data());
}

// The sections of an int8 message of `count` elements, made by the caller: its payload after the prefix.
State8 state8(const Buffer& sections, std::size_t count, bool wide, std::size_t start, std::size_t n) {
  if (count > sections.bytes() || sections.bytes() != state_scales(count, wide) + count)
    Buffer::fail("state must be the scales and integers of " + std::to_string(count) + " elements");
  if (start > count || n > count - start) Buffer::fail("the span must lie within the state");
  return {sections.data(), sections.data() + state_scales(count, wide), count};
}

void check_fresh(const Buffer& fresh, std::size_t start, std::size_t n, bool wide) {
  if (fresh.bytes() < state_bytes(start, n, wide)) Buffer::fail("fresh is too small");
}

std::size_t average_fresh_bytes(std::size_t start, std::size_t n, bool wide) {
  return state_bytes(start, n, wide);
}

nb::tuple average_encode(nb::handle x, int dtype, nb::handle state, std::size_t count, std::size_t start,
                         nb::handle fresh, double beta, int bits, std::uint32_t block, int codec,
                         std::uint32_t params, nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const BlockCodec made = block_codec(bits, block, codec, params);
  const Buffer from(x, false), sections(state, true), scratch(fresh, true), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x");
  const State8 whole = state8(sections, count, wide, start, n);
  const std::size_t stop = start + n;
  if (start % kStateBlock || (stop % kStateBlock && stop != count) || fused_tile(block) % kStateBlock)
    Buffer::fail("the span and the tiles must be whole blocks of the state");
  check_fresh(scratch, start, n, wide);
  check_out(to, n, wide, made);
  bool finite = true;
  std::size_t bytes = 0;
  {
    nb::gil_scoped_release release;
    bytes = encode_average(kernels(), made, from.data(), type, start, n, whole, scratch.data(), beta,
                           thread_count(), to.data(), &finite);
  }
  return nb::make_tuple(bytes, finite);
}

void average_correct(nb::handle x, int dtype, nb::handle state, std::size_t count, std::size_t start,
                     nb::handle out) {
  const DTypeCode type = float_dtype(dtype);
  const bool wide = type == kFloat64;
  const Buffer from(x, false), sections(state, true), to(out, true);
  const std::size_t n = from.elements(size_of(type), "x");
  const State8 whole = state8(sections, count, wide, start, n);
  std::uint8_t* const sum = state_of(to, n, wide, "out");
  nb::gil_scoped_release release;
  correct_average(kernels(), from.data(), type, start, n, whole, sum, thread_count());
}

bool average_keep(nb::handle corrected, nb::handle decoded, bool wide, nb::handle state, std::size_t count,
                  std::size_t start, nb::handle fresh, double weight, double beta) {
  const Buffer c(corrected, false), d(decoded, false), sections(state, true), scratch(fresh, true);
  std::size_t n = 0;
  const std::uint8_t* const from = state_of(c, wide, &n);
  const std::uint8_t* const sent = state_of(d, n, wide, "decoded");
  const State8 whole = state8(sections, count, wide, start, n);
  check_fresh(scratch, start, n, wide);
  nb::gil_scoped_release release;
  return keep_average(kernels(), from, sent, wide, start, n, whole, scratch.data(), weight, beta,
                      thread_count());
}

}  // namespace

void bind_feedback(nb::module_& m) {
  m.def("feedback_add", &feedback_add, "x"_a, "dtype"_a, "e"_a, "out"_a, "subtract"_a);
  m.def("feedback_lose", &feedback_lose, "corrected"_a, "decoded"_a, "out"_a, "wide"_a, "weight"_a);
  m.def("feedback_move", &feedback_move, "x"_a, "dtype"_a, "velocity"_a, "sum"_a, "moved"_a, "out"_a,
        "momentum"_a);
  m.def("feedback_mask", &feedback_mask, "corrected"_a, "decoded"_a, "moved"_a, "wide"_a);
  m.def("feedback_encode", &feedback_encode, "x"_a, "dtype"_a, "e"_a, "lost"_a, "bits"_a, "block"_a,
        "codec"_a, "params"_a, "out"_a, "ranks"_a);
  m.def("feedback_modest", &feedback_modest, "x"_a, "dtype"_a, "e"_a);
  m.def("feedback_encode_sparse", &feedback_encode_sparse, "encoder"_a, "x"_a, "dtype"_a, "e"_a, "ranks"_a,
        "out"_a);
  m.def("average_fresh_bytes", &average_fresh_bytes, "start"_a, "n"_a, "wide"_a);
  m.def("average_encode", &average_encode, "x"_a, "dtype"_a, "state"_a, "count"_a, "start"_a, "fresh"_a,
        "beta"_a, "bits"_a, "block"_a, "codec"_a, "params"_a, "out"_a);
  m.def("average_correct", &average_correct, "x"_a, "dtype"_a, "state"_a, "count"_a, "start"_a, "out"_a);
  m.def("average_keep", &average_keep, "corrected"_a, "decoded"_a, "wide"_a, "state"_a, "count"_a, "start"_a,
        "fresh"_a, "weight"_a, "beta"_a);
}

}  // namespace hybridcomp
