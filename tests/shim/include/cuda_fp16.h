// The part of CUDA's cuda_fp16.h that converts.
#pragma once
#include <type_traits>

#include "narrow.h"
#include "vectors.h"

struct __half_raw { unsigned short x; };

struct __half {
    __half() = default;
    template <class T> requires std::is_arithmetic_v<T> __half(T x) : x_(Format::encode(double(x))) {}
    __half(__half_raw raw) : x_(raw.x) {}
    operator float() const { return Format::decode(x_); }
    operator __half_raw() const { return {x_}; }

private:
    using Format = shim::Narrow<11, 15>;
    unsigned short x_;
};
using half = __half;
// A GPU rounds these at every step: convert to float first.
__half operator+(__half, __half) = delete;
__half operator-(__half, __half) = delete;
__half operator*(__half, __half) = delete;
__half operator/(__half, __half) = delete;

struct alignas(4) __half2 { __half x, y; };
using half2 = __half2;

inline float __half2float(__half x) { return x; }
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline __half __double2half(double x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return __half_raw(x).x; }
inline __half __ushort_as_half(unsigned short x) { return __half_raw{x}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline float2 __half22float2(__half2 x) { return {x.x, x.y}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
