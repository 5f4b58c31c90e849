// Error-bounded compression: ranges, and blocks to bytes and back; compiled once per instruction set.
#include "codecs/bounded/bounded.hpp"
#include "codecs/common/tile.hpp"

#if defined(__AVX512F__)
#include "codecs/bounded/ints512.hpp"
#else
#include "codecs/bounded/ints.hpp"
#endif

namespace hybridcomp::HC_ISA {
namespace {

// Bytes that a block may write or read, its own and the rest of a group of planes past them.
constexpr std::size_t kMostBytes = 4 + 4 * kGroupBytes;

// -- the range of the values: by their bits as signed integers, which order as the numbers do when all bits
// of negative ones but the sign are inverted. No mode of the processor changes that.

template <typename S>
S key_of(S bits) {
  constexpr S kMost = static_cast<S>((S(1) << (sizeof(S) * 8 - 2)) - 1 + (S(1) << (sizeof(S) * 8 - 2)));
  return static_cast<S>(bits ^ ((bits >> (sizeof(S) * 8 - 1)) & kMost));
}

template <typename S>
struct Extremes {
  S low, high;
};

// Find the least and the largest key strictly between those of -infinity and infinity.
template <typename S>
Extremes<S> extremes_of(const std::uint8_t* src, std::size_t n, S infinity) {
  const S below = static_cast<S>(~infinity);
  Extremes<S> all{infinity, below};
  alignas(64) S buffer[kTile];
  for (std::size_t at = 0; at < n; at += kTile) {
    const std::size_t m = smaller(kTile, n - at);
    const S* x = reinterpret_cast<const S*>(src + at * sizeof(S));
    if (!aligned<S>(x)) {
      std::memcpy(buffer, src + at * sizeof(S), m * sizeof(S));
      x = buffer;
    }
    S low = infinity, high = below;
    for (std::size_t i = 0; i < m; ++i) {
      const S key = key_of(x[i]);
      low = key < low ? key : low;
      high = key > high ? key : high;
    }
    if (low <= below || high >= infinity) {  // rare: look again, skipping values that are not finite
      low = infinity;
      high = below;
      for (std::size_t i = 0; i < m; ++i) {
        const S key = key_of(x[i]);
        const bool finite = key > below && key < infinity;
        low = finite && key < low ? key : low;
        high = finite && key > high ? key : high;
      }
    }
    all.low = low < all.low ? low : all.low;
    all.high = high > all.high ? high : all.high;
  }
  return all;
}

double number(std::int64_t bits, DTypeCode) {
  const auto u = static_cast<std::uint64_t>(bits);
  return u & Real<double>::kInfinity ? float_of(u) : 0.0;
}
double number(std::int32_t bits, DTypeCode) {
  const auto u = static_cast<std::uint32_t>(bits);
  return u & Real<float>::kInfinity ? static_cast<double>(float_of(u)) : 0.0;
}
double number(std::int16_t bits, DTypeCode dtype) {
  const auto u = static_cast<std::uint16_t>(bits);
  return number(
      static_cast<std::int32_t>(dtype == kFloat16 ? half_to_float_bits(u) : bfloat_to_float_bits(u)),
      kFloat32);
}

template <typename S>
void range_of(const std::uint8_t* src, DTypeCode dtype, std::size_t n, S infinity, double* low,
              double* high) {
  const Extremes<S> found = extremes_of<S>(src, n, infinity);
  const bool any = found.low < infinity;
  const double infinite = float_of(Real<double>::kInfinity);
  *low = any ? number(key_of(found.low), dtype) : infinite;
  *high = any ? number(key_of(found.high), dtype) : -infinite;
}

void range(const void* src, DTypeCode dtype, std::size_t n, double* low, double* high) {
  const auto* from = static_cast<const std::uint8_t*>(src);
  if (dtype == kFloat64)
    range_of<std::int64_t>(from, dtype, n, Real<double>::kInfinity, low, high);
  else if (dtype == kFloat32)
    range_of<std::int32_t>(from, dtype, n, Real<float>::kInfinity, low, high);
  else
    range_of<std::int16_t>(from, dtype, n, dtype == kFloat16 ? 0x7C00 : 0x7F80, low, high);
}

// -- encode ----------------------------------------------------------------------------------------------

// Whether an element is 0 or -0.
template <DTypeCode D>
bool is_zero(const std::uint8_t* element) {
  constexpr std::size_t kTop = sizeof(StorageOf<D>) - 1;
  std::uint8_t any = element[kTop] & 0x7F;
  for (std::size_t i = 0; i < kTop; ++i) any |= element[i];
  return !any;
}

// Encode a block of m elements that no integers can stand for: zeros, one element throughout, or the
// elements. Returns its code.
template <DTypeCode D>
std::uint8_t keep_block(const std::uint8_t* src, std::size_t m, std::uint8_t* out) {
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  std::size_t zeros = 0;
  while (zeros < m && is_zero<D>(src + zeros * kSize)) ++zeros;
  if (zeros == m) return 0;
  const bool same = std::memcmp(src, src + kSize, (m - 1) * kSize) == 0;
  std::memcpy(out, src, same ? kSize : m * kSize);
  return same ? kBoundedConstant : kBoundedRaw;
}

// Encode a block of m elements, padded to 64 in `full`; writes up to kMostBytes or the elements' own. Returns
// its code.
template <DTypeCode D>
std::uint8_t encode_block(const std::uint8_t* full, std::size_t m, const BoundedStep<ComputeOf<D>>& step,
                          std::uint8_t* out) {
  using T = ComputeOf<D>;
  Ints q, d;
  const bool holds = integers_of<D>(full, step, &q);
  std::uint32_t plain, delta;
  spreads_of(q, &plain, &delta);
  if (bounded_saves(plain, delta)) {
    differences_of(q, &d);
    delta = delta_spread(d);
  }
  const std::uint8_t code = bounded_code<T>(plain, delta, m, sizeof(StorageOf<D>));
  if (!holds || code == kBoundedRaw) return keep_block<D>(full, m, out);
  if (code < kBoundedDelta) {
    put_planes(q, code, out);
  } else {
    const std::int32_t first = first_of(q);
    std::memcpy(out, &first, 4);
    put_planes(d, code - kBoundedDelta, out + 4);
  }
  return code;
}

template <DTypeCode D>
std::size_t encode_all(const std::uint8_t* src, std::size_t n, double bound, std::uint8_t* codes,
                       std::uint8_t* data, std::size_t room) {
  using T = ComputeOf<D>;
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  const BoundedStep<T> step = bounded_step<D, T>(bound);
  constexpr std::size_t kMost = kMostBytes > kB * kSize ? kMostBytes : kB * kSize;
  std::size_t used = 0;
  for (std::size_t at = 0; at < n; at += kB) {
    const std::size_t m = smaller(kB, n - at);
    const std::uint8_t* from = src + at * kSize;
    prefetch_ahead(from, kB * kSize);
    std::uint8_t last[kB * kSize];
    if (m < kB) {  // the last element stands for those that are missing
      std::memcpy(last, from, m * kSize);
      for (std::size_t i = m; i < kB; ++i) std::memcpy(last + i * kSize, from + (m - 1) * kSize, kSize);
      from = last;
    }
    std::uint8_t aside[kMost];
    const bool direct = room - used >= kMost;
    std::uint8_t* const to = direct ? data + used : aside;
    const std::uint8_t code =
        step.step == T(0) ? keep_block<D>(from, m, to) : encode_block<D>(from, m, step, to);
    const std::size_t bytes = bounded_bytes(code, m, kSize);
    if (!direct) std::memcpy(data + used, aside, bytes);
    codes[at / kB] = code;
    used += bytes;
  }
  return used;
}

std::size_t encode(const void* src, DTypeCode dtype, std::size_t n, double bound, std::uint8_t* codes,
                   std::uint8_t* data, std::size_t room) {
  std::size_t bytes = 0;
  with_dtype(dtype, [&]<DTypeCode D>() {
    bytes = encode_all<D>(static_cast<const std::uint8_t*>(src), n, bound, codes, data, room);
  });
  return bytes;
}

// -- decode ----------------------------------------------------------------------------------------------

// Copy the m elements of a kept block: stored as they are, or one for all.
template <DTypeCode D>
void kept_elements(std::uint8_t code, const std::uint8_t* data, std::size_t m, std::uint8_t* elements) {
  constexpr std::size_t kSize = sizeof(StorageOf<D>);
  if (code == kBoundedRaw) {
    std::memcpy(elements, data, m * kSize);
    return;
  }
  for (std::size_t i = 0; i < m; ++i) std::memcpy(elements + i * kSize, data, kSize);
}

// Write m computed values to `out` as elements of type O, or add them.
template <DTypeCode O, bool Add, typename T>
void put_block(const T* values, std::uint8_t* out, std::size_t m) {
  if constexpr (Add)
    store_add<O>(values, out, m);
  else
    store<O>(values, out, m);
}

template <DTypeCode D, DTypeCode O, bool Add>
void decode_block(std::uint8_t code, const std::uint8_t* data, std::size_t m, ComputeOf<D> step,
                  std::uint8_t* out) {
  using T = ComputeOf<D>;
  constexpr DTypeCode kOwn = sizeof(T) == 8 ? kFloat64 : kFloat32;
  if (code >= kBoundedRaw) {
    if constexpr (O == D && !Add) return kept_elements<D>(code, data, m, out);
    alignas(64) std::uint8_t elements[kB * sizeof(StorageOf<D>)];
    alignas(64) T buffer[kTile];
    kept_elements<D>(code, data, m, elements);
    return put_block<O, Add>(view<D>(elements, m, buffer), out, m);
  }
  Ints q;
  if (code < kBoundedDelta) {
    get_planes(data, code, &q);
  } else {
    std::int32_t first;
    std::memcpy(&first, data, 4);
    get_planes(data + 4, code - kBoundedDelta, &q);
    sum_up(&q, first);
  }
  if constexpr (puts<O, T>()) {
    if (m == kB) return put_values<O, Add>(q, step, out);
  }
  alignas(64) T values[kB];
  put_values<kOwn, false>(q, step, reinterpret_cast<std::uint8_t*>(values));
  put_block<O, Add>(values, out, m);
}

template <DTypeCode D, DTypeCode O, bool Add>
void decode_all(const std::uint8_t* codes, const std::uint8_t* data, std::size_t bytes, std::size_t n,
                double bound, std::uint8_t* out) {
  using T = ComputeOf<D>;
  const T step = bounded_step<D, T>(bound).step;
  for (std::size_t at = 0; at < n; at += kB) {
    const std::size_t m = smaller(kB, n - at);
    const std::uint8_t code = codes[at / kB];
    const std::size_t own = bounded_bytes(code, m, sizeof(StorageOf<D>));
    const std::uint8_t* from = data;
    std::uint8_t aside[kMostBytes];
    if (bytes < kMostBytes && code < kBoundedRaw) {
      std::memcpy(aside, data, own);
      std::memset(aside + own, 0, kMostBytes - own);
      from = aside;
    }
    std::uint8_t* const to = out + at * sizeof(StorageOf<O>);
    if constexpr (Add) prefetch_ahead(to, kB * sizeof(StorageOf<O>));
    decode_block<D, O, Add>(code, from, m, step, to);
    data += own;
    bytes -= own;
  }
}

void decode(const std::uint8_t* codes, const std::uint8_t* data, std::size_t bytes, DTypeCode dtype,
            std::size_t n, double bound, void* out, DTypeCode out_dtype, bool add) {
  auto* to = static_cast<std::uint8_t*>(out);
  with_dtype(dtype, [&]<DTypeCode D>() {
    with_dtype(out_dtype, [&]<DTypeCode O>() {
      if constexpr (O == kFloat32 || O == kFloat64) {
        if (add) return decode_all<D, O, true>(codes, data, bytes, n, bound, to);
      }
      decode_all<D, O, false>(codes, data, bytes, n, bound, to);
    });
  });
}

// -- integers of elements one by one, for the coders without blocks ----------------------------------------

static_assert(kBoundedTile <= kTile, "a tile is converted at once");

template <DTypeCode D>
void integers_one_by_one(const std::uint8_t* src, std::size_t m, double bound, std::int32_t* q) {
  using T = ComputeOf<D>;
  alignas(64) T buffer[kTile];
  const T* x = view<D>(src, m, buffer);
  const BoundedStep<T> step = bounded_step<D, T>(bound);
  if (step.step == T(0)) {  // no arithmetic: the processor's modes might flush a denormal number to zero
    for (std::size_t i = 0; i < m; ++i) q[i] = magnitude(x[i]) ? kBoundedKept : 0;
    return;
  }
  for (std::size_t i = 0; i < m; ++i) {
    const std::int32_t v = bounded_integer(x[i], step.inverse);
    const T y = bounded_stored<D>(bounded_value<T>(v, step.step));
    q[i] = bounded_holds(x[i], y, step.limit) ? v : kBoundedKept;
  }
}

void integers(const void* src, DTypeCode dtype, std::size_t m, double bound, std::int32_t* q) {
  with_dtype(dtype, [&]<DTypeCode D>() {
    integers_one_by_one<D>(static_cast<const std::uint8_t*>(src), m, bound, q);
  });
}

void values(const std::int32_t* q, DTypeCode dtype, std::size_t m, double bound, void* out,
            DTypeCode out_dtype, bool add) {
  with_dtype(dtype, [&]<DTypeCode D>() {
    using T = ComputeOf<D>;
    const T step = bounded_step<D, T>(bound).step;
    alignas(64) T y[kTile];
    for (std::size_t i = 0; i < m; ++i) y[i] = bounded_value<T>(q[i], step);
    put_tile(y, m, static_cast<std::uint8_t*>(out), 0, out_dtype, add);
  });
}

}  // namespace

extern const BoundedKernels bounded_kernels;
const BoundedKernels bounded_kernels = {range, encode, decode, integers, values};

}  // namespace hybridcomp::HC_ISA
