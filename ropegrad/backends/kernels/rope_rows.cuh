// The problem as the kernels get it, and the arithmetic of one row.

struct Heads { char* at; long long batch, head, token, channel; };  // strides in bytes
struct Rows { char* at; long long batch, token, column; };

struct Arguments {
    Heads grad_q, grad_k, q, k, out_q, out_k;  // `at` is null where an output is not wanted
    Rows cos, sin, grad_cos, grad_sin;
    long long heads, kv_heads;        // 0 heads: that side is absent
    long long batch, seq;             // of what a block picks its token from
    long long walk;                   // with I::walks, the batches that share a table's row
    long long rest;                   // vectors of a row that pass through
};

// Elements of a thread are numbered through both its vectors, pairs 0 … vector-1. A half table has a column
// a pair, a full one a column an element.
template <class I> struct Shape {
    static constexpr int V = I::vector, lanes = (I::vectors + 1) / 2;
    static constexpr int element = sizeof(typename I::Storage), bytes = V * element;
    static constexpr int apart = lanes * V;  // elements from a thread's first vector to its second
    static constexpr int parts = lanes ? (lanes + I::lanes - 1) / I::lanes : 1;  // of a row, in blocks
    static constexpr bool all_first = lanes == parts * I::lanes;
    static constexpr bool all_second = all_first && 2 * lanes == I::vectors;
    static constexpr int groups = I::groups_q + I::groups_k, members = I::lanes * I::tokens;

    static constexpr bool one_run = I::half_table && !I::interleaved;  // table columns of both vectors
    static constexpr int runs = one_run ? 1 : 2;
    static constexpr int columns = I::half_table && I::interleaved ? V / 2 : V;  // in a run
    static constexpr int slots = runs * columns;
    static constexpr bool products = I::cos || I::sin;

    static DEVICE constexpr int first(int pair) { return I::interleaved ? 2 * pair : pair; }
    static DEVICE constexpr int second(int pair) { return I::interleaved ? 2 * pair + 1 : pair + V; }
    static DEVICE constexpr int column(int element, int pair) { return I::half_table ? pair : element; }
};

// A thread's place: its token, whether there is one, and which of its two vectors exist.
struct Place { int batch, token, lane; bool inside, first, second; };

template <class I> DEVICE Place place_at(const Arguments& a, int batch, int token, int lane) {
    using S = Shape<I>;
    const bool inside = I::tokens == 1 || token < a.seq;
    return {batch, token, lane, inside, inside && (S::all_first || lane < S::lanes),
            inside && (S::all_second || lane + S::lanes < I::vectors)};
}

// A stride times an index. Strides take 32 bits where they can: then this is one instruction.
template <class I> DEVICE long long bytes_of(long long stride, int index) {
    if constexpr (I::wide) return stride * index;
    else return wide_product(static_cast<int>(stride), index);
}

// ---- one row ---------------------------------------------------------------------------------------------

template <class I> using RowOf = Vector<typename I::Storage, I::vector>[2];

template <class I> DEVICE typename I::Compute element(const RowOf<I>& row, int i) {
    return Wide<typename I::Compute>::from(row[i / I::vector].get(i % I::vector));
}

template <class I> struct Sums {
    typename I::Compute cos[Shape<I>::slots], sin[Shape<I>::slots];
};

// A thread's part of a token's tables, as it is in memory: nothing waits for it before its first use.
template <class I> struct Tables {
    using S = Shape<I>;
    using Run = Vector<typename I::Table, S::columns>;
    Run cos[S::runs], sin[S::runs];

    static DEVICE typename I::Compute wide(const Run (&of)[S::runs], int column) {
        return Wide<typename I::Compute>::from(of[column / S::columns].get(column % S::columns));
    }
};

// dcos_j += g_j·x_j and dsin_j += σ_j·g_j·x_p(j)
template <class I> DEVICE void add_products(Sums<I>& sums, const RowOf<I>& g, const RowOf<I>& x) {
    using S = Shape<I>;
    #pragma unroll
    for (int pair = 0; pair < I::vector; ++pair) {
        const int f = S::first(pair), s = S::second(pair), cf = S::column(f, pair), cs = S::column(s, pair);
        const typename I::Compute g1 = element<I>(g, f), g2 = element<I>(g, s);
        const typename I::Compute x1 = element<I>(x, f), x2 = element<I>(x, s);
        if constexpr (I::cos) {
            sums.cos[cf] = times_plus(g1, x1, sums.cos[cf]);
            sums.cos[cs] = times_plus(g2, x2, sums.cos[cs]);
        }
        if constexpr (I::sin) {
            sums.sin[cf] = minus_times(g1, x2, sums.sin[cf]);
            sums.sin[cs] = times_plus(g2, x1, sums.sin[cs]);
        }
    }
}

// dx_j = g_j·c_j - σ_j·g_p(j)·s with the partner's sine, or by request (adjoint="paired") with j's own
template <class I> DEVICE void rotate_back(
    RowOf<I>& row, const Tables<I>& tables, const RowOf<I>& g, const RowOf<I>& old) {
    using S = Shape<I>;
    using T = typename I::Storage;
    constexpr int V = I::vector;
    #pragma unroll
    for (int pair = 0; pair < V; ++pair) {
        const int f = S::first(pair), s = S::second(pair), cf = S::column(f, pair), cs = S::column(s, pair);
        const typename I::Compute g1 = element<I>(g, f), g2 = element<I>(g, s);
        const typename I::Compute c1 = tables.wide(tables.cos, cf), c2 = tables.wide(tables.cos, cs);
        const typename I::Compute s1 = tables.wide(tables.sin, I::own_sine ? cf : cs);
        const typename I::Compute s2 = tables.wide(tables.sin, I::own_sine ? cs : cf);
        typename I::Compute d1 = times_plus(g1, c1, times(g2, s1));
        typename I::Compute d2 = minus_times(g1, s2, times(g2, c2));
        if constexpr (I::add) {
            d1 = plus(d1, element<I>(old, f));
            d2 = plus(d2, element<I>(old, s));
        }
        row[f / V].set(f % V, Narrow<T>::from(d1));
        row[s / V].set(s % V, Narrow<T>::from(d2));
    }
}
