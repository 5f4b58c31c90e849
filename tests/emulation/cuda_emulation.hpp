// CUDA as a CPU compiler sees it, force-included into each kernel's source. With
// kernels/cuda/common/common.cuh this is all that a kernel may use; runtime/ does the work.
#pragma once

// Before the macros, some of which are names of attributes in the library's headers.
#include <math.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "runtime/api.hpp"

#define __global__
#define __host__
#define __device__ __attribute__((unused))
#define __constant__ __attribute__((unused))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)

// CUDA launches no more threads than a kernel is bounded to. The attribute writes the bound down where
// hc_launch_bound finds it: a no-op per warp before the kernel, and the first one's address in a table.
#define HC_KERNEL(threads) \
  extern "C"               \
      __attribute__((visibility("default"), patchable_function_entry((threads) / 32, (threads) / 32))) void

extern "C" {
extern const std::uintptr_t __start___patchable_function_entries[]
    __attribute__((weak, visibility("hidden")));
extern const std::uintptr_t __stop___patchable_function_entries[] __attribute__((weak, visibility("hidden")));

// The most threads that a block of the kernel may have; 0 if it is not known.
__attribute__((visibility("default"), no_sanitize("address", "undefined", "thread"))) unsigned
hc_launch_bound(std::uintptr_t kernel) {
#if defined(__x86_64__)
  constexpr std::uintptr_t kNoOpBytes = 1;
#else
  constexpr std::uintptr_t kNoOpBytes = 4;
#endif
  std::uintptr_t warps = 0;
  for (const auto* first = __start___patchable_function_entries; first != __stop___patchable_function_entries;
       ++first) {
    const std::uintptr_t here = (kernel - *first) / kNoOpBytes;
    if (*first < kernel && here <= 32 && (warps == 0 || here < warps)) warps = here;
  }
  return static_cast<unsigned>(warps * 32);
}
}

#define HC_SITE(name)                                       \
  ([]() -> const hc_site* {                                 \
    static const hc_site site = {__FILE__, __LINE__, name}; \
    return &site;                                           \
  }())

// The address of a static in a lambda tells a call site, and a template instance, from all others.
#define HC_SHARED(T, name, count)                                                       \
  static_assert(std::is_trivially_copyable<T>::value, "shared arrays hold plain data"); \
  T* const name = static_cast<T*>(hc_shared(                                            \
      []() -> const void* {                                                             \
        static char key;                                                                \
        return &key;                                                                    \
      }(),                                                                              \
      #name, sizeof(T) * (count), alignof(T)))
#define HC_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(hc_dynamic_shared(#name))

struct hc_index {  // grids and blocks have one dimension
  unsigned int x;
};
#define threadIdx (hc_index{hc_thread()})
#define blockIdx (hc_index{hc_block()})
#define blockDim (hc_index{hc_block_dim()})
#define gridDim (hc_index{hc_grid_dim()})
constexpr int warpSize = 32;

#define HC_INLINE static inline __attribute__((always_inline, unused))

#include "cuda/atomics.hpp"
#include "cuda/intrinsics.hpp"
#include "cuda/vectors.hpp"
#include "cuda/warp.hpp"
