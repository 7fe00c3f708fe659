// The part of CUDA C++ that plain kernels use, for g++. Included before the text of a program of kernels.
#pragma once
#include <cassert>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS  // Bessel's functions and their like: most of the time of a small program
#include <cmath>

#include "runtime.h"
#include "vectors.h"

// Calls that g++ has not replaced by loads and stores are checked too.
extern "C" void* memcpy(void* to, const void* from, size_t size) noexcept __asm__("shim_memcpy");
extern "C" void* memmove(void* to, const void* from, size_t size) noexcept __asm__("shim_memmove");
extern "C" void* memset(void* to, int byte, size_t size) noexcept __asm__("shim_memset");

#define __CUDACC_VER_MAJOR__ 13  // what a header asks to know whether there is cuda_fp16.h
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) alignas(n)
// Nothing else is thread_local, so all of a program's shared variables lie in one stretch, filled with NaN
// before each block. `extern __shared__ T x[]` is rewritten before g++ sees it. CuPy takes it for granted
// that an array of char is aligned well enough for its sums, as a kernel's only shared variable is.
#define __shared__ __attribute__((aligned(16))) thread_local

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = shim::WARP;

#undef assert
#define assert(true_) ((true_) ? void() : ::shim::fail(0, "line %d: assert(%s) is false", __LINE__, #true_))
#define __trap() ::shim::fail(0, "line %d: __trap()", __LINE__)

// ---- threads together ----------------------------------------------------------------------------------

#define __syncthreads() ::shim::barrier(__COUNTER__, __LINE__)
inline void __syncwarp(unsigned mask = ~0u) { shim::warp_barrier(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace shim {
template <class T> T shuffle(unsigned mask, T value, int source, int width) {
    T result;
    const int first = lane() & ~(width - 1);
    if (source < first || source >= first + width) source = lane();
    exchange(mask, &value, sizeof value, source, &result);
    return result;
}
}  // namespace shim

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return shim::shuffle(mask, value, (shim::lane() & ~(width - 1)) + (source & (width - 1)), width);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return shim::shuffle(mask, value, shim::lane() - int(delta), width);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return shim::shuffle(mask, value, shim::lane() + int(delta), width);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32) {
    return shim::shuffle(mask, value, shim::lane() ^ flip, width);
}
inline unsigned __ballot_sync(unsigned mask, int value) { return shim::ballot(mask, value); }
inline int __any_sync(unsigned mask, int value) { return shim::ballot(mask, value) != 0; }
inline int __all_sync(unsigned mask, int value) { return shim::ballot(mask, !value) == 0; }

// Threads take turns only where they wait for one another, so every read-modify-write is atomic.
namespace shim {
template <class T> using Given = std::type_identity_t<T>;
template <class T, class F> __attribute__((no_sanitize("kernel-address"))) T update(T* at, F change) {
    check(uintptr_t(at), sizeof *at, ATOMIC, uintptr_t(__builtin_return_address(0)));
    const T old = *at;
    *at = change(old);
    return old;
}
}  // namespace shim
#define SHIM_ATOMIC(name, now)                                                                          \
    template <class T> T atomic##name(T* at, shim::Given<T> x) {                                        \
        return shim::update(at, [=]([[maybe_unused]] T old) { return now; });                           \
    }
SHIM_ATOMIC(Add, old + x)
SHIM_ATOMIC(Sub, old - x)
SHIM_ATOMIC(Min, x < old ? x : old)
SHIM_ATOMIC(Max, old < x ? x : old)
SHIM_ATOMIC(Or, old | x)
SHIM_ATOMIC(And, old & x)
SHIM_ATOMIC(Exch, x)
template <class T> T atomicCAS(T* at, shim::Given<T> old, shim::Given<T> x) {
    return shim::update(at, [=](T now) { return now == old ? x : now; });
}

// ---- one thread alone ----------------------------------------------------------------------------------

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T> T __ldcv(const T* p) { return *p; }
template <class T> void __stwb(T* p, shim::Given<T> x) { *p = x; }
template <class T> void __stcg(T* p, shim::Given<T> x) { *p = x; }
template <class T> void __stcs(T* p, shim::Given<T> x) { *p = x; }
template <class T> void __stwt(T* p, shim::Given<T> x) { *p = x; }

namespace shim {
template <class A, class B> concept Numbers = std::is_arithmetic_v<A> && std::is_arithmetic_v<B>;
}  // namespace shim
template <class A, class B> requires shim::Numbers<A, B> constexpr auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <class A, class B> requires shim::Numbers<A, B> constexpr auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }

// -ffp-contract=off: a product is rounded before it is added unless the text says fma.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __double2float_rn(double x) { return float(x); }

namespace shim {
template <class To, class From> To bits(From x) {
    static_assert(sizeof(To) == sizeof x);
    To result;
    memcpy(&result, &x, sizeof x);
    return result;
}
}  // namespace shim
inline unsigned __float_as_uint(float x) { return shim::bits<unsigned>(x); }
inline int __float_as_int(float x) { return shim::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return shim::bits<float>(x); }
inline float __int_as_float(int x) { return shim::bits<float>(x); }
inline long long __double_as_longlong(double x) { return shim::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return shim::bits<double>(x); }

// ---- launches ------------------------------------------------------------------------------------------

namespace shim {

template <auto kernel> struct Entry;
template <class... A, void (*kernel)(A...)> struct Entry<kernel> {
    static constexpr size_t sizes[] = {sizeof(A)..., 0};
    template <size_t... I>
    __attribute__((no_sanitize("kernel-address")))
    static void spread(void** arguments, std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_cv_t<A>*>(arguments[I])...);
    }
    static void call(void** arguments) { spread(arguments, std::index_sequence_for<A...>()); }
    static constexpr Kernel value = {call, sizeof...(A), sizes};
};

inline thread_local char touched;
}  // namespace shim

extern "C" void shim_touch_thread_storage() { shim::touched = 0; }
