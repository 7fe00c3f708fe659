// Runs a launch: block after block, each CUDA thread a fiber that runs until it waits for others or ends.
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "include/vectors.h"
#include "internal.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace {

constexpr size_t STACK = 128 << 10;
constexpr int MOST_THREADS = 1024, LARGEST = 16;  // bytes that a lane can hand to another
enum State { READY, AT_BARRIER, AT_WARP, ENDED };

struct Fiber {
    ucontext_t start;
    jmp_buf jump;
    bool begun;
    State state;
    int place, line;                      // of the barrier that it waits at
    unsigned mask;                        // lanes that it waits for
    bool vote;                            // what it tells those lanes,
    unsigned char value[LARGEST];
    int source;                           // the lane that it asks, and what it hears when all have come
    unsigned char result[LARGEST];
    unsigned votes;
    unsigned epoch;                       // of its waits for lanes: one for those that waited together
};

struct Machine {
    Fiber* fibers;                        // fibers and stacks are kept from launch to launch
    char* stacks;
    const shim::Launch* launch;
    const shim::Kernel* kernel;
    int current, threads;
    jmp_buf home;
    bool inside;                          // a fiber runs
    unsigned epoch;                       // barriers passed and blocks begun, in all launches
    char message[512];
} machine;

int resume(int i) {
    Fiber& fiber = machine.fibers[i];
    const unsigned x = machine.launch->block[0], y = machine.launch->block[1];
    threadIdx = {i % x, i / x % y, i / (x * y)};
    machine.current = i;
    if (const int how = _setjmp(machine.home)) {
        machine.inside = false;
        return how;
    }
    machine.inside = true;
    if (fiber.begun) _longjmp(fiber.jump, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
    abort();
}

void wait(State state) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.state = state;
    if (!_setjmp(fiber.jump)) _longjmp(machine.home, 1);
}

void live() {  // a fiber serves one thread index of every block of every launch
    for (;;) {
        machine.kernel->call(machine.launch->arguments);
        wait(ENDED);
    }
}

void begin(int i) {
    Fiber& fiber = machine.fibers[i];
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = machine.stacks + i * STACK;
    fiber.start.uc_stack.ss_size = STACK;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, live, 0);
    fiber.begun = false;
}

bool problem(const char* format, ...) {
    va_list rest;
    va_start(rest, format);
    vsnprintf(machine.message, sizeof machine.message, format, rest);
    va_end(rest);
    return false;
}

// Everybody in `group`, lanes of a warp, hears from the others and goes on.
void release(Fiber* warp, unsigned group) {
    unsigned votes = 0, epoch = 0;
    for (int i = 0; i < shim::WARP; ++i) {
        if (!(group >> i & 1)) continue;
        votes |= unsigned(warp[i].vote) << i;
        epoch = std::max(epoch, warp[i].epoch);
    }
    for (int i = 0; i < shim::WARP; ++i) {
        if (!(group >> i & 1)) continue;
        Fiber& fiber = warp[i];
        fiber.votes = votes;
        if (group >> fiber.source & 1) std::memcpy(fiber.result, warp[fiber.source].value, LARGEST);
        else std::memset(fiber.result, 0xff, LARGEST);  // undefined on a GPU
        fiber.epoch = epoch + 1;
        fiber.state = READY;
    }
}

// Lanes whose whole mask waits with the same mask go on; what has ended counts as having come.
bool release_lanes() {
    bool released = false;
    for (int i = 0; i < machine.threads; ++i) {
        if (machine.fibers[i].state != AT_WARP) continue;
        Fiber* warp = &machine.fibers[i & ~(shim::WARP - 1)];
        const unsigned mask = machine.fibers[i].mask;
        const int lanes = std::min<int>(shim::WARP, machine.fibers + machine.threads - warp);
        unsigned group = 0, missing = 0;
        for (int j = 0; j < lanes; ++j) {
            if (!(mask >> j & 1) || warp[j].state == ENDED) continue;
            (warp[j].state == AT_WARP && warp[j].mask == mask ? group : missing) |= 1u << j;
        }
        if (missing) continue;
        release(warp, group);
        released = true;
    }
    return released;
}

bool release_barrier() {
    int first = -1;
    for (int i = 0; i < machine.threads; ++i) {
        const Fiber& fiber = machine.fibers[i];
        if (fiber.state == ENDED) continue;
        if (fiber.state == AT_WARP)
            return problem("divergent: thread %d waits for lanes %#x of its warp, which never come", i,
                           fiber.mask);
        if (first >= 0 && fiber.place != machine.fibers[first].place)
            return problem("divergent barrier: thread %d waits at line %d, thread %d at line %d", first,
                           machine.fibers[first].line, i, fiber.line);
        first = first < 0 ? i : first;
    }
    for (int i = 0; i < machine.threads; ++i) {
        Fiber& fiber = machine.fibers[i];
        if (fiber.state == ENDED)
            return problem("divergent barrier: thread %d waits at line %d, thread %d has returned", first,
                           machine.fibers[first].line, i);
        fiber.state = READY;
    }
    ++machine.epoch;
    return true;
}

bool run_block(const std::vector<int>& order) {
    for (int i : order) machine.fibers[i].state = READY;
    for (;;) {
        bool ran = false, ended = true;
        for (int i : order) {
            if (machine.fibers[i].state == READY) {
                ran = true;
                if (resume(i) == 2) return false;
            }
            ended &= machine.fibers[i].state == ENDED;
        }
        if (ended) return true;
        if (!ran && !release_lanes() && !release_barrier()) return false;
    }
}

std::vector<int> ordered(size_t count, unsigned order) {
    std::vector<int> result(count);
    std::iota(result.begin(), result.end(), 0);
    if (order == 1) std::reverse(result.begin(), result.end());
    for (size_t i = count; order > 1 && i > 1; --i) {
        order = order * 1664525u + 1013904223u;
        if (order < 2) order += 2;
        std::swap(result[i - 1], result[(order >> 8) % i]);
    }
    return result;
}

void map_fibers() {
    if (machine.fibers) return;
    machine.fibers = static_cast<Fiber*>(calloc(MOST_THREADS, sizeof(Fiber)));
    machine.stacks = static_cast<char*>(mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < MOST_THREADS; ++i) begin(i);
}

bool acceptable(const shim::Launch& launch) {
    const size_t threads = size_t(launch.block[0]) * launch.block[1] * launch.block[2];
    const size_t blocks = size_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
    if (!threads || threads > MOST_THREADS)
        return problem("%zu threads a block: 1 to %d", threads, MOST_THREADS);
    if (!blocks) return problem("an empty grid");
    if (launch.count != machine.kernel->count)
        return problem("%d arguments, the kernel takes %d", launch.count, machine.kernel->count);
    for (int i = 0; i < launch.count; ++i)
        if (launch.sizes[i] != machine.kernel->sizes[i])
            return problem("argument %d has %zu bytes, the kernel takes %zu", i, launch.sizes[i],
                           machine.kernel->sizes[i]);
    machine.threads = int(threads);
    return true;
}

bool run(const shim::Launch& launch) {
    blockDim = {launch.block[0], launch.block[1], launch.block[2]};
    gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
    const auto order = ordered(machine.threads, launch.order);
    for (unsigned i : ordered(size_t(gridDim.x) * gridDim.y * gridDim.z, launch.order)) {
        blockIdx = {i % gridDim.x, i / gridDim.x % gridDim.y, i / (gridDim.x * gridDim.y)};
        shim::spoil_shared_memory();
        ++machine.epoch;
        if (!run_block(order)) return false;
    }
    return true;
}

}  // namespace

namespace shim {

bool running() { return machine.inside; }
int lane() { return machine.current & (WARP - 1); }
Now now() { return {machine.current, machine.epoch, machine.fibers[machine.current].epoch}; }
Region stack() {
    const auto begin = uintptr_t(machine.stacks + machine.current * STACK);
    return {begin, begin + STACK, OWN, 1};
}

void barrier(int place, int line) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.place = place;
    fiber.line = line;
    wait(AT_BARRIER);
}

void warp_barrier(unsigned mask) {
    if (!(mask >> lane() & 1)) fail(0, "lane %d waits for lanes %#x, which leave it out", lane(), mask);
    machine.fibers[machine.current].mask = mask;
    wait(AT_WARP);
}

void exchange(unsigned mask, const void* value, size_t size, int source, void* result) {
    if (size > LARGEST) fail(0, "%zu bytes in a shuffle: at most %d", size, LARGEST);
    Fiber& fiber = machine.fibers[machine.current];
    std::memcpy(fiber.value, value, size);
    fiber.source = source;
    warp_barrier(mask);
    std::memcpy(result, fiber.result, size);
}

unsigned ballot(unsigned mask, bool vote) {
    Fiber& fiber = machine.fibers[machine.current];
    fiber.vote = vote;
    warp_barrier(mask);
    return fiber.votes;
}

void fail(uintptr_t site, const char* format, ...) {
    char what[384];
    va_list rest;
    va_start(rest, format);
    vsnprintf(what, sizeof what, format, rest);
    va_end(rest);
    char text[32];
    problem("%s (block %u,%u,%u thread %u,%u,%u)%s%s", what, blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z, site ? " at " : "", site ? place(site, text) : "");
    if (!machine.inside) abort();
    _longjmp(machine.home, 2);
}

}  // namespace shim

// Runs a launch to its end or its first fault, of which it returns the text.
extern "C" const char* shim_launch(int kernel, const shim::Launch* launch) {
    map_fibers();
    machine.launch = launch;
    machine.kernel = &shim_kernels[kernel];
    machine.inside = false;
    if (!acceptable(*launch)) return machine.message;
    void* shared = aligned_alloc(1024, (launch->shared + 1024) / 1024 * 1024);
    shim::allow(*launch, shared);
    const bool right = run(*launch);
    free(shared);
    if (right) return nullptr;
    for (int i = 0; i < MOST_THREADS; ++i) begin(i);  // those that were left in the middle
    return machine.message;
}
