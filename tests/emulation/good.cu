// Kernels without a fault, whose results good.py compares with NumPy's.
#include <cstdint>

using u32 = std::uint32_t;
using u64 = std::uint64_t;

__device__ __forceinline__ u32 global_index() { return blockIdx.x * blockDim.x + threadIdx.x; }

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
HC_KERNEL(128) sum_both(const u32* __restrict__ ints, const double* __restrict__ doubles, u64* out) {
  const u32 a = block_sum<u32, 128>(ints[global_index()]);
  const double b = block_sum<double, 128>(doubles[global_index()]);
  if (threadIdx.x == 0) {
    out[2 * blockIdx.x] = a;
    out[2 * blockIdx.x + 1] = static_cast<u64>(__double_as_longlong(b));
  }
}

// Inclusive scan of each block: shuffles within warps, shared memory between them.
HC_KERNEL(1024) scan(const u32* in, u32* out) {
  HC_SHARED(u32, sums, 32);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 x = in[global_index()];
  for (u32 d = 1; d < 32; d *= 2) {
    const u32 y = __shfl_up_sync(0xFFFFFFFFu, x, d);
    if (lane >= d) x += y;
  }
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  if (warp == 0) {
    u32 s = lane < blockDim.x / 32 ? sums[lane] : 0;
    for (u32 d = 1; d < 32; d *= 2) {
      const u32 y = __shfl_up_sync(0xFFFFFFFFu, s, d);
      if (lane >= d) s += y;
    }
    if (lane < blockDim.x / 32) sums[lane] = s;
  }
  __syncthreads();
  out[global_index()] = x + (warp > 0 ? sums[warp - 1] : 0);
}

template <typename T>
__device__ __noinline__ void all_shuffles(const T* in, T* out, int argument, int width) {
  const u32 n = blockDim.x, t = threadIdx.x;
  const unsigned a = static_cast<unsigned>(argument);
  out[t] = __shfl_sync(0xFFFFFFFFu, in[t], argument + static_cast<int>(t), width);
  out[n + t] = __shfl_up_sync(0xFFFFFFFFu, in[t], a, width);
  out[2 * n + t] = __shfl_down_sync(0xFFFFFFFFu, in[t], a, width);
  out[3 * n + t] = __shfl_xor_sync(0xFFFFFFFFu, in[t], argument, width);
  out[4 * n + t] = __shfl_sync(0xFFFFFFFFu, in[t], 5);
}
HC_KERNEL(64) shuffles_u32(const u32* in, u32* out, int a, int w) { all_shuffles(in, out, a, w); }
HC_KERNEL(64) shuffles_i64(const std::int64_t* in, std::int64_t* out, int a, int w) {
  all_shuffles(in, out, a, w);
}
HC_KERNEL(64) shuffles_float(const float* in, float* out, int a, int w) { all_shuffles(in, out, a, w); }
HC_KERNEL(64) shuffles_double(const double* in, double* out, int a, int w) { all_shuffles(in, out, a, w); }

// The lanes of `split` and the others vote apart, at different places.
__device__ __noinline__ void votes_of(u32 mask, u32 x, u32* out) {
  int all_alike = 0;
  out[0] = __ballot_sync(mask, x & 1);
  out[1] = static_cast<u32>(__any_sync(mask, x == 7));
  out[2] = static_cast<u32>(__all_sync(mask, x < 9));
  out[3] = __match_any_sync(mask, x);
  out[4] = __match_any_sync(mask, static_cast<u64>(x & 3) << 40);
  out[5] = __match_all_sync(mask, x, &all_alike);
  out[6] = static_cast<u32>(all_alike);
  out[7] = __reduce_add_sync(mask, x);
  out[8] = __reduce_min_sync(mask, x);
  out[9] = __reduce_max_sync(mask, x);
  out[10] = __reduce_and_sync(mask, x);
  out[11] = __reduce_or_sync(mask, x);
  out[12] = __reduce_xor_sync(mask, x);
  out[13] = static_cast<u32>(__reduce_min_sync(mask, static_cast<int>(x) - 5));
  out[14] = static_cast<u32>(__reduce_max_sync(mask, static_cast<int>(x) - 50));
  out[15] = __activemask();
}
HC_KERNEL(64) votes(const u32* in, u32* out, u32 split) {
  const u32 t = threadIdx.x;
  if (split >> (t % 32) & 1) {
    votes_of(split, in[t], out + 16 * t);
  } else {
    __syncwarp(~split);
    votes_of(~split, in[t], out + 16 * t);
  }
}

HC_KERNEL(96) barrier_votes(const u32* in, u32* out) {
  const u32 x = in[global_index()];
  u32* mine = out + 3 * global_index();
  mine[0] = static_cast<u32>(__syncthreads_or(x == 1));
  mine[1] = static_cast<u32>(__syncthreads_and(x < 8));
  mine[2] = static_cast<u32>(__syncthreads_count(x & 1));
}

HC_KERNEL(256) reverse(const u32* in, u32* out) {
  HC_DYNAMIC_SHARED(u32, tile);
  tile[threadIdx.x] = in[global_index()];
  __syncthreads();
  out[global_index()] = tile[blockDim.x - 1 - threadIdx.x];
}

// Lanes of a warp write and read in turn, ordered by __syncwarp alone; halves of it by masks of their own.
HC_KERNEL(64) neighbours(const u32* in, u32* out) {
  HC_SHARED(u32, tile, 64);
  const u32 t = threadIdx.x, lane = t % 32;
  tile[t] = in[t];
  __syncwarp();
  const u32 x = tile[t ^ 31];
  __syncwarp();
  tile[t] = x + 1;
  if (lane < 16) {
    __syncwarp(0x0000FFFFu);
  } else {
    __syncwarp(0xFFFF0000u);
  }
  out[t] = tile[t ^ 15];
}

HC_KERNEL(128) histogram(const u32* in, u32* out, u32 n, u32 bins) {
  HC_DYNAMIC_SHARED(u32, counts);
  for (u32 i = threadIdx.x; i < bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (u32 i = global_index(); i < n; i += gridDim.x * blockDim.x) atomicAdd(&counts[in[i]], 1u);
  __syncthreads();
  for (u32 i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(&out[i], counts[i]);
}

// The last block adds up what all blocks wrote. Either each thread fences its own write, or one fences for
// all after a barrier; the counter is left as it was found.
template <bool kOneFence>
__device__ __forceinline__ void last_block(const u32* in, u32* sums, u32* counter, u32* out) {
  HC_SHARED(u32, is_last, 1);
  sums[global_index()] = 3 * in[global_index()];
  if (!kOneFence) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    if (kOneFence) __threadfence();
    is_last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  u32 total = 0;
  for (u32 i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) total += sums[i];
  total = block_sum<u32, 64>(total);
  if (threadIdx.x == 0) {
    *out = total;
    *counter = 0;
  }
}
HC_KERNEL(64) last_block_fences(const u32* in, u32* sums, u32* counter, u32* out) {
  last_block<false>(in, sums, counter, out);
}
HC_KERNEL(64) last_block_fence(const u32* in, u32* sums, u32* counter, u32* out) {
  last_block<true>(in, sums, counter, out);
}

// The last block of each pair passes on to the last of all, over another counter.
HC_KERNEL(64) last_of_pairs(const u32* in, u32* sums, u32* counters, u32* out) {
  HC_SHARED(u32, is_last, 1);
  sums[global_index()] = in[global_index()];
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last[0] = 0;
    __threadfence();
    if (atomicAdd(&counters[1 + blockIdx.x / 2], 1u) == 1) {
      __threadfence();
      is_last[0] = atomicAdd(&counters[0], 1u) == gridDim.x / 2 - 1;
    }
  }
  __syncthreads();
  if (!is_last[0]) return;
  u32 total = 0;
  for (u32 i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) total += sums[i];
  total = block_sum<u32, 64>(total);
  if (threadIdx.x == 0) *out = total;
}

struct Wide {
  u32 words[24];
};
__constant__ const u32 kTable[8] = {3, 1, 4, 1, 5, 9, 2, 6};

// Neighbouring bytes and halves of words by different threads, vectors, large copies, constants.
HC_KERNEL(64) pieces(const std::uint8_t* bytes, const uint4* vectors, const Wide* wide, std::uint8_t* out) {
  const u32 t = threadIdx.x, n = blockDim.x;
  HC_SHARED(std::uint16_t, halves, 64);
  halves[t] = static_cast<std::uint16_t>(bytes[t] * 257);
  __syncthreads();
  out[t] = static_cast<std::uint8_t>(halves[n - 1 - t] + kTable[t % 8]);
  auto* copied = reinterpret_cast<uint4*>(out + n);
  if (t < 16) __stcs(&copied[t], __ldg(&vectors[15 - t]));
  auto* copies = reinterpret_cast<Wide*>(out + n + 256);
  if (t < 2) copies[t] = wide[1 - t];
}

// Threads that are done may leave if no barrier follows.
HC_KERNEL(64) leave_early(const u32* in, u32* out, u32 n) {
  const u32 i = global_index();
  if (i >= n) return;
  out[i] = in[i] + 1;
}
