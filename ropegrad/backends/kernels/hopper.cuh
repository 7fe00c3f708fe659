// Hopper's tensor cores and copy engine, as PTX (sm_90a): barriers in shared memory, boxes of a matrix,
// products.

// What cuTensorMapEncodeTiled makes: a matrix of 16-bit numbers, read in boxes of 64 rows and 64 columns whose
// rows of 128 bytes are swizzled, with zeros beyond its edges.
struct alignas(64) TensorMap { unsigned long long opaque[16]; };

constexpr unsigned BOX = 64, BOX_BYTES = BOX * BOX * 2;

DEVICE unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// Of a thread, from here on; all threads of a warpgroup at once.
template <int COUNT> DEVICE void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT> DEVICE void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}

DEVICE void warpgroup_sync(unsigned group) {  // its number in the block
    asm volatile("bar.sync %0, 128;" :: "r"(group + 1) : "memory");
}

// ---- barriers in shared memory ----------------------------------------------------------------------------

DEVICE void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void barriers_are_ready() {  // for the copy engine
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
DEVICE void barrier_expect(unsigned barrier, unsigned bytes) {  // arrives, too
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void barrier_wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@p bra DONE;\n"
        "bra AGAIN;\n"
        "DONE:\n}" :: "r"(barrier), "r"(parity) : "memory");
}

// ---- the copy engine --------------------------------------------------------------------------------------

DEVICE void load_box(unsigned to, const TensorMap& map, unsigned barrier, unsigned column, unsigned row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}

// ---- tensor cores -----------------------------------------------------------------------------------------

// A matrix of boxes in shared memory. Eight rows of a box are 1024 bytes; of a box that is read by columns, so
// are eight terms, and the next 64 columns are the next box.
DEVICE unsigned long long descriptor(unsigned address) {
    const unsigned long long box = BOX_BYTES >> 4, rows = 1024 >> 4, swizzled = 1ull << 62;
    return swizzled | rows << 32 | box << 16 | (address & 0x3ffffu) >> 4;
}
constexpr unsigned ALONG = 32 >> 4, DOWN = 16 * 128 >> 4;  // a descriptor's step by 16 columns, by 16 rows

DEVICE void multiply_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void multiply_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> DEVICE void multiply_wait() {  // until no more than these groups are on their way
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

constexpr int SUMS = 64;  // of a thread; a warpgroup has 64 rows of 128 columns

#define OF8(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3]), \
               "+f"(s[i + 4]), "+f"(s[i + 5]), "+f"(s[i + 6]), "+f"(s[i + 7])

// 64 rows, 128 columns, 16 terms of float16: s = left·right, plus s where KEEP. The right matrix is read by
// columns, and the left one where BY_COLUMNS.
template <int BY_COLUMNS, int KEEP> DEVICE void multiply(
    float (&s)[SUMS], unsigned long long left, unsigned long long right) {
    asm volatile(
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, keep, 1, 1, %67, 1;\n}"
        : OF8(0), OF8(8), OF8(16), OF8(24), OF8(32), OF8(40), OF8(48), OF8(56)
        : "l"(left), "l"(right), "n"(KEEP), "n"(BY_COLUMNS));
}
