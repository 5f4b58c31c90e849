// Kernels with one fault each, which the emulator must find. test_emulation.py says how.
#include <cstdint>

using u32 = std::uint32_t;

HC_KERNEL(64) shared_race(u32* out) {
  HC_SHARED(u32, tile, 64);
  tile[threadIdx.x] = 0;
  __syncthreads();
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// The read comes first here, the write later, whatever the order of threads.
HC_KERNEL(64) write_after_read(u32* out) {
  HC_SHARED(u32, tile, 64);
  tile[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];
  __syncwarp();
  tile[threadIdx.x] = 0;
}

// Many read a word, then the first of them writes it.
HC_KERNEL(64) read_by_all(u32* out) {
  HC_SHARED(u32, word, 1);
  if (threadIdx.x == 0) word[0] = 1;
  __syncthreads();
  out[threadIdx.x] = word[0];
  if (threadIdx.x == 0) word[0] = 2;
}

HC_KERNEL(64) same_value(u32* out) {
  HC_SHARED(u32, flag, 1);
  flag[0] = 1;
  __syncthreads();
  out[threadIdx.x] = flag[0];
}

HC_KERNEL(32) no_syncwarp(u32* out) {
  HC_SHARED(u32, tile, 32);
  tile[threadIdx.x] = 0;
  __syncwarp();
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

// A shuffle exchanges registers, and orders nothing in memory.
HC_KERNEL(32) shuffle_is_no_fence(u32* out) {
  HC_SHARED(u32, tile, 32);
  tile[threadIdx.x] = threadIdx.x;
  const u32 x = __shfl_xor_sync(0xFFFFFFFFu, threadIdx.x, 1);
  out[threadIdx.x] = tile[x];
}

HC_KERNEL(32) half_syncwarp(u32* out) {
  HC_SHARED(u32, tile, 32);
  tile[threadIdx.x] = threadIdx.x;
  __syncwarp(threadIdx.x < 16 ? 0x0000FFFFu : 0xFFFF0000u);
  out[threadIdx.x] = tile[31 - threadIdx.x];
}

HC_KERNEL(64) global_race(u32* out) {
  out[threadIdx.x] = threadIdx.x;
  out[64 + threadIdx.x] = out[63 - threadIdx.x];
}

HC_KERNEL(32) byte_race(std::uint8_t* out) { out[threadIdx.x == 9 ? 8 : threadIdx.x] = 1; }

// Threads of one word: those of other bytes do no harm, the whole word's reader does.
HC_KERNEL(32) byte_against_word(std::uint8_t* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = 1;
  if (threadIdx.x == 8) out[16] = static_cast<std::uint8_t>(*reinterpret_cast<u32*>(out + 4));
}

HC_KERNEL(32) block_race(u32* out) { out[threadIdx.x] = blockIdx.x; }

HC_KERNEL(32) block_reads_other(u32* out) {
  const u32 i = blockIdx.x * 32 + threadIdx.x;
  const u32 x = out[(i + 32) % (gridDim.x * 32)];
  out[i] = x;
}

// The last-block pattern without its fence.
HC_KERNEL(32) no_fence(u32* sums, u32* counter, u32* out) {
  HC_SHARED(u32, is_last, 1);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = 1;
    is_last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last[0] && threadIdx.x == 0) {
    for (u32 i = 0; i < gridDim.x; ++i) out[i] = sums[i];
  }
}

// A fence before the write does not pass it on.
HC_KERNEL(32) early_fence(u32* sums, u32* counter, u32* out) {
  HC_SHARED(u32, is_last, 1);
  if (threadIdx.x == 0) {
    __threadfence();
    sums[blockIdx.x] = 1;
    is_last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last[0] && threadIdx.x == 0) {
    for (u32 i = 0; i < gridDim.x; ++i) out[i] = sums[i];
  }
}

// Without the barrier thread 0 may count the block before another thread has written.
HC_KERNEL(64) no_barrier(u32* sums, u32* counter, u32* out) {
  HC_SHARED(u32, is_last, 1);
  sums[blockIdx.x * 64 + threadIdx.x] = 1;
  __threadfence();
  if (threadIdx.x == 0) is_last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
  __syncthreads();
  if (is_last[0] && threadIdx.x == 0) {
    for (u32 i = 0; i < gridDim.x * 64; ++i) out[i] = sums[i];
  }
}

HC_KERNEL(32) mixed_atomic(u32* out) {
  if (threadIdx.x < 16) {
    atomicAdd(out, 1u);
  } else if (threadIdx.x == 20) {
    out[1] = out[0];
  }
}

HC_KERNEL(64) barrier_in_branch(u32* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    __syncthreads();
  }
}

HC_KERNEL(64) barrier_after_return(u32* out, u32 n) {
  if (threadIdx.x >= n) return;
  out[threadIdx.x] = 1;
  __syncthreads();
}

HC_KERNEL(64) barrier_against_shuffle(u32* out) {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, threadIdx.x, 0);
    __syncthreads();
  }
}

HC_KERNEL(32) shuffle_exited(u32* out) {
  if (threadIdx.x == 7) return;
  out[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, threadIdx.x, 1);
}

HC_KERNEL(32) shuffle_elsewhere(u32* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, threadIdx.x, 0);
  } else {
    out[threadIdx.x] = __shfl_sync(0xFFFFFFFFu, threadIdx.x, 1);
  }
}

HC_KERNEL(32) shuffle_not_named(u32* out) { out[threadIdx.x] = __shfl_sync(0x7FFFFFFFu, threadIdx.x, 0); }

HC_KERNEL(32) global_overrun(u32* out, u32 n) { out[n + threadIdx.x - 31] = 1; }
HC_KERNEL(32) global_underrun(const u32* in, u32* out) {
  out[threadIdx.x] = in[static_cast<int>(threadIdx.x) - 1];
}
HC_KERNEL(32) atomic_overrun(u32* out, u32 n) { atomicAdd(out + n, 1u); }
HC_KERNEL(32) vector_overrun(uint4* out, u32 n) { out[n / 4] = make_uint4(1, 2, 3, 4); }
HC_KERNEL(32) wild(u32*, std::uint64_t address) { *reinterpret_cast<u32*>(address) = 1; }

HC_KERNEL(32) shared_overrun(u32* out) {
  HC_SHARED(u32, first, 32);
  HC_SHARED(u32, second, 32);
  second[threadIdx.x] = 0;
  first[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}

HC_KERNEL(32) dynamic_overrun(u32* out) {
  HC_DYNAMIC_SHARED(u32, tile);
  tile[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

HC_KERNEL(32) unwritten(u32* out) {
  HC_SHARED(u32, tile, 32);
  if (threadIdx.x < 31) tile[threadIdx.x] = 5;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

HC_KERNEL(32) misaligned(std::uint8_t* out) { *reinterpret_cast<u32*>(out + 1) = 1; }

HC_KERNEL(32) overflow(int* out, int x) { out[threadIdx.x] = x + static_cast<int>(threadIdx.x); }
HC_KERNEL(32) shift(u32* out, u32 by) { out[threadIdx.x] = 1u << by; }

HC_KERNEL(32) cast(int* out, u32 bits) { out[threadIdx.x] = static_cast<int>(__uint_as_float(bits)); }

__device__ u32 device_variable = 1;
HC_KERNEL(32) writes_module(u32* out) { out[threadIdx.x] = device_variable++; }

HC_KERNEL(64) for_ever(u32* out) {
  while (atomicAdd(out, 0u) == 0) __syncthreads();
}
HC_KERNEL(32) waits_for_flag(u32* out) {
  if (threadIdx.x == 0) {
    while (atomicAdd(out, 0u) == 0) {
    }
  }
}
HC_KERNEL(32) spins(const volatile u32* flag) {
  while (*flag == 0) {
  }
}
HC_KERNEL(32) shuffle_far(u32* out) { out[threadIdx.x] = __shfl_down_sync(0xFFFFFFFFu, threadIdx.x, 32); }
HC_KERNEL(32) misaligned_shared(uint4* out) {
  HC_SHARED(u32, tile, 132);
  for (u32 i = threadIdx.x; i < 132; i += 32) tile[i] = i;
  __syncthreads();
  out[threadIdx.x] = *reinterpret_cast<const uint4*>(tile + 4 * threadIdx.x);
}
HC_KERNEL(32) big_shared(u32* out) {
  HC_SHARED(u32, tile, 16000);
  tile[threadIdx.x] = 0;
  out[threadIdx.x] = tile[threadIdx.x];
}
HC_KERNEL(32) traps(u32* out) {
  if (out[0] == 0) __trap();
}
