// Atomics. All threads of an emulated launch share one system thread, which leaves them only where they wait:
// plain code is atomic. hc_atomic tells the race checks; AddressSanitizer sees the accesses themselves.
#pragma once

namespace hc_emulation {

// CUDA leaves the sum of signed integers that overflows well defined.
template <typename T>
HC_INLINE T wrapping_add(T a, T b) {
  if constexpr (std::is_integral<T>::value) {
    using U = typename std::make_unsigned<T>::type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

template <typename T, typename Change>
__attribute__((noinline, no_sanitize("thread"))) T exchange(T* at, Change change) {
  const T old = *at;
  *at = change(old);
  return old;
}

template <typename T, typename Change>
HC_INLINE T atomic(T* at, Change change) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA has atomics of 32 and 64 bits");
  hc_atomic(at, sizeof(T));
  return exchange(at, change);
}

// The operand converts as to an overload of a C function, and takes no part in finding T.
template <typename T>
using As = typename std::common_type<T>::type;
template <typename T>
using Integer = typename std::enable_if<std::is_integral<T>::value, T>::type;

}  // namespace hc_emulation

#define HC_ATOMIC(name, result, expression)                                                  \
  template <typename T>                                                                      \
  HC_INLINE result name(T* at, hc_emulation::As<T> value) {                                  \
    return hc_emulation::atomic(at, [=](T old) -> T { return static_cast<T>(expression); }); \
  }
HC_ATOMIC(atomicAdd, T, hc_emulation::wrapping_add<T>(old, value))
HC_ATOMIC(atomicSub, hc_emulation::Integer<T>,
          hc_emulation::wrapping_add<T>(old, hc_emulation::wrapping_add<T>(static_cast<T>(~value), 1)))
HC_ATOMIC(atomicMax, hc_emulation::Integer<T>, old > value ? old : value)
HC_ATOMIC(atomicMin, hc_emulation::Integer<T>, old < value ? old : value)
HC_ATOMIC(atomicAnd, hc_emulation::Integer<T>, old& value)
HC_ATOMIC(atomicOr, hc_emulation::Integer<T>, old | value)
HC_ATOMIC(atomicXor, hc_emulation::Integer<T>, old ^ value)
HC_ATOMIC(atomicExch, T, ((void)old, value))
HC_ATOMIC(atomicInc, hc_emulation::Integer<T>, old >= value ? 0 : old + 1)
HC_ATOMIC(atomicDec, hc_emulation::Integer<T>, old == 0 || old > value ? value : old - 1)
#undef HC_ATOMIC

template <typename T>
HC_INLINE hc_emulation::Integer<T> atomicCAS(T* at, hc_emulation::As<T> expected, hc_emulation::As<T> value) {
  return hc_emulation::atomic(at, [=](T old) -> T { return old == expected ? value : old; });
}

HC_INLINE void __threadfence() { hc_fence(); }
HC_INLINE void __threadfence_system() { hc_fence(); }
// Orders a thread's own accesses for its block. Its guarantees without a barrier are not modelled.
HC_INLINE void __threadfence_block() {}
