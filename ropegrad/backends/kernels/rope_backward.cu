// RoPE backward in one pass: every input is read once and every output written once.
//
// A row is one head of one token. A thread owns two vectors of `vector` channels of its rows, a fixed distance
// apart (channels j and j + R/2 where the pairing is "half", so both members of a pair; whole pairs where it
// is "interleaved"). threadIdx.x and blockIdx.y count these lanes, threadIdx.y and blockIdx.x tokens,
// threadIdx.z the groups that share a token's rows: the first ones q's heads, the others k's, in turns.
//
// Table gradients are summed over a thread's rows in registers, then over groups, in their order, through
// shared memory. No atomics: the same launch gives the same bits. Where a table is shared by the batch and its
// gradient is wanted, a block walks over the batch. Without table gradients blockIdx.z splits the rows.
//
// What is compiled is said by a struct `Instance` behind this text (rope_instance.py): the dtypes Storage, Table
// and Compute, the vector, what is wanted. Strides and sizes are run-time values, 64 bits wide.
//
// Behind numbers.cuh, memory.cuh, rope_rows.cuh and rope_tables.cuh.

// ---- all rows of a thread --------------------------------------------------------------------------------

// One array as a thread sees it in one batch: its first channel in the token's first row.
template <class I> struct Stream {
    typename I::Storage* at;
    long long head, step;

    DEVICE Stream(const Heads& q, const Heads& k, bool of_k, int batch, int token, int channel)
        : head(of_k ? k.head : q.head), step(I::dense ? 1 : of_k ? k.channel : q.channel) {
        at = static_cast<typename I::Storage*>(of_k ? k.at : q.at) + (of_k ? k.batch : q.batch) * batch
            + (of_k ? k.token : q.token) * token + step * channel;
    }
    DEVICE typename I::Storage* row(int r) const { return at + head * r; }
};

// Channels past the rotary width: the same bits.
template <class I> DEVICE void pass_through(
    const typename I::Storage* from, long long from_step, typename I::Storage* to, long long to_step, int rest, int lane) {
    using T = typename I::Storage;
    constexpr int V = I::dense ? I::vector : 1;
    for (int v = lane; v < rest; v += gridDim.y * blockDim.x) {
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

// The rows of one batch, `rows` of them in flight.
template <class I> DEVICE void rows_of_batch(
    const Arguments& a, const Place& place, int batch, const Sums<I>& tables, Sums<I>& sums) {
    constexpr int U = I::rows, apart = I::lanes * I::vector;
    constexpr bool products = I::cos || I::sin;
    const bool of_k = threadIdx.z >= a.groups_q;
    const int rows = of_k ? a.kv_heads : a.heads, groups = of_k ? blockDim.z - a.groups_q : a.groups_q;
    const int start = place.lane * I::vector;
    const Stream<I> grad(a.grad_q, a.grad_k, of_k, batch, place.token, start);
    const Stream<I> x(a.q, a.k, of_k, batch, place.token, start);
    const Stream<I> out(a.out_q, a.out_k, of_k, batch, place.token, start);
    const bool rotate = I::rotate && (of_k ? a.out_k.at : a.out_q.at) != nullptr;
    int row = threadIdx.z - (of_k ? a.groups_q : 0) + blockIdx.z * groups * U;
    for (; row < rows; row += gridDim.z * groups * U) {
        RowOf<I> gs[U], xs[U], olds[U];
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * groups;
            const bool first = place.first && r < rows, second = place.second && r < rows;
            load_row<I>(gs[u], grad.row(r), apart * grad.step, grad.step, first, second);
            if constexpr (products) load_row<I>(xs[u], x.row(r), apart * x.step, x.step, first, second);
            if constexpr (I::rotate && I::add)
                load_row<I>(olds[u], out.row(r), apart * out.step, out.step, first && rotate, second && rotate);
        }
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * groups;
            if constexpr (products) add_products<I>(sums, gs[u], xs[u]);
            if constexpr (I::rotate) {
                if (!rotate || r >= rows) continue;
                RowOf<I> made = {};
                rotate_back<I>(made, tables, gs[u], olds[u]);
                if (place.first) store<I::hint, I::dense>(out.row(r), made[0], out.step);
                if (place.second) store<I::hint, I::dense>(out.row(r) + apart * out.step, made[1], out.step);
                if constexpr (I::rest) {
                    const int skipped = static_cast<int>(a.vectors) * I::vector - start;
                    pass_through<I>(grad.row(r) + skipped * grad.step, grad.step,
                                    out.row(r) + skipped * out.step, out.step, a.rest, place.lane);
                }
            }
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------

template <class I> DEVICE void rope_backward_of(const Arguments& a) {
    const Place place = place_of<I>(a, blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y,
                                 blockIdx.y * blockDim.x + threadIdx.x);
    Sums<I> tables, sums = {};
    if constexpr (I::rotate) {
        load_table<I>(tables.cos, a.cos, a, place);
        load_table<I>(tables.sin, a.sin, a, place);
        exchange_sines<I>(a, tables);
    }
    if (place.inside)
        for (int batch = place.batch; batch < place.batch + a.walk; ++batch)
            rows_of_batch<I>(a, place, batch, tables, sums);
    if constexpr (I::cos || I::sin) {
        extern __shared__ __align__(16) unsigned char shared_memory[];
        auto* shared = reinterpret_cast<typename I::Compute*>(shared_memory);
        const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
        const unsigned self = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        keep_sums<I>(shared, threads, self, sums);
        __syncthreads();
        sum_groups<I>(a, shared, {blockDim.x, blockDim.y, blockDim.z, threads,
                                  blockIdx.x * static_cast<long long>(blockDim.y),
                                  static_cast<int>(blockIdx.y * blockDim.x)}, self);
    }
}
