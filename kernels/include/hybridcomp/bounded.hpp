// Rules of error-bounded compression (codec `bounded`), for host and device: the step, the integers, the
// values that they decode to, the check of each, and the code of a block.
//
// An element x becomes q = rint(x / step) and decodes to y = q * step. `step` is a little less than twice the
// bound, so that the roundings of x / step and of y do not push |x - y| over it; for fp16 and bf16 it is a
// power of two, since there a y between two elements' values rounds to one of them, which may be the farther
// one. The check makes sure in any case: |x - y| <= limit, else the block is kept as it is.
#pragma once

#include "hybridcomp/arithmetic.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

constexpr std::size_t kBoundedBlock = 64;  // elements of a block; a bit plane of one is 8 bytes

// Code of a block, one byte. 0 .. 31: so many bit planes of its integers. 32 + (0 .. 31): its first integer
// (int32), then the bit planes of each integer's difference to the one before it; the first difference is 0.
constexpr std::uint8_t kBoundedDelta = 32;
constexpr std::uint8_t kBoundedRaw = 64;       // the elements as they are
constexpr std::uint8_t kBoundedConstant = 65;  // one element, to which all others are equal bit for bit
constexpr std::size_t kBoundedSample = 16;     // elements that tell whether differences may pay

// Coder of a message's integers. Only kBoundedPlanes is coded on devices, too.
enum BoundedCoderCode : std::uint32_t { kBoundedPlanes = 0, kBoundedRows = 1, kBoundedHuffman = 2 };

// Prefix of the payload; with kBoundedPlanes a code for each block follows, then the blocks' bytes one after
// another.
struct BoundedPrefix {
  double bound;         // absolute; at least 0
  std::uint32_t block;  // elements of a block (kBoundedBlock), a row or a chunk
  std::uint32_t coder;  // a BoundedCoderCode
};
static_assert(sizeof(BoundedPrefix) == 16, "the prefix is 16 bytes on the wire");

template <typename T>
struct BoundedStep {
  T limit;    // the bound, rounded down to T and to where T's arithmetic is free of denormal numbers
  T step;     // y = q * step; 0: blocks are zero, constant or kept as they are
  T inverse;  // q = rint(x * inverse)
};

// Integers have at most so many bits, sign included: above, rint by addition would not be exact, and y hardly
// ever within the bound.
template <typename T>
HC_HD std::uint32_t bounded_most_planes() {
  return sizeof(T) == 8 ? 30 : 22;
}

HC_HD BoundedStep<float> bounded_step_float(double bound, bool coarse) {
  std::uint64_t a = bits_of(bound);
  if (a < 0x39B0000000000000ull) return {0.0f, 0.0f, 0.0f};  // below 2^-100
  if (a > 0x4770000000000000ull) a = 0x4770000000000000ull;  // 2^120
  const std::uint32_t limit = static_cast<std::uint32_t>((a - (896ull << 52)) >> 29);
  const float twice = float_of(limit + 0x00800000u);
  const float step = coarse ? float_of(bits_of(twice) & 0x7F800000u) : twice * 0.99609375f;
  return {float_of(limit), step, 1.0f / step};
}

HC_HD BoundedStep<double> bounded_step_double(double bound) {
  std::uint64_t a = bits_of(bound);
  if (a < Real<double>::kSmallest) return {0.0, 0.0, 0.0};
  if (a > 0x7E70000000000000ull) a = 0x7E70000000000000ull;  // 2^1000
  const double limit = float_of(a);
  const double step = (limit + limit) * 0.99609375;
  return {limit, step, 1.0 / step};
}

// Return the step of a bound, which is finite and at least 0; D is the elements' type, T their computing
// type.
template <DTypeCode D, typename T>
HC_HD BoundedStep<T> bounded_step(double bound) {
  if constexpr (D == kFloat64)
    return bounded_step_double(bound);
  else
    return bounded_step_float(bound, D != kFloat32);
}

// Return the absolute bound for `relative` and values from `low` to `high`, which are zero rather than
// denormal; 0 for no values (low > high). A bound that a flush to zero could change becomes 0.
HC_HD double bounded_relative(double low, double high, double relative) {
  constexpr std::uint64_t kTiny = 0x0170000000000000ull;  // 2^-1000
  constexpr std::uint64_t kLargest = 0x7FEFFFFFFFFFFFFFull;
  if (bits_of(relative) < kTiny || low > high) return 0.0;
  const double range = high - low;
  if (magnitude(range) < kTiny) return 0.0;
  double bound = relative * range;
  if (magnitude(range) >= Real<double>::kInfinity) {  // the bound itself may still be a number
    bound = relative * (high * 0.5 - low * 0.5);
    bound = bound + bound;
  }
  if (magnitude(bound) < kTiny) return 0.0;
  return magnitude(bound) > kLargest ? float_of(kLargest) : bound;
}

// Return rint(x * inverse); an integer of too many bits where that is too large or not a number.
HC_HD std::int32_t bounded_integer(float x, float inverse) {
  const float v = x * inverse;
  const std::int32_t q =
      static_cast<std::int32_t>(bits_of(v + float_of(Real<float>::kRoundBits)) - Real<float>::kRoundBits);
  return magnitude(v) < 0x4A800000u ? q : INT32_MIN;  // 2^22
}
HC_HD std::int32_t bounded_integer(double x, double inverse) {
  const double v = x * inverse;
  const std::uint64_t q = bits_of(v + float_of(Real<double>::kRoundBits)) - Real<double>::kRoundBits;
  return magnitude(v) < 0x41D0000000000000ull ? static_cast<std::int32_t>(q) : INT32_MIN;  // 2^30
}

// Stands in the place of an integer for an element that is kept as it is.
constexpr std::int32_t kBoundedKept = INT32_MIN;

template <typename T>
HC_HD T bounded_value(std::int32_t q, T step) {
  return static_cast<T>(q) * step;
}

// Return y as an element of type D holds it.
template <DTypeCode D, typename T>
HC_HD T bounded_stored(T y) {
  if constexpr (D == kFloat16)
    return float_of(half_to_float_bits(float_to_half_bits(bits_of(y))));
  else if constexpr (D == kBFloat16)
    return float_of(bfloat_to_float_bits(float_to_bfloat_bits(bits_of(y))));
  else
    return y;
}

// Whether |x - y| <= limit. The difference is exact wherever it could be near the limit: y is 0, or x is
// between y / 2 and 2 y (for q = 1 or -1 only because the step is less than twice the limit, or a power of
// two).
template <typename T>
HC_HD bool bounded_holds(T x, T y, T limit) {
  return magnitude(x - y) <= bits_of(limit);
}

// Return a number with as many bits as q has in two's complement, sign included; 0 for 0.
HC_HD std::uint32_t bounded_spread(std::int32_t q) {
  const std::uint32_t u = static_cast<std::uint32_t>(q);
  return u ^ (u + u);
}

HC_HD std::uint32_t bounded_bits(std::uint32_t x) {
#if defined(__CUDA_ARCH__)
  return 32u - static_cast<std::uint32_t>(__clz(static_cast<int>(x)));
#else
  return 63u - static_cast<std::uint32_t>(__builtin_clzll(2 * static_cast<std::uint64_t>(x) + 1));
#endif
}

// Return the low `planes` bits of v (1 .. 31) as a signed integer.
HC_HD std::int32_t bounded_signed(std::uint32_t v, std::uint32_t planes) {
  return static_cast<std::int32_t>(v << (32 - planes)) >> (32 - planes);
}

// Bytes that a block of m elements of `size` bytes takes; 0x8000 if there is no such code, or if it saves no
// bytes: no encoder writes such a block, and decoders have room for blocks of at most m * size bytes.
HC_HD std::uint32_t bounded_bytes(std::uint8_t code, std::size_t m, std::size_t size) {
  const std::uint32_t raw = static_cast<std::uint32_t>(m * size);
  if (code == kBoundedRaw) return raw;
  if (code == kBoundedConstant) return static_cast<std::uint32_t>(size);
  if (code == 0) return 0;
  if (code > kBoundedConstant) return 0x8000u;
  const std::uint32_t bytes = code < kBoundedDelta ? code * 8u : 4u + (code - kBoundedDelta) * 8u;
  return bytes < raw ? bytes : 0x8000u;
}

// Whether differences save enough: more than one plane, since they take longer to decode.
HC_HD bool bounded_saves(std::uint32_t plain, std::uint32_t delta) {
  return bounded_bits(delta) + 1 < bounded_bits(plain);
}

// Return the code of a block of m elements whose values all hold. If it is kBoundedRaw, the caller gives
// blocks of zeros and constant blocks their own codes. `plain` is the "or" of the integers' spreads, `delta`
// of the differences': of all of them if those of the first kBoundedSample save, else any value that does
// not.
template <typename T>
HC_HD std::uint8_t bounded_code(std::uint32_t plain, std::uint32_t delta, std::size_t m, std::size_t size) {
  const std::uint32_t planes = bounded_bits(plain), other = bounded_bits(delta);
  const bool saves = bounded_saves(plain, delta);
  const std::uint32_t code = saves ? kBoundedDelta + other : planes;
  const std::uint32_t bytes = saves ? 4 + other * 8 : planes * 8;
  return static_cast<std::uint8_t>(planes > bounded_most_planes<T>() || bytes >= m * size ? kBoundedRaw
                                                                                          : code);
}

}  // namespace hybridcomp
