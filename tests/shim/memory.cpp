// What a kernel may touch: the arrays of its launch, its shared memory, its own stack and its program.
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "internal.h"

namespace {

struct Image { uintptr_t begin, end; char* thread_begin; size_t thread_size; } image;  // of this program
std::vector<shim::Region> regions;
const shim::Region* last;  // where the access before this one was
shim::Region shared;
unsigned long long left;  // loads and stores before it counts as endless

int find_image(dl_phdr_info* info, size_t, void*) {
    Image found = {~uintptr_t(0), 0, nullptr, 0};
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        if (part.p_type == PT_LOAD) {
            found.begin = std::min(found.begin, uintptr_t(info->dlpi_addr + part.p_vaddr));
            found.end = std::max(found.end, uintptr_t(info->dlpi_addr + part.p_vaddr + part.p_memsz));
        } else if (part.p_type == PT_TLS) {
            found.thread_begin = static_cast<char*>(info->dlpi_tls_data);
            found.thread_size = part.p_memsz;
        }
    }
    const auto own = uintptr_t(&image);
    if (own < found.begin || own >= found.end) return 0;
    image = found;
    return 1;
}

[[noreturn]] void outside(
    uintptr_t address, size_t size, bool load, uintptr_t site, const shim::Region& near) {
    char name[32] = "dynamic shared memory";
    if (near.array >= 0) snprintf(name, sizeof name, "array %d", near.array);
    const bool within = address >= near.begin && address + size <= near.end;
    shim::fail(site, "%s %zu bytes at byte %ld of %s, which has %ld bytes%s", load ? "reads" : "writes", size,
               long(address - near.begin), name, long(near.end - near.begin),
               within ? " and is read-only" : "");
}

template <class F>
const shim::Region* find(uintptr_t address, size_t size, shim::Access access, uintptr_t site, F fits) {
    const shim::Region* nearest = nullptr;
    long closest = 0;
    for (const shim::Region& region : regions) {
        if (fits(region)) return &region;
        const long past = long(address + size - region.end), before = long(region.begin - address);
        const long away = std::max({0l, past, before});
        if (region.array < shim::DYNAMIC_SHARED || (nearest && away >= closest)) continue;
        nearest = &region;
        closest = away;
    }
    outside(address, size, access == shim::LOAD, site, *nearest);
}

}  // namespace

namespace shim {

void allow(const Launch& launch, void* dynamic) {
    shim_touch_thread_storage();
    dl_iterate_phdr(find_image, nullptr);
    const auto own = uintptr_t(image.thread_begin);
    shared = {uintptr_t(dynamic), uintptr_t(dynamic) + launch.shared, DYNAMIC_SHARED, 1};
    regions.assign(launch.regions, launch.regions + launch.region_count);
    regions.push_back({image.begin, image.end, OWN, 1});
    regions.push_back({own, own + image.thread_size, STATIC_SHARED, 1});
    regions.push_back(shared);
    last = &regions.back();
    left = launch.most;
    track(launch.shared, image.thread_size);
}

void spoil_shared_memory() {
    std::memset(reinterpret_cast<void*>(shared.begin), 0xff, shared.end - shared.begin);  // NaN, and -1
    std::memset(image.thread_begin, 0xff, image.thread_size);
}

void* shared_memory() { return reinterpret_cast<void*>(shared.begin); }

const char* place(uintptr_t site, char (&text)[32]) {
    snprintf(text, sizeof text, "<%#zx>", size_t(site - image.begin - 1));
    return text;
}

void check(uintptr_t address, size_t size, Access access, uintptr_t site) {
    const auto fits = [=](const Region& region) {
        return address >= region.begin && address + size <= region.end && (region.writable || access == LOAD);
    };
    if (!running() || !size) return;
    if (!left--) fail(site, "still loads and stores after all that the launch may: an endless loop");
    if (fits(stack())) return;
    if (!fits(*last)) last = find(address, size, access, site, fits);
    if (access != ATOMIC && (last->array == STATIC_SHARED || last->array == DYNAMIC_SHARED))
        visit(last->array == DYNAMIC_SHARED, address - last->begin, size, access == STORE, site);
}

}  // namespace shim
