// float16 by the processor's own conversions, for values in passing: the bits of a NaN are not the shared
// code's, so values converted here must not reach a message as they are.
#pragma once

#include "common/elements.cuh"

namespace hybridcomp {

HC_DEVICE float half_value(uint16_t h) {
#if defined(HC_EMULATION)
  return float_of(half_to_float_bits(h));
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
#endif
}

HC_DEVICE uint16_t half_of(float x) {
#if defined(HC_EMULATION)
  return float_to_half_bits(bits_of(x));
#else
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
#endif
}

// The same as loaded() and stored() but for the bits of a NaN.
template <DTypeCode D>
HC_DEVICE ComputeOf<D> value_of(StorageOf<D> x) {
  if constexpr (D == kFloat16)
    return half_value(x);
  else
    return loaded<D>(x);
}
template <DTypeCode D, typename T>
HC_DEVICE StorageOf<D> storage_of(T x) {
  if constexpr (D == kFloat16 && sizeof(T) == 4)
    return half_of(x);
  else
    return stored<D>(x);
}

// Load four neighbours at once where `wide`, else one by one.
template <DTypeCode D>
HC_DEVICE void load_quad(const StorageOf<D>* src, bool wide, ComputeOf<D>* out) {
  Pack<StorageOf<D>, 4> pack;
  if (wide) {
    pack = *reinterpret_cast<const Pack<StorageOf<D>, 4>*>(src);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.of[i] = src[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = value_of<D>(pack.of[i]);
}

template <DTypeCode D, bool Add, typename T>
HC_DEVICE void put_quad(StorageOf<D>* out, bool wide, const T* values) {
  using P = Pack<StorageOf<D>, 4>;
  P pack;
  if constexpr (Add) {
    if (wide) {
      pack = *reinterpret_cast<const P*>(out);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) pack.of[i] = out[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (Add)
      add_to(pack.of + i, static_cast<StorageOf<D>>(values[i]));
    else
      pack.of[i] = storage_of<D>(values[i]);
  }
  if (wide) {
    *reinterpret_cast<P*>(out) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = pack.of[i];
  }
}

// Whether quads of D may be read and written at once at `p`.
template <DTypeCode D>
HC_DEVICE bool takes_quads(const StorageOf<D>* p) {
  return aligned_to(p, alignof(Pack<StorageOf<D>, 4>));
}

}  // namespace hybridcomp
