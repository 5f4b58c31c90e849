// Kernels without a fault, whose results test_emulation.py compares with NumPy's.
#include <cstdint>

using u32 = std::uint32_t;
using u64 = unsigned long long;

template <typename T, u32 kThreads>
__device__ __forceinline__ T block_sum(T x) {
  HC_SHARED(T, partial, kThreads);
  partial[threadIdx.x] = x;
  __syncthreads();
  for (u32 half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
    __syncthreads();
  }
  return partial[0];
}

// Two instances of one template, whose arrays must not be one.
HC_KERNEL(128) sum_both(const u32* __restrict__ ints, const float* __restrict__ floats, u32* out) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 a = block_sum<u32, 128>(ints[i]);
  const float b = block_sum<float, 128>(floats[i]);
  if (threadIdx.x == 0) {
    out[2 * blockIdx.x] = a;
    out[2 * blockIdx.x + 1] = __float_as_uint(b);
  }
}
