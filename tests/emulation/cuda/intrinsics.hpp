// Arithmetic, conversions and hinted loads and stores.
#pragma once

// -- bits
// ------------------------------------------------------------------------------------------------------

HC_INLINE int __popc(unsigned int x) { return __builtin_popcount(x); }
HC_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
HC_INLINE int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned int>(x)) : 32; }
HC_INLINE int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
HC_INLINE int __ffs(int x) { return __builtin_ffs(x); }
HC_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }

HC_INLINE unsigned int __brev(unsigned int x) {
  x = ((x >> 1) & 0x55555555u) | ((x & 0x55555555u) << 1);
  x = ((x >> 2) & 0x33333333u) | ((x & 0x33333333u) << 2);
  x = ((x >> 4) & 0x0F0F0F0Fu) | ((x & 0x0F0F0F0Fu) << 4);
  return __builtin_bswap32(x);
}
HC_INLINE unsigned long long __brevll(unsigned long long x) {
  return (static_cast<unsigned long long>(__brev(static_cast<unsigned int>(x))) << 32) |
         __brev(static_cast<unsigned int>(x >> 32));
}

// Each selector's fourth bit asks for the byte's sign, eight times.
HC_INLINE unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
  const unsigned long long both = (static_cast<unsigned long long>(y) << 32) | x;
  unsigned int result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned int choice = selector >> (4 * i);
    unsigned int byte = static_cast<unsigned int>(both >> (8 * (choice & 7u))) & 0xFFu;
    if (choice & 8u) byte = byte & 0x80u ? 0xFFu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
HC_INLINE unsigned int __funnelshift_l(unsigned int low, unsigned int high, unsigned int shift) {
  const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
  return static_cast<unsigned int>((both << (shift & 31u)) >> 32);
}
HC_INLINE unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int shift) {
  const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
  return static_cast<unsigned int>(both >> (shift & 31u));
}
HC_INLINE unsigned int __funnelshift_lc(unsigned int low, unsigned int high, unsigned int shift) {
  return shift >= 32u ? low : __funnelshift_l(low, high, shift);
}
HC_INLINE unsigned int __funnelshift_rc(unsigned int low, unsigned int high, unsigned int shift) {
  return shift >= 32u ? high : __funnelshift_r(low, high, shift);
}
HC_INLINE unsigned int __umulhi(unsigned int x, unsigned int y) {
  return static_cast<unsigned int>((static_cast<unsigned long long>(x) * y) >> 32);
}
HC_INLINE int __mulhi(int x, int y) { return static_cast<int>((static_cast<long long>(x) * y) >> 32); }
__extension__ typedef unsigned __int128 hc_u128;
HC_INLINE unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>((static_cast<hc_u128>(x) * y) >> 64);
}

// -- conversions
// -----------------------------------------------------------------------------------------------

namespace hc_emulation {
template <typename To, typename From>
HC_INLINE To cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
// Converts as the hardware does: to the nearest there is, and NaN to 0, or to the sign bit if 64 bits are
// involved.
template <typename To, typename From>
HC_INLINE To saturated(From x) {
  constexpr int kBits = sizeof(To) * 8 - (std::is_signed<To>::value ? 1 : 0);
  constexpr To lowest = std::is_signed<To>::value ? static_cast<To>(1ull << (kBits & 63)) : To{0};
  const From limit = 4 * static_cast<From>(1ull << (kBits - 2));
  if (x != x)
    return sizeof(To) == 8 || sizeof(From) == 8 ? static_cast<To>(1ull << (sizeof(To) * 8 - 1)) : To{0};
  if (x >= limit) return static_cast<To>(~lowest);
  if (x <= static_cast<From>(lowest)) return lowest;
  return static_cast<To>(x);
}
}  // namespace hc_emulation

HC_INLINE unsigned int __float_as_uint(float x) { return hc_emulation::cast<unsigned int>(x); }
HC_INLINE int __float_as_int(float x) { return hc_emulation::cast<int>(x); }
HC_INLINE float __uint_as_float(unsigned int x) { return hc_emulation::cast<float>(x); }
HC_INLINE float __int_as_float(int x) { return hc_emulation::cast<float>(x); }
HC_INLINE long long __double_as_longlong(double x) { return hc_emulation::cast<long long>(x); }
HC_INLINE double __longlong_as_double(long long x) { return hc_emulation::cast<double>(x); }
HC_INLINE int __double2hiint(double x) {
  return static_cast<int>(hc_emulation::cast<unsigned long long>(x) >> 32);
}
HC_INLINE int __double2loint(double x) {
  return static_cast<int>(hc_emulation::cast<unsigned long long>(x) & 0xFFFFFFFFu);
}
HC_INLINE double __hiloint2double(int high, int low) {
  return hc_emulation::cast<double>(static_cast<unsigned long long>(static_cast<unsigned int>(high)) << 32 |
                                    static_cast<unsigned int>(low));
}

HC_INLINE int __float2int_rn(float x) { return hc_emulation::saturated<int>(rintf(x)); }
HC_INLINE int __float2int_rz(float x) { return hc_emulation::saturated<int>(truncf(x)); }
HC_INLINE unsigned int __float2uint_rn(float x) { return hc_emulation::saturated<unsigned int>(rintf(x)); }
HC_INLINE unsigned int __float2uint_rz(float x) { return hc_emulation::saturated<unsigned int>(truncf(x)); }
HC_INLINE long long __float2ll_rn(float x) { return hc_emulation::saturated<long long>(rintf(x)); }
HC_INLINE int __double2int_rn(double x) { return hc_emulation::saturated<int>(rint(x)); }
HC_INLINE long long __double2ll_rn(double x) { return hc_emulation::saturated<long long>(rint(x)); }
HC_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }
HC_INLINE float __uint2float_rn(unsigned int x) { return static_cast<float>(x); }
HC_INLINE float __ll2float_rn(long long x) { return static_cast<float>(x); }
HC_INLINE float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
HC_INLINE double __int2double_rn(int x) { return x; }
HC_INLINE double __ll2double_rn(long long x) { return static_cast<double>(x); }
HC_INLINE double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
HC_INLINE float __double2float_rn(double x) { return static_cast<float>(x); }

// -- arithmetic that is never contracted
// -----------------------------------------------------------------------

HC_INLINE float __fadd_rn(float x, float y) { return x + y; }
HC_INLINE float __fsub_rn(float x, float y) { return x - y; }
HC_INLINE float __fmul_rn(float x, float y) { return x * y; }
HC_INLINE float __fdiv_rn(float x, float y) { return x / y; }
HC_INLINE float __frcp_rn(float x) { return 1.0f / x; }
HC_INLINE float __fsqrt_rn(float x) { return sqrtf(x); }
HC_INLINE float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
HC_INLINE double __dadd_rn(double x, double y) { return x + y; }
HC_INLINE double __dsub_rn(double x, double y) { return x - y; }
HC_INLINE double __dmul_rn(double x, double y) { return x * y; }
HC_INLINE double __ddiv_rn(double x, double y) { return x / y; }
HC_INLINE double __drcp_rn(double x) { return 1.0 / x; }
HC_INLINE double __dsqrt_rn(double x) { return sqrt(x); }
HC_INLINE double __fma_rn(double x, double y, double z) { return fma(x, y, z); }

#define HC_MIN_MAX(R, A, B)                                                               \
  HC_INLINE R min(A a, B b) {                                                             \
    return static_cast<R>(b) < static_cast<R>(a) ? static_cast<R>(b) : static_cast<R>(a); \
  }                                                                                       \
  HC_INLINE R max(A a, B b) {                                                             \
    return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); \
  }
HC_MIN_MAX(int, int, int)
HC_MIN_MAX(unsigned int, unsigned int, unsigned int)
HC_MIN_MAX(unsigned int, int, unsigned int)
HC_MIN_MAX(unsigned int, unsigned int, int)
HC_MIN_MAX(long, long, long)
HC_MIN_MAX(unsigned long, unsigned long, unsigned long)
HC_MIN_MAX(unsigned long, long, unsigned long)
HC_MIN_MAX(unsigned long, unsigned long, long)
HC_MIN_MAX(long long, long long, long long)
HC_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
HC_MIN_MAX(unsigned long long, long long, unsigned long long)
HC_MIN_MAX(unsigned long long, unsigned long long, long long)
#undef HC_MIN_MAX
// The minimum or maximum of a number and NaN is the number; -0 is less than 0.
#define HC_REAL_MIN_MAX(R, A, B)                                                      \
  HC_INLINE R min(A a, B b) {                                                         \
    return a != a                                                ? static_cast<R>(b)  \
           : a < b || b != b || (a == b && __builtin_signbit(a)) ? static_cast<R>(a)  \
                                                                 : static_cast<R>(b); \
  }                                                                                   \
  HC_INLINE R max(A a, B b) {                                                         \
    return a != a                                                ? static_cast<R>(b)  \
           : a > b || b != b || (a == b && __builtin_signbit(b)) ? static_cast<R>(a)  \
                                                                 : static_cast<R>(b); \
  }
HC_REAL_MIN_MAX(float, float, float)
HC_REAL_MIN_MAX(double, double, double)
HC_REAL_MIN_MAX(double, float, double)
HC_REAL_MIN_MAX(double, double, float)
#undef HC_REAL_MIN_MAX

// -- loads and stores with hints for the caches
// ----------------------------------------------------------------

#define HC_LOAD(name)             \
  template <typename T>           \
  HC_INLINE T name(const T* at) { \
    return *at;                   \
  }
HC_LOAD(__ldg)
HC_LOAD(__ldcs)
HC_LOAD(__ldcg)
HC_LOAD(__ldca)
HC_LOAD(__ldlu)
HC_LOAD(__ldcv)
#undef HC_LOAD
#define HC_STORE(name)                                                   \
  template <typename T>                                                  \
  HC_INLINE void name(T* at, typename std::common_type<T>::type value) { \
    *at = value;                                                         \
  }
HC_STORE(__stcs)
HC_STORE(__stcg)
HC_STORE(__stwb)
HC_STORE(__stwt)
#undef HC_STORE

HC_INLINE void __nanosleep(unsigned int) {}
