// Kernels with one fault each, which the emulator must find.
#include <cstdint>

using u32 = std::uint32_t;

HC_KERNEL(64) shared_race(u32* out) {
  HC_SHARED(u32, tile, 64);
  tile[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = tile[63 - threadIdx.x];
}
