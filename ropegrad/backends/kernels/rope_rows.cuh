// The problem as the kernels get it, and the arithmetic of one row.

struct Heads { void* at; long long batch, head, token, channel; };  // strides in elements
struct Rows { void* at; long long batch, token, column; };

struct Arguments {
    Heads grad_q, grad_k, q, k, out_q, out_k;  // `at` is null where an output is not wanted
    Rows cos, sin, grad_cos, grad_sin;
    long long heads, kv_heads, seq;   // 0 heads: that side is absent
    long long groups_q, groups_k;     // the first groups of a block share q's heads, the others k's
    long long tokens, walk;           // tokens of all blocks; batches that each of them walks over
    long long vectors, rest;          // of a row: rotated vectors, vectors that pass through
    long long own_sine;               // adjoint="paired"
};

// Elements of a thread are numbered through both its vectors, pairs 0 … vector-1. A half table has a column a
// pair, a full one a column an element.
template <class I> struct Shape {
    static constexpr int V = I::vector;
    static constexpr bool one_run = I::half_table && !I::interleaved;  // table columns of both vectors
    static constexpr int runs = one_run ? 1 : 2;
    static constexpr int columns = I::half_table && I::interleaved ? V / 2 : V;  // in a run
    static constexpr int slots = runs * columns;
    static DEVICE constexpr int first(int pair) { return I::interleaved ? 2 * pair : pair; }
    static DEVICE constexpr int second(int pair) { return I::interleaved ? 2 * pair + 1 : pair + V; }
    static DEVICE constexpr int column(int element, int pair) { return I::half_table ? pair : element; }
};

// A thread's place: its token, whether there is one, and which of its two vectors exist.
struct Place { int batch, token, lane; bool inside, first, second; };

template <class I> DEVICE Place place_of(const Arguments& a, long long number, int lane) {
    const bool inside = number < a.tokens;
    if (!inside) number = 0;
    const bool small = number <= 0xffffffff;
    const long long batch = small ? static_cast<unsigned>(number) / static_cast<unsigned>(a.seq) : number / a.seq;
    return {static_cast<int>(batch), static_cast<int>(number - batch * a.seq), lane, inside,
            inside && lane < I::lanes, inside && lane < I::lanes && lane + I::lanes < a.vectors};
}

// ---- one row ---------------------------------------------------------------------------------------------

template <class I> using RowOf = Vector<typename I::Storage, I::vector>[2];

template <class I> DEVICE typename I::Compute element(const RowOf<I>& row, int i) {
    return Wide<typename I::Compute>::from(row[i / I::vector].get(i % I::vector));
}

template <class I> DEVICE void load_row(
    RowOf<I>& row, const typename I::Storage* at, long long apart, long long channel, bool first, bool second) {
    if (first) load<I::hint, I::dense>(row[0], at, channel);
    else row[0] = {};
    if (second) load<I::hint, I::dense>(row[1], at + apart, channel);
    else row[1] = {};
}

template <class I> struct Sums {
    typename I::Compute cos[Shape<I>::slots], sin[Shape<I>::slots];
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

// dx_j = g_j·c_j - σ_j·g_p(j)·s; `tables.sin` already holds the sine that belongs into element j's gradient
template <class I> DEVICE void rotate_back(RowOf<I>& row, const Sums<I>& tables, const RowOf<I>& g, const RowOf<I>& old) {
    using S = Shape<I>;
    using T = typename I::Storage;
    constexpr int V = I::vector;
    #pragma unroll
    for (int pair = 0; pair < V; ++pair) {
        const int f = S::first(pair), s = S::second(pair), cf = S::column(f, pair), cs = S::column(s, pair);
        const typename I::Compute g1 = element<I>(g, f), g2 = element<I>(g, s);
        typename I::Compute d1 = times_plus(g1, tables.cos[cf], times(g2, tables.sin[cf]));
        typename I::Compute d2 = minus_times(g1, tables.sin[cs], times(g2, tables.cos[cs]));
        if constexpr (I::add) {
            d1 = plus(d1, element<I>(old, f));
            d2 = plus(d2, element<I>(old, s));
        }
        row[f / V].set(f % V, Narrow<T>::from(d1));
        row[s / V].set(s % V, Narrow<T>::from(d2));
    }
}
