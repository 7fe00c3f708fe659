// The tables: rows of cos and sin into registers, their gradients out of the sums of a block's threads.

template <class I> DEVICE void load_table(
    Vector<typename I::Table, Shape<I>::columns> (&to)[Shape<I>::runs], const Rows& from, const Place& place) {
    using S = Shape<I>;
    using T = typename I::Table;
    const long long step = I::dense_table ? static_cast<long long>(sizeof(T)) : from.column;
    const char* row = from.at + from.batch * place.batch + bytes_of<I>(from.token, place.token)
        + step * (place.lane * S::columns);
    #pragma unroll
    for (int run = 0; run < S::runs; ++run) {
        if (run ? place.second : place.first)
            load<0, I::dense_table>(to[run], row + step * (run * S::lanes * S::columns), step);
        else to[run] = {};
    }
}

// Partial sums lie slot by slot, the block's threads side by side; padded, so that the threads of a warp that
// read neighbouring columns meet different banks.
template <class I> struct Kept {
    using S = Shape<I>;
    using C = typename I::Compute;
    static constexpr int threads = S::members * S::groups;
    static constexpr int stride = (threads + 31) / 32 * 32 + 128 / (static_cast<int>(sizeof(C)) * S::columns);
    static constexpr int size = (I::cos + I::sin) * S::slots * stride;

    static DEVICE void keep(C* shared, int self, const Sums<I>& sums) {
        #pragma unroll
        for (int slot = 0; slot < S::slots; ++slot) {
            if constexpr (I::cos) shared[slot * stride + self] = sums.cos[slot];
            if constexpr (I::sin) shared[(slot + (I::cos ? S::slots : 0)) * stride + self] = sums.sin[slot];
        }
    }
};

template <class I> DEVICE void write_column(
    char* to, long long batch, long long token, long long step, const Place& place, int column,
    typename I::Compute sum) {
    using T = typename I::Table;
    T* at = reinterpret_cast<T*>(to + batch * place.batch + bytes_of<I>(token, place.token) + step * column);
    if constexpr (I::add) sum = plus(sum, Wide<typename I::Compute>::from(*at));
    *at = Narrow<T>::from(sum);
}

// Kept sums over the groups, in their order, into the tables' gradients; `self` of `workers` threads. The
// block's first token and lane stand in `place`.
template <class I> DEVICE void sum_groups(
    const Arguments& a, const typename I::Compute* shared, const Place& place, int self, int workers) {
    using S = Shape<I>;
    using C = typename I::Compute;
    constexpr int run_columns = I::lanes * S::columns, row_columns = S::runs * run_columns;
    #pragma unroll 1
    for (unsigned at = self; at < row_columns * I::tokens * (I::cos + I::sin); at += workers) {
        const unsigned row = at / row_columns, run = at % row_columns / run_columns;
        const unsigned lane = at % run_columns / S::columns, i = at % S::columns;
        const bool is_sin = !I::cos || row >= I::tokens;
        const unsigned y = row % I::tokens;
        const unsigned slot = run * S::columns + i + (I::cos && is_sin ? S::slots : 0);
        const C* terms = shared + slot * Kept<I>::stride + lane + I::lanes * y;
        C sum = terms[0];
        #pragma unroll
        for (int group = 1; group < S::groups; ++group) sum = plus(sum, terms[group * S::members]);
        const Place mine = place_at<I>(a, place.batch, place.token + y, place.lane + lane);
        if (run ? mine.second : mine.first)
            write_column<I>(is_sin ? a.grad_sin.at : a.grad_cos.at,
                            is_sin ? a.grad_sin.batch : a.grad_cos.batch,
                            is_sin ? a.grad_sin.token : a.grad_cos.token,
                            is_sin ? a.grad_sin.column : a.grad_cos.column, mine,
                            (mine.lane + run * S::lanes) * S::columns + i, sum);
    }
}
