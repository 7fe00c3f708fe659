// RoPE backward in one pass: every input is read once and every output written once.
//
// A row is one head of one token. A thread owns two vectors of `vector` channels of its rows, a fixed
// distance apart (channels j and j + R/2 where the pairing is "half", so both members of a pair; whole pairs
// where it is "interleaved"). A block is lanes x tokens x groups threads: lanes share a row, groups a token's
// rows, the first groups_q of them q's heads, the others k's, in turns. A thread has `rows` rows in flight.
//
// blockIdx.x counts tokens and the parts of their rows, blockIdx.z batches (or the other way round) and, where
// no table gradient is wanted, blockIdx.y parts of the heads. Table gradients are summed over a thread's rows
// in registers, then over groups, in their order, through shared memory. No atomics: the same launch gives
// the same bits. Where a table is shared by the batch and its gradient is wanted, a block walks over the batch.
//
// Rows are asked for before anything else, all at once: what a block waits for is one latency of memory.
//
// What is compiled is said by a struct `Instance` behind this text (rope_instance.py). Strides, heads and
// tokens are run-time values.
//
// Behind numbers.cuh, memory.cuh, rope_rows.cuh and rope_tables.cuh.

// One array as a thread sees it in one batch: its first channel in the token's first row.
template <class I> struct Stream {
    char* at;
    long long head, step;

    DEVICE Stream(const Heads& q, const Heads& k, bool of_k, int batch, const Place& place)
        : head(of_k ? k.head : q.head), step(I::dense ? Shape<I>::element : of_k ? k.channel : q.channel) {
        char* in_q = q.at + q.batch * batch + bytes_of<I>(q.token, place.token);
        char* in_k = k.at + k.batch * batch + bytes_of<I>(k.token, place.token);
        at = (of_k ? in_k : in_q) + step * (place.lane * I::vector);
    }
    DEVICE char* row(int r) const { return at + bytes_of<I>(head, r); }
    DEVICE char* second(int r) const { return row(r) + step * Shape<I>::apart; }
};

// What a thread has in flight.
template <class I> struct Rest { Vector<typename I::Storage, I::vector> at[I::rests ? I::rests : 1]; };
template <class I> struct Flight {
    RowOf<I> grad[I::rows], x[I::rows], old[I::rows];
    Rest<I> rest[I::rows];  // of grad
};

template <class I>
DEVICE void load_row(RowOf<I>& row, const Stream<I>& from, int r, bool first, bool second) {
    if (first) load<I::hint, I::dense>(row[0], from.row(r), from.step);
    else row[0] = {};
    if (second) load<I::hint, I::dense>(row[1], from.second(r), from.step);
    else row[1] = {};
}

// Channels past the rotary width: the same bits. First those that a thread has in flight with its row, then
// where a row is not dense, or something is added, one vector after the other. `at` is the first of them.
template <class I> DEVICE int rest_of(const Place& place, int turn) {
    return place.lane + turn * Shape<I>::parts * I::lanes;
}
template <class I> DEVICE long long rest_from(const Place& place, long long step) {
    return step * (I::vectors * I::vector - place.lane * I::vector);
}
template <class I> DEVICE void load_rest(
    Rest<I>& to, const char* at, const Place& place, int rest, bool there) {
    #pragma unroll
    for (int i = 0; i < I::rests; ++i)
        if (there && rest_of<I>(place, i) < rest)
            load<I::hint, true>(to.at[i], at + Shape<I>::bytes * rest_of<I>(place, i), 0);
}
template <class I> DEVICE void store_rest(
    char* at, const Rest<I>& from, const Place& place, int rest) {
    #pragma unroll
    for (int i = 0; i < I::rests; ++i)
        if (rest_of<I>(place, i) < rest)
            store<I::hint, true>(at + Shape<I>::bytes * rest_of<I>(place, i), from.at[i], 0);
}
template <class I> DEVICE void pass_through(
    const char* from, long long from_step, char* to, long long to_step, int rest, int lane) {
    using T = typename I::Storage;
    constexpr int V = I::dense ? I::vector : 1;
    for (int v = lane; v < rest; v += Shape<I>::parts * I::lanes) {
        Vector<T, V> x;
        load<I::hint, I::dense>(x, from + v * V * from_step, from_step);
        if constexpr (I::add) {
            using Compute = Wide<typename I::Compute>;
            Vector<T, V> old, sum = {};
            load<I::hint, I::dense>(old, to + v * V * to_step, to_step);
            #pragma unroll
            for (int i = 0; i < V; ++i)
                sum.set(i, Narrow<T>::from(plus(Compute::from(x.get(i)), Compute::from(old.get(i)))));
            x = sum;
        }
        store<I::hint, I::dense>(to + v * V * to_step, x, to_step);
    }
}

// A thread's group: whose heads it takes, and which.
struct Group {
    bool of_k;
    int number, of, heads;
};

template <class I> DEVICE Group group_of(const Arguments& a, int group) {
    const bool of_k = I::groups_k && group >= I::groups_q;
    return {of_k, of_k ? group - I::groups_q : group, of_k ? I::groups_k : I::groups_q,
            static_cast<int>(of_k ? a.kv_heads : a.heads)};
}

template <class I> DEVICE bool rotates(const Arguments& a, const Group& group) {
    return I::rotate && (I::rotate_all || (group.of_k ? a.out_k.at : a.out_q.at) != nullptr);
}

// The rows of one batch. The table's rows are asked for behind the first of them.
template <class I> DEVICE void rows_of_batch(
    const Arguments& a, const Place& place, const Group& group, int batch, Tables<I>& tables, Sums<I>& sums) {
    using S = Shape<I>;
    constexpr int U = I::rows;
    const Stream<I> grad(a.grad_q, a.grad_k, group.of_k, batch, place);
    const Stream<I> x(a.q, a.k, group.of_k, batch, place);
    const Stream<I> out(a.out_q, a.out_k, group.of_k, batch, place);
    const bool rotate = rotates<I>(a, group);
    const int split = S::products ? 0 : blockIdx.y, splits = S::products ? 1 : gridDim.y;
    bool start = batch == place.batch;
    const int turn = group.of * U;
    for (int row = group.number + split * turn; I::once || row < group.heads; row += splits * turn) {
        Flight<I> now;
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * group.of;
            const bool there = I::even || r < group.heads;
            const bool first = there && place.first, second = there && place.second;
            load_row<I>(now.grad[u], grad, r, first, second);
            if constexpr (S::products) load_row<I>(now.x[u], x, r, first, second);
            if constexpr (I::rotate && I::add)
                load_row<I>(now.old[u], out, r, first && rotate, second && rotate);
            if constexpr (I::rotate && I::rests)
                load_rest<I>(now.rest[u], grad.row(r) + rest_from<I>(place, grad.step), place, a.rest,
                             there && rotate);
        }
        if (I::rotate && start) {
            load_table<I>(tables.cos, a.cos, place);
            load_table<I>(tables.sin, a.sin, place);
            start = false;
        }
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * group.of;
            if constexpr (S::products) add_products<I>(sums, now.grad[u], now.x[u]);
            if constexpr (I::rotate) {
                if (!rotate || !(I::even || r < group.heads)) continue;
                RowOf<I> made = {};
                rotate_back<I>(made, tables, now.grad[u], now.old[u]);
                if (place.first) store<I::hint, I::dense>(out.row(r), made[0], out.step);
                if (place.second) store<I::hint, I::dense>(out.second(r), made[1], out.step);
                if constexpr (I::rest) {
                    const char* from = grad.row(r) + rest_from<I>(place, grad.step);
                    char* to = out.row(r) + rest_from<I>(place, out.step);
                    if constexpr (I::rests) store_rest<I>(to, now.rest[u], place, a.rest);
                    else pass_through<I>(from, grad.step, to, out.step, a.rest, place.lane);
                }
            }
        }
        if constexpr (I::once) break;
    }
}

template <class I> DEVICE void rope_backward_of(const Arguments& a) {
    using S = Shape<I>;
    const unsigned self = threadIdx.x;
    const unsigned x = blockIdx.x / S::parts, lane = blockIdx.x % S::parts * I::lanes;
    const int batch = I::swapped ? x : blockIdx.z, token = (I::swapped ? blockIdx.z : x) * I::tokens;
    const Place place = place_at<I>(a, batch, token + self / I::lanes % I::tokens, lane + self % I::lanes);
    const Group group = group_of<I>(a, self / S::members);
    Tables<I> tables;
    Sums<I> sums = {};
    if (place.inside)
        for (int b = batch; b < batch + (I::walks ? a.walk : 1); ++b)
            rows_of_batch<I>(a, place, group, b, tables, sums);
    if constexpr (S::products) {
        extern __shared__ __align__(16) unsigned char shared_memory[];
        auto* shared = reinterpret_cast<typename I::Compute*>(shared_memory);
        Kept<I>::keep(shared, self, sums);
        __syncthreads();
        sum_groups<I>(a, shared, place_at<I>(a, batch, token, lane), self, S::members * S::groups);
    }
}
