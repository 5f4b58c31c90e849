// CUDA's vector types with CUDA's alignments.
#pragma once

#define HC_VECTOR2(name, T, bytes)           \
  struct alignas(bytes) name##2 { T x, y; }; \
  HC_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }
#define HC_VECTOR3(name, T)      \
  struct name##3 { T x, y, z; }; \
  HC_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }
#define HC_VECTOR4(name, T, bytes)                 \
  struct alignas(bytes) name##4 { T x, y, z, w; }; \
  HC_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define HC_VECTORS(name, T)          \
  HC_VECTOR2(name, T, 2 * sizeof(T)) \
  HC_VECTOR3(name, T)                \
  HC_VECTOR4(name, T, (sizeof(T) < 4 ? 4 * sizeof(T) : 16))

HC_VECTORS(char, signed char)
HC_VECTORS(uchar, unsigned char)
HC_VECTORS(short, short)
HC_VECTORS(ushort, unsigned short)
HC_VECTORS(int, int)
HC_VECTORS(uint, unsigned int)
HC_VECTORS(long, long)
HC_VECTORS(ulong, unsigned long)
HC_VECTORS(longlong, long long)
HC_VECTORS(ulonglong, unsigned long long)
HC_VECTORS(float, float)
HC_VECTORS(double, double)

#undef HC_VECTORS
#undef HC_VECTOR4
#undef HC_VECTOR3
#undef HC_VECTOR2
