// The same pass as rope_backward.cu by persistent blocks whose inputs arrive by bulk copies (sm_90 and newer).
//
// A block walks over tokens, and over each token's rows in turns of groups x `rows` rows. One warp, the last,
// copies the rows of the next turns into a ring of stages in shared memory, the table's rows with a token's
// first; it never waits for arithmetic, only for a free stage, so memory stays busy while sums are added up.
// The other threads work as in rope_backward.cu, one token at a time. A stage has two mbarriers: `full`, which
// counts its bytes, and `freed`, at which each working warp arrives once its rows are in registers.
//
// Rows lie back to back and are whole multiples of 16 bytes at such addresses; no channels pass through,
// nothing is added to what is there.
//
// Behind rope_backward.cu.

// ---- sm_90 -----------------------------------------------------------------------------------------------

DEVICE unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

DEVICE void start_barrier(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void arrive(unsigned barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" :: "r"(barrier) : "memory");
}
DEVICE void arrive_and_expect(unsigned barrier, unsigned bytes) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }"
                 :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void wait(unsigned barrier, unsigned parity) {
    asm volatile(
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra AGAIN; }"
        :: "r"(barrier), "r"(parity) : "memory");
}
DEVICE void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void barrier_of_workers(unsigned workers) {
    asm volatile("bar.sync 1, %0;" :: "r"(workers) : "memory");
}

// ---- the ring --------------------------------------------------------------------------------------------

// Where a block is on its way: the stage, and how often the ring has been round, modulo 2.
template <class I> struct Turn {
    int stage = 0;
    unsigned round = 0;
    DEVICE void next() { if (++stage == I::stages) { stage = 0; round ^= 1; } }
};

// Shared memory: the stages, two sets of kept sums in turns, the barriers.
template <class I> struct Ring {
    using S = Shape<I>;
    static constexpr int row = 2 * S::lanes * S::bytes;
    static constexpr int table = S::runs * S::lanes * S::columns * sizeof(typename I::Table);
    static constexpr int rows = S::groups * I::rows, kinds = 1 + S::products;
    static constexpr int stage = kinds * rows * row + 2 * table;
    static constexpr int members = S::lanes * S::groups, workers = (members + 31) / 32 * 32;
    static constexpr int turn_q = I::groups_q * I::rows, turn_k = I::groups_k * I::rows;

    unsigned char* memory;
    DEVICE unsigned char* row_of(int at, bool x, int number) const {
        return memory + at * stage + (x ? rows * row : 0) + number * row;
    }
    DEVICE unsigned char* table_of(int at, bool sin) const { return memory + (at + 1) * stage - (sin ? 1 : 2) * table; }
    DEVICE typename I::Compute* sums(int parity) const {
        return reinterpret_cast<typename I::Compute*>(memory + I::stages * stage) + parity * Kept<I>::size;
    }
    DEVICE unsigned full(int at) const { return shared_address(sums(2)) + 16 * at; }
    DEVICE unsigned freed(int at) const { return full(at) + 8; }
};

template <class I> DEVICE int turns_of(const Arguments& a) {
    using R = Ring<I>;
    const int q = I::groups_q ? (static_cast<int>(a.heads) + R::turn_q - 1) / max(R::turn_q, 1) : 0;
    const int k = I::groups_k ? (static_cast<int>(a.kv_heads) + R::turn_k - 1) / max(R::turn_k, 1) : 0;
    return max(q, k);
}

template <class I> DEVICE Place place_of(const Arguments& a, long long number, int lane) {
    const bool small = number <= 0xffffffff;
    const long long batch = small ? static_cast<unsigned>(number) / static_cast<unsigned>(a.seq) : number / a.seq;
    return place_at<I>(a, batch, number - batch * a.seq, lane);
}

DEVICE int clipped(int rows, int most) { return rows < 0 ? 0 : rows < most ? rows : most; }

// ---- the copying warp ------------------------------------------------------------------------------------

template <class I> DEVICE const char* row_address(const Heads& of, const Place& place, int batch, int head) {
    return of.at + of.batch * batch + bytes_of<I>(of.token, place.token) + bytes_of<I>(of.head, head);
}

template <class I> DEVICE void copy_turn(
    const Arguments& a, const Ring<I>& ring, int at, const Place& place, int batch, int turn, bool first) {
    using R = Ring<I>;
    const int lane = threadIdx.x % 32;
    const int from_q = turn * R::turn_q, from_k = turn * R::turn_k;
    const int rows_q = clipped(a.heads - from_q, R::turn_q), rows_k = clipped(a.kv_heads - from_k, R::turn_k);
    const int rows = rows_q + rows_k;
    if (lane == 0)
        arrive_and_expect(ring.full(at), rows * R::row * R::kinds + (I::rotate && first ? 2 * R::table : 0));
    __syncwarp();
    for (int i = lane; i < rows * R::kinds; i += 32) {
        const bool x = i >= rows;
        const int number = x ? i - rows : i;
        const bool of_k = number >= rows_q;
        const int head = of_k ? from_k + number - rows_q : from_q + number;
        const char* q = row_address<I>(x ? a.q : a.grad_q, place, batch, head);
        const char* k = row_address<I>(x ? a.k : a.grad_k, place, batch, head);
        const int slot = of_k ? R::turn_q + number - rows_q : number;
        bulk_copy(shared_address(ring.row_of(at, x, slot)), of_k ? k : q, R::row, ring.full(at));
    }
    if (I::rotate && first && lane < 2) {
        const Rows& of = lane ? a.sin : a.cos;
        const char* row = of.at + of.batch * place.batch + bytes_of<I>(of.token, place.token);
        bulk_copy(shared_address(ring.table_of(at, lane)), row, R::table, ring.full(at));
    }
}

template <class I> DEVICE void copy_all(const Arguments& a, const Ring<I>& ring) {
    const int turns = turns_of<I>(a);
    Turn<I> now;
    for (long long number = blockIdx.x; number < a.batch * a.seq; number += gridDim.x) {
        const Place place = place_of<I>(a, number, 0);
        for (int batch = place.batch; batch < place.batch + (I::walks ? a.walk : 1); ++batch)
            for (int turn = 0; turn < turns; ++turn, now.next()) {
                wait(ring.freed(now.stage), now.round ^ 1);
                copy_turn<I>(a, ring, now.stage, place, batch, turn, batch == place.batch && turn == 0);
            }
    }
}

// ---- the working threads ---------------------------------------------------------------------------------

template <class T, int N> DEVICE void take(Vector<T, N>& to, const unsigned char* from) {
    constexpr int BYTES = Vector<T, N>::bytes;
    if constexpr (BYTES % 16 == 0) {
        #pragma unroll
        for (int i = 0; i < BYTES / 16; ++i) {
            const uint4 w = reinterpret_cast<const uint4*>(from)[i];
            to.word[4 * i] = w.x, to.word[4 * i + 1] = w.y, to.word[4 * i + 2] = w.z, to.word[4 * i + 3] = w.w;
        }
    } else if constexpr (BYTES == 8) {
        const uint2 w = *reinterpret_cast<const uint2*>(from);
        to.word[0] = w.x, to.word[1] = w.y;
    } else if constexpr (BYTES == 4) to.word[0] = *reinterpret_cast<const unsigned*>(from);
    else to.word[0] = *reinterpret_cast<const unsigned short*>(from);
}

template <class I> DEVICE void take_table(
    Vector<typename I::Table, Shape<I>::columns> (&to)[Shape<I>::runs], const unsigned char* row, int lane) {
    #pragma unroll
    for (int run = 0; run < Shape<I>::runs; ++run)
        take(to[run], row + (lane + run * I::lanes) * Vector<typename I::Table, Shape<I>::columns>::bytes);
}

// One turn: this thread's rows out of the stage, the stage given back, then arithmetic and stores. A thread
// that is no member keeps in step and writes nothing.
template <class I> DEVICE void work_turn(
    const Arguments& a, const Ring<I>& ring, int at, const Place& place, int batch, int turn, const Group& group,
    bool member, const Tables<I>& tables, Sums<I>& sums) {
    using R = Ring<I>;
    using S = Shape<I>;
    constexpr int U = I::rows;
    Flight<I> now;
    #pragma unroll
    for (int u = 0; u < U; ++u) {
        const int slot = group.number + u * group.of + (group.of_k ? R::turn_q : 0);
        #pragma unroll
        for (int v = 0; v < 2; ++v) {
            const int offset = (place.lane + v * S::lanes) * S::bytes;
            take(now.grad[u][v], ring.row_of(at, false, slot) + offset);
            if constexpr (S::products) take(now.x[u][v], ring.row_of(at, true, slot) + offset);
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(ring.freed(at));
    const Stream<I> out(a.out_q, a.out_k, group.of_k, batch, place);
    const bool rotate = rotates<I>(a, group);
    #pragma unroll
    for (int u = 0; u < U; ++u) {
        const int head = turn * group.of * U + group.number + u * group.of;
        if (!member || !(I::even || head < group.heads)) continue;
        if constexpr (S::products) add_products<I>(sums, now.grad[u], now.x[u]);
        if constexpr (I::rotate) {
            if (!rotate) continue;
            RowOf<I> made = {};
            rotate_back<I>(made, tables, now.grad[u], now.grad[u]);
            store<I::hint, true>(out.row(head), made[0], 0);
            store<I::hint, true>(out.second(head), made[1], 0);
        }
    }
}

template <class I> DEVICE void work_all(const Arguments& a, const Ring<I>& ring) {
    using R = Ring<I>;
    using S = Shape<I>;
    const int turns = turns_of<I>(a), self = threadIdx.x, lane = self % S::lanes;
    const bool member = self < R::members;
    const Group group = group_of<I>(a, member ? self / S::lanes : 0);
    Turn<I> now;
    int parity = 0;
    for (long long number = blockIdx.x; number < a.batch * a.seq; number += gridDim.x, parity ^= 1) {
        const Place place = place_of<I>(a, number, lane);
        Tables<I> tables = {};
        Sums<I> sums = {};
        for (int batch = place.batch; batch < place.batch + (I::walks ? a.walk : 1); ++batch)
            for (int turn = 0; turn < turns; ++turn, now.next()) {
                wait(ring.full(now.stage), now.round);
                if (I::rotate && batch == place.batch && turn == 0) {
                    take_table<I>(tables.cos, ring.table_of(now.stage, false), lane);
                    take_table<I>(tables.sin, ring.table_of(now.stage, true), lane);
                }
                work_turn<I>(a, ring, now.stage, place, batch, turn, group, member, tables, sums);
            }
        if constexpr (S::products) {
            if (member) Kept<I>::keep(ring.sums(parity), self, sums);
            barrier_of_workers(R::workers);
            sum_groups<I>(a, ring.sums(parity), place_at<I>(a, place.batch, place.token, 0), self, R::workers);
        }
    }
}

template <class I> DEVICE void rope_pipeline_of(const Arguments& a) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Ring<I> ring = {shared_memory};
    if (threadIdx.x == 0) {
        for (int at = 0; at < I::stages; ++at) {
            start_barrier(ring.full(at), 1);
            start_barrier(ring.freed(at), Ring<I>::workers / 32);
        }
        publish_barriers();
    }
    __syncthreads();
    if (threadIdx.x >= Ring<I>::workers) copy_all<I>(a, ring);
    else work_all<I>(a, ring);
}
