// Rules that decide which elements the sparse codecs send: limits as integers, the order of sums, SIDCo's
// sample and its fit.
#pragma once

#include "hybridcomp/arithmetic.hpp"
#include "hybridcomp/wire.hpp"

namespace hybridcomp {

// -- magnitudes as integers: ordered as the numbers are, infinity above them, NaN above infinity -----------

struct KeyFormat {
  int mantissa;       // bits
  std::uint64_t inf;  // the key of infinity
};

HC_HD KeyFormat key_format(DTypeCode dtype) {
  switch (dtype) {
    case kFloat64:
      return {52, 0x7FF0000000000000ull};
    case kFloat16:
      return {10, 0x7C00u};
    case kBFloat16:
      return {7, 0x7F80u};
    default:
      return {23, 0x7F800000u};
  }
}

// Return a finite key as the double of the same value; exact, in integers (denormal numbers are read in no
// mode).
HC_HD double key_value(std::uint64_t key, KeyFormat format) {
  if (format.mantissa == 52) return float_of(key);
  const std::uint64_t one = 1ull << format.mantissa;
  const std::uint64_t bias = (format.inf >> format.mantissa) / 2;
  std::uint64_t exponent = (key >> format.mantissa) + 1023 - bias;
  std::uint64_t fraction = key & (one - 1);
  if (key < one) {
    if (key == 0) return 0.0;
    ++exponent;
    for (; fraction < one; fraction <<= 1) --exponent;
    fraction -= one;
  }
  return float_of(std::uint64_t((exponent << 52) | (fraction << (52 - format.mantissa))));
}

// Return the least key whose value is at least `limit` (not negative, not NaN); infinity's if no number
// reaches it.
HC_HD std::uint64_t least_key(double limit, DTypeCode dtype) {
  const KeyFormat format = key_format(dtype);
  std::uint64_t low = 0, high = format.inf;
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (bits_of(key_value(middle, format)) >= bits_of(limit))  // compared as integers, which no mode flushes
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// -- sums
// ----------------------------------------------------------------------------------------------------

// Lanes of a sum: element i is added to lane i % kLanes, in double; then the upper half of the lanes to the
// lower half, until one is left.
constexpr int kLanes = 16;

HC_HD double sum_of_lanes(const double* lanes) {
  double sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = lanes[i];
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Return the magnitude that a finite element of a float or double tensor adds to a sum. Zero where it is so
// small that it, or its square, may be denormal: processor modes that flush them then change nothing. A
// double is at most 2^400, so that no sum of squares is infinite.
HC_HD double summand(std::uint32_t key) {
  const float kept = float_of(key < Real<float>::kSmallest ? 0u : key);
  return static_cast<double>(kept);
}
HC_HD double summand(std::uint64_t key) {
  const std::uint64_t kLeast = 0x26F0000000000000ull;  // 2^-400
  const std::uint64_t kMost = 0x58F0000000000000ull;   // 2^400
  return float_of(key < kLeast ? std::uint64_t(0) : key > kMost ? kMost : key);
}

HC_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);  // correctly rounded, as IEEE 754 asks
#endif
}

// -- SIDCo
// ---------------------------------------------------------------------------------------------------

constexpr std::uint64_t kGroupOfSample = 32;  // neighbours taken together: two cache lines of floats
constexpr int kMostStages = 16;
constexpr double kNear = 0.1;             // a share is right when it is within this of the wanted one
constexpr std::uint64_t kMostTaken = 16;  // multiples of the most sent at which the limit is given up

// Size of a sample: as many elements as hold `selected` of those to be sent, from `least` elements up to one
// element in `share` of the tensor.
struct SampleSize {
  std::uint64_t selected, least, share;
};

// Sample for as many stages as it takes: the number of elements that reach a limit is known to a fifth or so,
// which is why the sample's limit is one for twice as many (wide_goal).
constexpr SampleSize kAdaptedSample = {32, 2048, 32};
// Sample for a fixed number of stages, whose limit is the tensor's: the number is known to 4 %.
constexpr SampleSize kFixedSample = {512, 16384, 8};

// Return how many of the sample the first limit should leave if `target` of them are to be sent: hardly any
// tensor then has too few.
HC_HD double wide_goal(double target) { return 2 * target + 8; }

// Return how many groups of a tensor of n elements, of which k are to be sent, are in the sample. 0: all
// elements are, as in tensors of up to twice the least.
HC_HD std::uint64_t sample_groups(std::uint64_t n, std::uint64_t k, SampleSize sample) {
  if (n <= 2 * sample.least) return 0;
  const std::uint64_t wanted = (n / k + 1) * sample.selected, most = n / sample.share;
  const std::uint64_t size = wanted < most ? wanted : most;
  return (size < sample.least ? sample.least : size) / kGroupOfSample;
}

// Return the first element of a group: evenly spaced, moved by a hash so that no period of the data (a row)
// is met.
HC_HD std::uint64_t group_start(std::uint64_t group, std::uint64_t groups, std::uint64_t n) {
  const std::uint64_t slot = n / groups;
  std::uint32_t h = static_cast<std::uint32_t>(group) * 0x9E3779B9u + 0x7F4A7C15u;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  h ^= h >> 16;
  return slot * group + ((h * (slot / kGroupOfSample)) >> 32) * kGroupOfSample;
}

// Return ln(x) of a normal x > 0, to 13 digits, by additions, multiplications and divisions only.
HC_HD double natural_log(double x) {
  const std::uint64_t bits = bits_of(x);
  std::int64_t exponent = static_cast<std::int64_t>(bits >> 52) - 1023;
  double m = float_of(std::uint64_t((bits & 0x000FFFFFFFFFFFFFull) | 0x3FF0000000000000ull));
  if (m > 1.4142135623730951) {
    m = m / 2;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1), z = s * s;  // ln m = 2 atanh s, |s| < 0.172
  double series = 1.0 / 17;
  for (int odd = 15; odd > 0; odd -= 2) series = series * z + 1.0 / odd;
  const double twice = s + s;
  return static_cast<double>(exponent) * 0.6931471805599453 + twice * series;
}

// Return (e^x - 1) / x for x from -1000 to 40, to 13 digits, by the same operations; 1 for zero.
HC_HD double mean_growth(double x) {
  const double turns = x * 1.4426950408889634;
  const std::int64_t n = static_cast<std::int64_t>(turns < 0 ? turns - 0.5 : turns + 0.5);
  const double r = x - static_cast<double>(n) * 0.6931471805599453;  // |r| < 0.347
  double series = 1.0;
  for (int i = 14; i > 1; --i) series = series * (r / i) + 1.0;
  if (n == 0) return series;
  const double power = n < -60 ? 0.0 : float_of(static_cast<std::uint64_t>(n + 1023) << 52);
  return (power * (r * series) + (power - 1)) / x;
}

// Distribution assumed for a tail's excess over its limit: exponential, or generalised Pareto.
enum Distribution : std::uint32_t { kExponential = 0, kPareto = 1 };

// Survivors of a limit: how many elements of the sample reach it, and the sum of their magnitudes; the sum of
// their squares, for kPareto only.
struct Tail {
  double limit;
  double count;
  double sum;
  double squares = 0;
};

constexpr double kMostShape = 64;  // mean^2 / variance; above it nearly all exceed a limit by the same

// Return how far beyond a limit the largest exp(-logs)-th part of its survivors lies, by the mean and the
// variance of the survivors' excess: a share (1 - k x / alpha)^(1 / k) exceeds it by x, with alpha and k from
// the moments.
HC_HD double pareto_distance(double mean, double variance, double logs) {
  const double square = mean * mean;
  const double shape = square < kMostShape * variance ? square / variance : kMostShape;
  const double alpha = 0.5 * mean * (shape + 1), k = 0.5 * (shape - 1);
  return alpha * logs * mean_growth(-k * logs);
}

// Do one stage, for the tail of `limit`, or of the least key beyond it: return how far beyond lie those that
// are exp(-logs) of its survivors.
HC_HD double tail_distance(Tail tail, double limit, double logs, Distribution distribution) {
  const double mean = tail.sum / tail.count, excess = mean - limit;
  if (!(excess > 0)) return 0.0;
  if (distribution == kExponential) return excess * logs;
  return pareto_distance(excess, tail.squares / tail.count - mean * mean, logs);
}

// Return the limit that `goal` of the tail's survivors would reach.
HC_HD double fitted_limit(Tail tail, double goal, Distribution distribution) {
  return tail.limit + tail_distance(tail, tail.limit, natural_log(tail.count / goal), distribution);
}

// Return the same from two limits whose survivors are counted, between or beyond them.
HC_HD double limit_between(Tail low, Tail high, double goal) {
  const double below = natural_log(low.count / goal);
  const double across = natural_log(low.count / (high.count < 0.5 ? 0.5 : high.count));
  return low.limit + (high.limit - low.limit) * (below / across);
}

}  // namespace hybridcomp
