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
// Behind the files that rope_backward.cu stands behind.

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
    unsigned stage = 0, round = 0;
    DEVICE void next() { if (++stage == I::stages) { stage = 0; round ^= 1; } }
};

// Shared memory: the stages, two sets of kept sums in turns, the barriers.
template <class I> struct Ring {
    static constexpr unsigned row = 2 * I::lanes * I::vector * sizeof(typename I::Storage);
    static constexpr unsigned table = 2 * I::lanes * Shape<I>::columns * sizeof(typename I::Table)
        / (Shape<I>::one_run ? 2 : 1);
    static constexpr bool products = I::cos || I::sin;
    static constexpr unsigned rows = (I::groups_q + I::groups_k) * I::rows;
    static constexpr unsigned stage = rows * row * (1 + products) + 2 * table;
    static constexpr unsigned members = I::lanes * (I::groups_q + I::groups_k);
    static constexpr unsigned workers = (members + 31) / 32 * 32;
    static constexpr int turn_q = I::groups_q * I::rows, turn_k = I::groups_k * I::rows;

    unsigned char* memory;
    DEVICE unsigned char* row_of(unsigned at, bool x, unsigned number) const {
        return memory + at * stage + (x ? rows * row : 0) + number * row;
    }
    DEVICE unsigned char* table_of(unsigned at, bool sin) const {
        return memory + (at + 1) * stage - (sin ? 1 : 2) * table;
    }
    DEVICE typename I::Compute* sums(unsigned parity) const {
        const unsigned kept = (I::cos + I::sin) * Shape<I>::slots * slot_stride<I>(members);
        return reinterpret_cast<typename I::Compute*>(memory + I::stages * stage) + parity * kept;
    }
    DEVICE unsigned full(unsigned at) const { return shared_address(sums(2)) + 16 * at; }
    DEVICE unsigned freed(unsigned at) const { return full(at) + 8; }
};

template <class I> DEVICE int turns_of(const Arguments& a) {
    using R = Ring<I>;
    const int q = (static_cast<int>(a.heads) + R::turn_q - 1) / max(R::turn_q, 1);
    const int k = (static_cast<int>(a.kv_heads) + R::turn_k - 1) / max(R::turn_k, 1);
    return max(q, k);
}

DEVICE int clipped(int rows, int most) { return rows < 0 ? 0 : rows < most ? rows : most; }

// ---- the copying warp ------------------------------------------------------------------------------------

template <class I> DEVICE const void* row_address(const Heads& of, const Place& place, int batch, int head) {
    return static_cast<const typename I::Storage*>(of.at) + of.batch * batch + of.token * place.token + of.head * head;
}

template <class I> DEVICE void copy_turn(
    const Arguments& a, const Ring<I>& ring, unsigned at, const Place& place, int batch, int turn, bool first) {
    using R = Ring<I>;
    const int lane = threadIdx.x % 32;
    const int from_q = turn * R::turn_q, from_k = turn * R::turn_k;
    const int rows_q = clipped(a.heads - from_q, R::turn_q), rows_k = clipped(a.kv_heads - from_k, R::turn_k);
    const int rows = rows_q + rows_k;
    if (lane == 0)
        arrive_and_expect(ring.full(at), rows * R::row * (1 + R::products) + (I::rotate && first ? 2 * R::table : 0));
    __syncwarp();
    for (int i = lane; i < rows * (1 + R::products); i += 32) {
        const bool x = i >= rows;
        const int number = x ? i - rows : i;
        const bool of_k = number >= rows_q;
        const int head = of_k ? from_k + number - rows_q : from_q + number;
        const void* q = row_address<I>(x ? a.q : a.grad_q, place, batch, head);
        const void* k = row_address<I>(x ? a.k : a.grad_k, place, batch, head);
        const int slot = of_k ? R::turn_q + number - rows_q : number;
        bulk_copy(shared_address(ring.row_of(at, x, slot)), of_k ? k : q, R::row, ring.full(at));
    }
    if (I::rotate && first && lane < 2) {
        const Rows& of = lane ? a.sin : a.cos;
        const void* row = static_cast<const typename I::Table*>(of.at) + of.batch * place.batch + of.token * place.token;
        bulk_copy(shared_address(ring.table_of(at, lane)), row, R::table, ring.full(at));
    }
}

template <class I> DEVICE void copy_all(const Arguments& a, const Ring<I>& ring) {
    const int turns = turns_of<I>(a);
    Turn<I> now;
    for (long long number = blockIdx.x; number < a.tokens; number += gridDim.x) {
        const Place place = place_of<I>(a, number, 0);
        for (int batch = place.batch; batch < place.batch + a.walk; ++batch)
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

template <class I> DEVICE void take_table(typename I::Compute (&to)[Shape<I>::slots], const unsigned char* row, int lane) {
    using S = Shape<I>;
    #pragma unroll
    for (int run = 0; run < S::runs; ++run) {
        Vector<typename I::Table, S::columns> vector;
        take(vector, row + (lane + run * I::lanes) * Vector<typename I::Table, S::columns>::bytes);
        #pragma unroll
        for (int i = 0; i < S::columns; ++i)
            to[run * S::columns + i] = Wide<typename I::Compute>::from(vector.get(i));
    }
}

// One turn: this thread's rows out of the stage, the stage given back, then arithmetic and stores.
template <class I> DEVICE void work_turn(
    const Arguments& a, const Ring<I>& ring, unsigned at, const Place& place, int batch, int turn, int group,
    bool member, const Sums<I>& tables, Sums<I>& sums) {
    using R = Ring<I>;
    constexpr int U = I::rows, bytes = Vector<typename I::Storage, I::vector>::bytes;
    const bool of_k = group >= I::groups_q;
    const int groups = of_k ? I::groups_k : I::groups_q, start = group - (of_k ? I::groups_q : 0);
    const int heads = !member ? 0 : of_k ? a.kv_heads : a.heads, first = turn * groups * U;
    RowOf<I> gs[U], xs[U];
    #pragma unroll
    for (int u = 0; u < U; ++u) {
        const int slot = start + u * groups + (of_k ? R::turn_q : 0);
        #pragma unroll
        for (int v = 0; v < 2; ++v) {
            const int offset = (place.lane + v * I::lanes) * bytes;
            take(gs[u][v], ring.row_of(at, false, slot) + offset);
            if constexpr (R::products) take(xs[u][v], ring.row_of(at, true, slot) + offset);
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(ring.freed(at));
    const Stream<I> out(a.out_q, a.out_k, of_k, batch, place.token, place.lane * I::vector);
    const bool rotate = I::rotate && out.at != nullptr;
    #pragma unroll
    for (int u = 0; u < U; ++u) {
        const int head = first + start + u * groups;
        if (head >= heads) continue;
        if constexpr (R::products) add_products<I>(sums, gs[u], xs[u]);
        if constexpr (I::rotate) {
            if (!rotate) continue;
            RowOf<I> made = {};
            rotate_back<I>(made, tables, gs[u], gs[u]);
            store<I::hint, true>(out.row(head), made[0], 1);
            store<I::hint, true>(out.row(head) + I::lanes * I::vector, made[1], 1);
        }
    }
}

template <class I> DEVICE void work_all(const Arguments& a, const Ring<I>& ring) {
    using R = Ring<I>;
    const int turns = turns_of<I>(a);
    // Threads that fill up the last warp keep in step and write nothing.
    const bool member = threadIdx.x < R::members;
    const int lane = threadIdx.x % I::lanes, group = member ? threadIdx.x / I::lanes : 0;
    Turn<I> now;
    unsigned parity = 0;
    for (long long number = blockIdx.x; number < a.tokens; number += gridDim.x, parity ^= 1) {
        Place place = place_of<I>(a, number, lane);
        Sums<I> tables = {}, sums = {};
        for (int batch = place.batch; batch < place.batch + a.walk; ++batch)
            for (int turn = 0; turn < turns; ++turn, now.next()) {
                wait(ring.full(now.stage), now.round);
                if (I::rotate && batch == place.batch && turn == 0) {
                    take_table<I>(tables.cos, ring.table_of(now.stage, false), lane);
                    take_table<I>(tables.sin, ring.table_of(now.stage, true), lane);
                    exchange_sines<I>(a, tables);
                }
                work_turn<I>(a, ring, now.stage, place, batch, turn, group, member, tables, sums);
            }
        if constexpr (R::products) {
            if (member) keep_sums<I>(ring.sums(parity), R::members, threadIdx.x, sums);
            barrier_of_workers(R::workers);
            sum_groups<I>(a, ring.sums(parity), {I::lanes, 1, I::groups_q + I::groups_k, R::workers, number, 0},
                          threadIdx.x);
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
