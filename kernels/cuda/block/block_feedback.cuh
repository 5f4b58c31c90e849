// Blocks of x + e, and the error of their message: a source of elements for the encoders of block_group.cuh
// and block_plain.cuh.
#pragma once

#include "block/block_plain.cuh"

namespace hybridcomp {
namespace {

template <DTypeCode D>
struct Corrected {
  using T = ComputeOf<D>;
  static constexpr DTypeCode kType = sizeof(T) == 8 ? kFloat64 : kFloat32;
  static constexpr bool kKeeps = true;
  Plain<D> x;
  const T* error;
  T* lost;
  uint32_t* bad;  // set if a value is not finite
  bool wide;

  HC_METHOD Corrected(const void* from, const T* e, T* out, uint32_t* flag)
      : x(from), error(e), lost(out), bad(flag), wide(takes_quads<kType>(e) && takes_quads<kType>(out)) {}

  HC_METHOD T at(uint64_t i) const { return x.at(i) + error[i]; }
  HC_METHOD void quad(uint64_t i, T* out) const {
    T e[4];
    x.quad(i, out);
    load_quad<kType>(error + i, wide, e);
#pragma unroll
    for (int k = 0; k < 4; ++k) out[k] += e[k];
  }
  HC_METHOD void keep(uint64_t i, T corrected, T decoded) const { lost[i] = corrected - decoded; }
  HC_METHOD void keep_quad(uint64_t i, const T* corrected, const T* decoded) const {
    T rest[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) rest[k] = corrected[k] - decoded[k];
    put_quad<kType, false>(lost + i, wide, rest);
  }
  // Only the largest magnitude is checked: the error of a block of finite elements is finite, since no
  // decoded value is above the largest.
  HC_METHOD void see(typename Real<T>::Bits peak) const {
    if (peak >= Real<T>::kInfinity) atomicOr(reinterpret_cast<unsigned int*>(bad), 1u);
  }
};

// Return the source x + e. The residual's address is in a slot (see feedback.cu); the new residual goes to
// the address in another, or to `fresh`.
template <DTypeCode D>
HC_DEVICE Corrected<D> corrected(const void* x, const uint64_t* slot, uint64_t start, void* fresh,
                                 const uint64_t* to, uint32_t* bad) {
  using T = ComputeOf<D>;
  const T* const error = reinterpret_cast<const T*>(*slot) + start;
  return Corrected<D>(x, error, to ? reinterpret_cast<T*>(*to) : static_cast<T*>(fresh), bad);
}

}  // namespace
}  // namespace hybridcomp
