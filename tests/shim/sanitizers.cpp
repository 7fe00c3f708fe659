// Answers what g++ puts into a program for -fsanitize=kernel-address, alignment, bounds and
// signed-integer-overflow: a call before each load and store, and one where an index, an address or a sum is
// wrong.
#include <cstring>

#include "include/runtime.h"

#define SITE uintptr_t(__builtin_return_address(0))
#define ACCESS(n)                                                                                       \
    void __asan_load##n##_noabort(uintptr_t at) { shim::check(at, n, shim::LOAD, SITE); }                    \
    void __asan_store##n##_noabort(uintptr_t at) { shim::check(at, n, shim::STORE, SITE); }

namespace {

struct Place { const char* file; uint32_t line, column; };
struct Type { uint16_t kind, info; char name[1]; };
struct TypeMismatch { Place place; const Type* type; unsigned char log_alignment, kind; };
struct OutOfBounds { Place place; const Type *array, *index; };
struct Overflow { Place place; const Type* type; };

const char* file(const Place& place) {
    const char* slash = std::strrchr(place.file, '/');
    return slash ? slash + 1 : place.file;
}

[[noreturn]] void overflow(const Overflow* what) {
    shim::fail(0, "%s:%u: an %s overflows", file(what->place), what->place.line, what->type->name);
}

}  // namespace

extern "C" {

ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __asan_loadN_noabort(uintptr_t at, size_t n) { shim::check(at, n, shim::LOAD, SITE); }
void __asan_storeN_noabort(uintptr_t at, size_t n) { shim::check(at, n, shim::STORE, SITE); }
void __asan_handle_no_return() {}

void* shim_memmove(void* to, const void* from, size_t size) {
    shim::check(uintptr_t(from), size, shim::LOAD, SITE);
    shim::check(uintptr_t(to), size, shim::STORE, SITE);
    return std::memmove(to, from, size);
}
void* shim_memcpy(void* to, const void* from, size_t size) {
    shim::check(uintptr_t(from), size, shim::LOAD, SITE);
    shim::check(uintptr_t(to), size, shim::STORE, SITE);
    return std::memcpy(to, from, size);
}
void* shim_memset(void* to, int byte, size_t size) {
    shim::check(uintptr_t(to), size, shim::STORE, SITE);
    return std::memset(to, byte, size);
}

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* what, uintptr_t at) {
    shim::fail(0, "%s:%u: misaligned address %#zx for %s, which needs %d", file(what->place),
               what->place.line, size_t(at), what->type->name, 1 << what->log_alignment);
}
[[noreturn]] void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* what, uintptr_t index) {
    shim::fail(0, "%s:%u: index %ld is out of bounds of %s", file(what->place), what->place.line,
               long(index), what->array->name);
}
#define OVERFLOW(name, ...)                                                                             \
    [[noreturn]] void __ubsan_handle_##name##_overflow_abort(const Overflow* what, __VA_ARGS__) {       \
        overflow(what);                                                                                 \
    }
OVERFLOW(add, uintptr_t, uintptr_t)
OVERFLOW(sub, uintptr_t, uintptr_t)
OVERFLOW(mul, uintptr_t, uintptr_t)
OVERFLOW(divrem, uintptr_t, uintptr_t)
OVERFLOW(negate, uintptr_t)

}  // extern "C"
