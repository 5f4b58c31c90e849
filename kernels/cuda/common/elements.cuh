// The four floating-point types in device memory: loads into their computing types, stores and additions of
// computed values. A store rounds once, to nearest even.
#pragma once

#include "common/common.cuh"

namespace hybridcomp {

template <DTypeCode D>
struct Element;
template <>
struct Element<kFloat32> {
  using Storage = float;
  using Compute = float;
};
template <>
struct Element<kFloat64> {
  using Storage = double;
  using Compute = double;
};
template <>
struct Element<kFloat16> {
  using Storage = uint16_t;
  using Compute = float;
};
template <>
struct Element<kBFloat16> {
  using Storage = uint16_t;
  using Compute = float;
};
template <DTypeCode D>
using StorageOf = typename Element<D>::Storage;
template <DTypeCode D>
using ComputeOf = typename Element<D>::Compute;

template <DTypeCode D>
HC_DEVICE ComputeOf<D> loaded(StorageOf<D> x) {
  if constexpr (D == kFloat16)
    return float_of(half_to_float_bits(x));
  else if constexpr (D == kBFloat16)
    return float_of(bfloat_to_float_bits(x));
  else
    return x;
}

template <DTypeCode D, typename T>
HC_DEVICE StorageOf<D> stored(T x) {
  if constexpr (D == kFloat32 || D == kFloat64) {
    return static_cast<StorageOf<D>>(x);
  } else {
    uint32_t bits;
    if constexpr (sizeof(T) == 8)
      bits = double_to_float_bits_odd(bits_of(x));
    else
      bits = bits_of(x);
    return D == kFloat16 ? float_to_half_bits(bits) : float_to_bfloat_bits(bits);
  }
}

// N neighbours, read and written at once where they are aligned to their size together (at most 16 bytes of
// them).
template <typename S, int N>
struct alignas(sizeof(S) * N > 16 ? 16 : sizeof(S) * N) Pack {
  S of[N];
};

template <DTypeCode D, int N>
HC_DEVICE void load_pack(const StorageOf<D>* src, ComputeOf<D>* out) {
  const Pack<StorageOf<D>, N> pack = *reinterpret_cast<const Pack<StorageOf<D>, N>*>(src);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = loaded<D>(pack.of[i]);
}

// Compute sum += value as the CPU does, to the bits of a NaN.
template <typename T>
HC_DEVICE void add_to(T* sum, T value) {
  *sum = quieted(*sum + value);
}

// Write (or, to float and double, add) computed values to a decoder's output.
template <DTypeCode D, bool Add, typename T>
HC_DEVICE void put(StorageOf<D>* out, T value) {
  if constexpr (Add)
    add_to(out, static_cast<StorageOf<D>>(value));
  else
    *out = stored<D>(value);
}
template <DTypeCode D, bool Add, int N, typename T>
HC_DEVICE void put_pack(StorageOf<D>* out, const T* values) {
  using P = Pack<StorageOf<D>, N>;
  P pack;
  if constexpr (Add) pack = *reinterpret_cast<const P*>(out);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (Add)
      add_to(pack.of + i, static_cast<StorageOf<D>>(values[i]));
    else
      pack.of[i] = stored<D>(values[i]);
  }
  *reinterpret_cast<P*>(out) = pack;
}

}  // namespace hybridcomp

// Every decoder writes each of the four types, and adds to the type that it computes in. EACH(name, T, D,
// Add) for a decoder of float or double: names end in the type computed in, the type written, and _add.
#define HC_EACH_OUTPUT(EACH, name)                            \
  EACH(name##_f32_f32, float, hybridcomp::kFloat32, false)    \
  EACH(name##_f32_f64, float, hybridcomp::kFloat64, false)    \
  EACH(name##_f32_f16, float, hybridcomp::kFloat16, false)    \
  EACH(name##_f32_bf16, float, hybridcomp::kBFloat16, false)  \
  EACH(name##_f32_f32_add, float, hybridcomp::kFloat32, true) \
  EACH(name##_f64_f32, double, hybridcomp::kFloat32, false)   \
  EACH(name##_f64_f64, double, hybridcomp::kFloat64, false)   \
  EACH(name##_f64_f16, double, hybridcomp::kFloat16, false)   \
  EACH(name##_f64_bf16, double, hybridcomp::kBFloat16, false) \
  EACH(name##_f64_f64_add, double, hybridcomp::kFloat64, true)
// The same for encoders: EACH(name, D) for each type read.
#define HC_EACH_INPUT(EACH, name)        \
  EACH(name##_f32, hybridcomp::kFloat32) \
  EACH(name##_f64, hybridcomp::kFloat64) \
  EACH(name##_f16, hybridcomp::kFloat16) \
  EACH(name##_bf16, hybridcomp::kBFloat16)
