// Two threads of a block touch a byte of shared memory, one of them writes, and no barrier stands between.
#include <cstdio>
#include <vector>

#include "internal.h"

namespace {

// Who was where, when: barriers passed by all till then, and waits for lanes by the thread.
struct Visit { int thread = -1; unsigned block_epoch, warp_epoch; uintptr_t site; };
struct Byte { Visit write, reads[2]; };  // the last read, and the last of another thread

std::vector<Byte> dynamic_bytes, static_bytes;

// Whether a barrier stands between two accesses. Lanes that waited for one another have one warp epoch, later
// than all that they had before.
bool ordered(const Visit& before, const Visit& now) {
    if (before.thread < 0 || before.thread == now.thread) return true;
    if (before.block_epoch != now.block_epoch) return true;
    return before.thread / shim::WARP == now.thread / shim::WARP && before.warp_epoch < now.warp_epoch;
}

void judge(const Visit& before, bool stored, const Visit& now, bool store) {
    if (ordered(before, now)) return;
    char place[32];
    shim::fail(now.site, "race: thread %d %s what thread %d %s, with no barrier between, at %s", now.thread,
               store ? "writes" : "reads", before.thread, stored ? "wrote" : "read",
               shim::place(before.site, place));
}

}  // namespace

namespace shim {

void track(size_t dynamic_size, size_t static_size) {
    dynamic_bytes.resize(dynamic_size);  // what an earlier launch left is of another epoch
    static_bytes.resize(static_size);
}

void visit(bool dynamic, size_t first, size_t size, bool store, uintptr_t site) {
    const Now time = now();
    const Visit visit = {time.thread, time.block_epoch, time.warp_epoch, site};
    for (size_t i = first; i < first + size; ++i) {
        Byte& byte = (dynamic ? dynamic_bytes : static_bytes)[i];
        judge(byte.write, true, visit, store);
        if (store) {
            for (const Visit& read : byte.reads) judge(read, false, visit, store);
            byte.write = visit;
        } else {
            if (byte.reads[0].thread != visit.thread) byte.reads[1] = byte.reads[0];
            byte.reads[0] = visit;
        }
    }
}

}  // namespace shim
