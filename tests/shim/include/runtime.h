// What a program of kernels and the runtime know of each other.
#pragma once
#include <cstddef>
#include <cstdint>

struct uint3 { unsigned x, y, z; };

namespace shim {

constexpr int WARP = 32;

struct Kernel { void (*call)(void** arguments); int count; const size_t* sizes; };

// Bytes that a kernel may touch; `array` is its place in the caller's list, or one of these.
enum { OWN = -3, STATIC_SHARED = -2, DYNAMIC_SHARED = -1 };
struct Region { uintptr_t begin, end; int array, writable; };

struct Launch {
    unsigned long long most;  // loads and stores: more are an endless loop
    unsigned grid[3], block[3], shared, order;  // order: 0 ascending, 1 descending, else a seed
    void** arguments;
    const size_t* sizes;
    int count;
    const Region* regions;
    int region_count;
};

// Of the thread that runs: to be called inside a kernel only.
void barrier(int place, int line);  // a place is one __syncthreads() of the text
void warp_barrier(unsigned mask);
void exchange(unsigned mask, const void* value, size_t size, int source, void* result);
unsigned ballot(unsigned mask, bool vote);
int lane();
void* shared_memory();
[[noreturn]] void fail(uintptr_t site, const char* format, ...) __attribute__((format(printf, 2, 3)));
enum Access { LOAD, STORE, ATOMIC };
void check(uintptr_t address, size_t size, Access access, uintptr_t site);

}  // namespace shim

extern const shim::Kernel shim_kernels[];
extern "C" void shim_touch_thread_storage();  // makes the loader make this thread's __shared__ variables
