// float4 and its relatives, with CUDA's alignments.
#pragma once

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define SHIM_VECTORS(T, name)                                                                          \
    struct name##1 { T x; };                                                                           \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                 \
    struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                 \
    constexpr name##1 make_##name##1(T x) { return {x}; }                                              \
    constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                                      \
    constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define SHIM_VECTOR3(T, name)                                                                          \
    struct name##3 { T x, y, z; };                                                                     \
    constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }

SHIM_VECTORS(signed char, char)
SHIM_VECTORS(unsigned char, uchar)
SHIM_VECTORS(short, short)
SHIM_VECTORS(unsigned short, ushort)
SHIM_VECTORS(int, int)
SHIM_VECTORS(unsigned, uint)
SHIM_VECTORS(long long, longlong)
SHIM_VECTORS(unsigned long long, ulonglong)
SHIM_VECTORS(float, float)
SHIM_VECTORS(double, double)
SHIM_VECTOR3(int, int)
SHIM_VECTOR3(float, float)
SHIM_VECTOR3(double, double)
#undef SHIM_VECTORS
#undef SHIM_VECTOR3
