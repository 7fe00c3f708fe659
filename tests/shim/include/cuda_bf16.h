// The part of CUDA's cuda_bf16.h that converts.
#pragma once
#include <type_traits>

#include "narrow.h"
#include "vectors.h"

struct __nv_bfloat16_raw { unsigned short x; };

struct __nv_bfloat16 {
    __nv_bfloat16() = default;
    template <class T> requires std::is_arithmetic_v<T> __nv_bfloat16(T x) : x_(Format::encode(double(x))) {}
    __nv_bfloat16(__nv_bfloat16_raw raw) : x_(raw.x) {}
    operator float() const { return Format::decode(x_); }
    operator __nv_bfloat16_raw() const { return {x_}; }

private:
    using Format = shim::Narrow<8, 127>;
    unsigned short x_;
};
using nv_bfloat16 = __nv_bfloat16;
// A GPU rounds these at every step: convert to float first.
__nv_bfloat16 operator+(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator-(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator*(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator/(__nv_bfloat16, __nv_bfloat16) = delete;

struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
using nv_bfloat162 = __nv_bfloat162;

inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline __nv_bfloat16 __double2bfloat16(double x) { return x; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return __nv_bfloat16_raw(x).x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16_raw{x}; }
inline bool __hisnan(__nv_bfloat16 x) { return std::isnan(float(x)); }
inline int __hisinf(__nv_bfloat16 x) { return std::isinf(float(x)) ? (float(x) < 0 ? -1 : 1) : 0; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }
