// Header that every CUDA source begins with. The same sources are compiled by nvcc, by NVRTC (which has no
// standard library: hybridcomp/cuda.py pastes the headers in and provides the integer types), and, in tests,
// by a C++ compiler with tests/emulation in the place of a GPU.
//
// Rules: parameters of kernels are pointers and integers (floats travel as their bits); grids and blocks have
// one dimension; a block has a multiple of 32 threads, all of which reach every barrier; shared memory is
// declared with HC_SHARED or HC_DYNAMIC_SHARED; no block waits for another, so that any grid and any order
// gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridcomp/arithmetic.hpp"
#include "hybridcomp/status.hpp"
#include "hybridcomp/wire.hpp"

#if !defined(HC_EMULATION)
#define HC_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define HC_DEVICE static __device__ __forceinline__
#define HC_SHARED(T, name, count) __shared__ T name[count]
#define HC_DYNAMIC_SHARED(T, name)                            \
  extern __shared__ __align__(16) unsigned char hc_dynamic[]; \
  T* const name = reinterpret_cast<T*>(hc_dynamic)
#define HC_CONSTANT static __constant__ const
#define HC_TABLE static __device__ const  // table that the lanes of a warp read at different places
#else
#define HC_DEVICE static inline __attribute__((always_inline, unused))
#define HC_CONSTANT static const
#define HC_TABLE static const
#endif
#define HC_METHOD __device__ __forceinline__  // HC_DEVICE in a class

namespace hybridcomp {

using std::int32_t;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

// Set the status, unless an earlier fault has set it. Kernels of decoders do nothing once `status` is set.
HC_DEVICE void fail(uint32_t* status, Status code) {
  atomicCAS(reinterpret_cast<unsigned int*>(status), 0u, static_cast<unsigned int>(code));
}

// The blocks that share a call's work: all of a launch, or some of one with several calls (table.cuh).
struct Grid {
  uint32_t block;   // this block's number among them
  uint32_t blocks;  // their number

  HC_METHOD uint64_t thread() const { return static_cast<uint64_t>(block) * blockDim.x + threadIdx.x; }
  HC_METHOD uint64_t threads() const { return static_cast<uint64_t>(blocks) * blockDim.x; }
};
HC_DEVICE Grid whole_grid() { return {blockIdx.x, gridDim.x}; }
HC_DEVICE uint64_t global_thread() { return whole_grid().thread(); }
HC_DEVICE uint64_t global_threads() { return whole_grid().threads(); }

template <typename T>
HC_DEVICE bool aligned_to(const void* p, T bytes) {
  return (reinterpret_cast<uint64_t>(p) & (static_cast<uint64_t>(bytes) - 1)) == 0;
}

}  // namespace hybridcomp
