// Loops over elements that are folded two by two; compiled once per instruction set.
#include "codecs/fold/fold.hpp"

#include <cmath>
#include <limits>

#include "codecs/common/tile.hpp"
#include "hybridcomp/fold.hpp"

namespace hybridcomp::HC_ISA {
namespace {

// Elements of arrays of any alignment: MPI and callers pass what they have.
template <typename T>
struct __attribute__((packed, may_alias)) Loose {
  T value;
};

template <typename T, typename Join>
bool join_all(const void* from_bytes, void* into_bytes, std::size_t n, Join join) {
  const auto* const from = static_cast<const Loose<T>*>(from_bytes);
  auto* const into = static_cast<Loose<T>*>(into_bytes);
#pragma GCC ivdep  // they are apart
  for (std::size_t i = 0; i < n; ++i) into[i].value = join(into[i].value, from[i].value);
  return true;
}

template <typename T>
bool fold_integers(Fold fold, const void* from, void* into, std::size_t n) {
  switch (fold) {
    case Fold::kSum:
      return join_all<T>(from, into, n, [](T a, T b) { return static_cast<T>(a + b); });
    case Fold::kMax:
      return join_all<T>(from, into, n, [](T a, T b) { return a > b ? a : b; });
    case Fold::kOr:
      return join_all<T>(from, into, n, [](T a, T b) { return static_cast<T>(a | b); });
    default:
      return false;
  }
}

template <typename F>
bool fold_extremes(Fold fold, const void* from, void* into, std::size_t n) {
  using Bits = typename F::Bits;
  if (fold == Fold::kMax)
    return join_all<Bits>(from, into, n, [](Bits a, Bits b) { return extreme<F, false>(a, b); });
  if (fold == Fold::kMin)
    return join_all<Bits>(from, into, n, [](Bits a, Bits b) { return extreme<F, true>(a, b); });
  return false;
}

template <typename T, typename F>
bool fold_floats(Fold fold, const void* from, void* into, std::size_t n) {
  if (fold == Fold::kSum) return join_all<T>(from, into, n, [](T a, T b) { return quieted(a + b); });
  if (fold == Fold::kProduct) return join_all<T>(from, into, n, [](T a, T b) { return quieted(a * b); });
  return fold_extremes<F>(fold, from, into, n);
}

template <typename T>
struct Complex {
  T real, imaginary;
};

template <typename T, typename F>
bool fold_complex(Fold fold, const void* from, void* into, std::size_t n) {
  if (fold == Fold::kSum) return fold_floats<T, F>(fold, from, into, 2 * n);
  if (fold != Fold::kProduct) return false;
  // In one loop GCC joins products and sums to fused operations where an instruction set has them, whatever
  // -ffp-contract says: so the products go by way of memory.
  constexpr std::size_t kTogether = 128;
  Complex<T> real[kTogether], imaginary[kTogether];
  const auto* a = static_cast<Loose<Complex<T>>*>(into);
  const auto* b = static_cast<const Loose<Complex<T>>*>(from);
  auto* out = static_cast<Loose<Complex<T>>*>(into);
  for (std::size_t at = 0; at < n; at += kTogether, a += kTogether, b += kTogether, out += kTogether) {
    const std::size_t m = smaller(kTogether, n - at);
    for (std::size_t i = 0; i < m; ++i) {
      const Complex<T> x = a[i].value, y = b[i].value;
      real[i] = {x.real * y.real, x.imaginary * y.imaginary};
      imaginary[i] = {x.real * y.imaginary, x.imaginary * y.real};
    }
    for (std::size_t i = 0; i < m; ++i)
      out[i].value = {quieted(real[i].real - real[i].imaginary),
                      quieted(imaginary[i].real + imaginary[i].imaginary)};
  }
  return true;
}

template <typename T>
struct At {
  T value;
  int index;
};

template <typename T, typename F>
bool fold_at(Fold fold, const void* from, void* into, std::size_t n) {
  using Signed = typename F::Signed;
  if (fold != Fold::kMaxAt && fold != Fold::kMinAt) return false;
  // NaN lies beyond all numbers.
  const Signed beyond =
      fold == Fold::kMaxAt ? std::numeric_limits<Signed>::max() : std::numeric_limits<Signed>::min();
  const auto place = [&](T value) {
    const auto bits = bits_of(value);
    return is_nan<F>(bits) ? beyond : ordered<F>(static_cast<Signed>(bits));
  };
  const auto* from_bytes = static_cast<const unsigned char*>(from);
  auto* into_bytes = static_cast<unsigned char*>(into);
  for (std::size_t i = 0; i < n; ++i, from_bytes += sizeof(At<T>), into_bytes += sizeof(At<T>)) {
    At<T> a, b;
    __builtin_memcpy(&a, into_bytes, sizeof(a));
    __builtin_memcpy(&b, from_bytes, sizeof(b));
    const Signed x = place(a.value), y = place(b.value);
    const bool other = fold == Fold::kMaxAt ? y > x : y < x;
    const int index = other ? b.index : x == y && b.index < a.index ? b.index : a.index;
    const At<T> result{quieted(other ? b.value : a.value), index};
    __builtin_memcpy(into_bytes, &result.value, sizeof(T));
    __builtin_memcpy(into_bytes + sizeof(T), &result.index, sizeof(int));
  }
  return true;
}

using Long = long double;

bool fold_long(Fold fold, const void* from, void* into, std::size_t n) {
  const auto nan_or = [](Long x) { return std::isnan(x) ? std::numeric_limits<Long>::quiet_NaN() : x; };
  const auto above = [](Long a, Long b) { return a > b || (a == b && !std::signbit(a)); };
  switch (fold) {
    case Fold::kSum:
      return join_all<Long>(from, into, n, [=](Long a, Long b) { return nan_or(a + b); });
    case Fold::kProduct:
      return join_all<Long>(from, into, n, [=](Long a, Long b) { return nan_or(a * b); });
    case Fold::kMax:
      return join_all<Long>(from, into, n, [=](Long a, Long b) {
        return std::isnan(a) || std::isnan(b) ? nan_or(a + b) : above(a, b) ? a : b;
      });
    case Fold::kMin:
      return join_all<Long>(from, into, n, [=](Long a, Long b) {
        return std::isnan(a) || std::isnan(b) ? nan_or(a + b) : above(a, b) ? b : a;
      });
    default:
      return false;
  }
}

bool into(Fold fold, int dtype, const void* from, void* into, std::size_t n) {
  switch (dtype) {
    case kFloat32:
      return fold_floats<float, Float32Bits>(fold, from, into, n);
    case kFloat64:
      return fold_floats<double, Float64Bits>(fold, from, into, n);
    case kFloat16:
      return fold_extremes<Float16Bits>(fold, from, into, n);
    case kBFloat16:
      return fold_extremes<BFloat16Bits>(fold, from, into, n);
    case kComplex64:
      return fold_complex<float, Float32Bits>(fold, from, into, n);
    case kComplex128:
      return fold_complex<double, Float64Bits>(fold, from, into, n);
    case kFloatAt:
      return fold_at<float, Float32Bits>(fold, from, into, n);
    case kDoubleAt:
      return fold_at<double, Float64Bits>(fold, from, into, n);
    case kLongDouble:
      return fold_long(fold, from, into, n);
    case kUint8:
      return fold_integers<std::uint8_t>(fold, from, into, n);
    case kUint16:
      return fold_integers<std::uint16_t>(fold, from, into, n);
    case kUint32:
      return fold_integers<std::uint32_t>(fold, from, into, n);
    case kUint64:
      return fold_integers<std::uint64_t>(fold, from, into, n);
    // Of integers with a sign, sums alone: they have the same bits.
    case kInt8:
      return fold == Fold::kSum && fold_integers<std::uint8_t>(fold, from, into, n);
    case kInt16:
      return fold == Fold::kSum && fold_integers<std::uint16_t>(fold, from, into, n);
    case kInt32:
      return fold == Fold::kSum && fold_integers<std::uint32_t>(fold, from, into, n);
    case kInt64:
      return fold == Fold::kSum && fold_integers<std::uint64_t>(fold, from, into, n);
    default:
      return false;
  }
}

}  // namespace

extern const FoldKernels fold_kernels;
const FoldKernels fold_kernels = {into};

}  // namespace hybridcomp::HC_ISA
