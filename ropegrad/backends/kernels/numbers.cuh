// Products and sums as PTX instructions, since CuPy compiles with -ftz=true: C++ would flush subnormals. The
// four dtypes, made wide without loss and narrow with one rounding. With ROPEGRAD_ON_CPU all of it is plain
// C++, for running the kernels without a GPU.

#define DEVICE __device__ __forceinline__

struct Float16 { unsigned short bits; };
struct BFloat16 { unsigned short bits; };

template <class To, class From> DEVICE To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits as another type");
    To result;
    memcpy(&result, &x, sizeof result);
    return result;
}

#ifdef ROPEGRAD_ON_CPU
template <class A> DEVICE A times(A a, A b) { return a * b; }
template <class A> DEVICE A plus(A a, A b) { return a + b; }
template <class A> DEVICE A times_plus(A a, A b, A c) { return __builtin_fma(a, b, c); }
template <> inline float times_plus(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class A> DEVICE A minus_times(A a, A b, A c) { return times_plus(-a, b, c); }
DEVICE float to_float(Float16 x) { return float(bits_as<_Float16>(x)); }
DEVICE double to_double(float x) { return x; }
DEVICE Float16 to_float16(float x) { return bits_as<Float16>(_Float16(x)); }
DEVICE BFloat16 to_bfloat16(float x) {
    const unsigned b = bits_as<unsigned>(x);
    if (x != x) return {static_cast<unsigned short>(0x7fff)};
    return {static_cast<unsigned short>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
DEVICE float toward_zero(double x) {
    float r = float(x);
    return __builtin_fabs(double(r)) > __builtin_fabs(x) ? __builtin_nextafterf(r, 0.0f) : r;
}
DEVICE float nearest(double x) { return float(x); }
DEVICE long long wide_product(int a, int b) { return static_cast<long long>(a) * b; }
#else
DEVICE float times(float a, float b) {
    float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
DEVICE float plus(float a, float b) {
    float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
DEVICE float times_plus(float a, float b, float c) {  // a·b + c
    float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
DEVICE float minus_times(float a, float b, float c) {  // c - a·b
    float r;
    asm("{ .reg .f32 n; neg.f32 n, %1; fma.rn.f32 %0, n, %2, %3; }" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
DEVICE double times_plus(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE double minus_times(double a, double b, double c) { return __fma_rn(-a, b, c); }
DEVICE float to_float(Float16 x) {
    float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r;
}
DEVICE double to_double(float x) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x)); return r; }
DEVICE Float16 to_float16(float x) {
    Float16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r;
}
DEVICE BFloat16 to_bfloat16(float x) {  // the instruction that makes one alone needs sm_90
    unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.0f), "f"(x));
    return {static_cast<unsigned short>(r)};
}
DEVICE float toward_zero(double x) { float r; asm("cvt.rz.f32.f64 %0, %1;" : "=f"(r) : "d"(x)); return r; }
DEVICE float nearest(double x) { float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x)); return r; }
DEVICE long long wide_product(int a, int b) {  // the compiler would multiply 64 bits by 64
    long long r; asm("mul.wide.s32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b)); return r;
}
#endif

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(BFloat16 x) { return bits_as<float>(static_cast<unsigned>(x.bits) << 16); }

// Any of the four dtypes as the compute dtype A: exact.
template <class A> struct Wide;
template <> struct Wide<float> {
    template <class T> static DEVICE float from(T x) { return to_float(x); }
};
template <> struct Wide<double> {
    template <class T> static DEVICE double from(T x) { return to_double(to_float(x)); }
    static DEVICE double from(double x) { return x; }
};

// The compute dtype as T, rounded once. From float64 by way of a float32 that is rounded to odd: its last bit
// keeps what was cut off, so that the second rounding cannot be misled by the first.
DEVICE float rounded_to_odd(double x) {
    const float cut = toward_zero(x);
    return to_double(cut) == x ? cut : bits_as<float>(bits_as<unsigned>(cut) | 1u);
}
template <class T> struct Narrow;
template <> struct Narrow<double> { static DEVICE double from(double x) { return x; } };
template <> struct Narrow<float> {
    static DEVICE float from(float x) { return x; }
    static DEVICE float from(double x) { return nearest(x); }
};
template <> struct Narrow<Float16> {
    static DEVICE Float16 from(float x) { return to_float16(x); }
    static DEVICE Float16 from(double x) { return to_float16(rounded_to_odd(x)); }
};
template <> struct Narrow<BFloat16> {
    static DEVICE BFloat16 from(float x) { return to_bfloat16(x); }
    static DEVICE BFloat16 from(double x) { return to_bfloat16(rounded_to_odd(x)); }
};
