// Atomics and intrinsics, for good.py.
#include <cstdint>

using u32 = std::uint32_t;
using u64 = unsigned long long;

template <typename T>
__device__ void integer_atomics(T* out, T x) {
  atomicAdd(&out[0], x);
  atomicMax(&out[1], x);
  atomicMin(&out[2], x);
  atomicAnd(&out[3], x);
  atomicOr(&out[4], x);
  atomicXor(&out[5], x);
  if (atomicCAS(&out[6], T{0}, x) == 0) atomicAdd(&out[7], T{1});
  if (atomicExch(&out[8], x) == 0) atomicAdd(&out[9], T{1});
}

HC_KERNEL(64) atomics(const u64* in, u32* a, int* b, u64* c, float* d, double* e) {
  const u64 x = in[blockIdx.x * blockDim.x + threadIdx.x];
  integer_atomics(a, static_cast<u32>(x));
  integer_atomics(b, static_cast<int>(x));
  integer_atomics(c, x);
  atomicSub(&a[10], static_cast<u32>(x));
  atomicSub(&b[10], static_cast<int>(x));
  atomicInc(&a[11], 6u);
  atomicAdd(d, static_cast<float>(x & 15));
  atomicAdd(e, static_cast<double>(x & 15));
}

HC_KERNEL(64) integers(const u32* in, u32* out, u64* wide) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 x = in[2 * i], y = in[2 * i + 1];
  const u64 z = static_cast<u64>(y) << 32 | x;
  u32* to = out + 16 * i;
  to[0] = static_cast<u32>(__popc(x));
  to[1] = static_cast<u32>(__popcll(z));
  to[2] = static_cast<u32>(__clz(static_cast<int>(x)));
  to[3] = static_cast<u32>(__clzll(static_cast<long long>(z)));
  to[4] = static_cast<u32>(__ffs(static_cast<int>(x)));
  to[5] = static_cast<u32>(__ffsll(static_cast<long long>(z)));
  to[6] = __brev(x);
  to[7] = __byte_perm(x, y, 0x2B60);
  to[8] = __funnelshift_l(x, y, y);
  to[9] = __funnelshift_r(x, y, y);
  to[10] = __umulhi(x, y);
  to[11] = min(x, y);
  to[12] = static_cast<u32>(max(static_cast<int>(x), static_cast<int>(y)));
  to[13] = static_cast<u32>(__mulhi(static_cast<int>(x), static_cast<int>(y)));
  to[14] = __funnelshift_lc(x, y, y % 64);
  to[15] = __funnelshift_rc(x, y, y % 64);
  wide[2 * i] = __brevll(z);
  wide[2 * i + 1] = __umul64hi(z, z + 1);
}

HC_KERNEL(64) reals(const float* in, u32* out) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  const float x = in[2 * i], y = in[2 * i + 1];
  u32* to = out + 12 * i;
  to[0] = __float_as_uint(__fadd_rn(x, y));
  to[1] = __float_as_uint(__fmul_rn(x, y));
  to[2] = __float_as_uint(__fdiv_rn(x, y));
  to[3] = __float_as_uint(__fsqrt_rn(x));
  to[4] = static_cast<u32>(__float2int_rn(x));
  to[5] = __float_as_uint(min(x, y));
  to[6] = __float_as_uint(max(x, y));
  const double d = __ddiv_rn(__dmul_rn(static_cast<double>(x), 3.0), __dadd_rn(static_cast<double>(y), 1.0));
  const auto bits = static_cast<u64>(__double_as_longlong(__dsqrt_rn(d)));
  to[7] = static_cast<u32>(bits);
  to[8] = static_cast<u32>(bits >> 32);
  to[9] = __float_as_uint(__uint_as_float(to[0]));
  to[10] = static_cast<u32>(__float_as_int(__int_as_float(static_cast<int>(to[1]))));
  to[11] = __float2uint_rn(x);
}
