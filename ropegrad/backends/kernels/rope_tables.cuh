// The tables: rows of cos and sin into registers, their gradients out of the sums of a block's threads.

template <class I> DEVICE void load_table(typename I::Compute (&to)[Shape<I>::slots], const Rows& from, const Arguments& a, const Place& place) {
    using S = Shape<I>;
    using T = typename I::Table;
    const long long stride = I::dense_table ? 1 : from.column;
    const T* row = static_cast<const T*>(from.at) + place.batch * from.batch + place.token * from.token;
    #pragma unroll
    for (int run = 0; run < S::runs; ++run) {
        Vector<T, S::columns> vector = {};
        if (run ? place.second : place.first)
            load<0, I::dense_table>(vector, row + (place.lane + run * I::lanes) * S::columns * stride, stride);
        #pragma unroll
        for (int i = 0; i < S::columns; ++i)
            to[run * S::columns + i] = Wide<typename I::Compute>::from(vector.get(i));
    }
}

// An element's gradient takes its partner's sine, unless asked for its own.
template <class I> DEVICE void exchange_sines(const Arguments& a, Sums<I>& tables) {
    using S = Shape<I>;
    if constexpr (!I::half_table) {
        #pragma unroll
        for (int pair = 0; pair < I::vector; ++pair) {
            const typename I::Compute s1 = tables.sin[S::first(pair)], s2 = tables.sin[S::second(pair)];
            tables.sin[S::first(pair)] = a.own_sine ? s1 : s2;
            tables.sin[S::second(pair)] = a.own_sine ? s2 : s1;
        }
    }
}

// Partial sums lie slot by slot, the block's threads side by side; padded, so that the threads of a warp that
// read neighbouring columns meet different banks.
template <class I> DEVICE unsigned slot_stride(unsigned threads) {
    return (threads + 31) / 32 * 32 + 128 / (sizeof(typename I::Compute) * Shape<I>::columns);
}

template <class I> DEVICE void write_column(
    void* to, long long batch, long long token, long long column_stride, const Place& place, long long column,
    typename I::Compute sum) {
    using T = typename I::Table;
    T* at = static_cast<T*>(to) + place.batch * batch + place.token * token + column * column_stride;
    if constexpr (I::add) sum = plus(sum, Wide<typename I::Compute>::from(*at));
    *at = Narrow<T>::from(sum);
}

template <class I> DEVICE void keep_sums(
    typename I::Compute* shared, unsigned threads, unsigned self, const Sums<I>& sums) {
    using S = Shape<I>;
    const unsigned stride = slot_stride<I>(threads);
    #pragma unroll
    for (int slot = 0; slot < S::slots; ++slot) {
        if constexpr (I::cos) shared[slot * stride + self] = sums.cos[slot];
        if constexpr (I::sin) shared[(slot + (I::cos ? S::slots : 0)) * stride + self] = sums.sin[slot];
    }
}

// Who shares the kept sums: lanes x tokens x groups threads; the first token and lane; how many do the work.
struct Team { unsigned lanes, tokens, groups, workers; long long number; int lane; };

// Kept sums over the groups, in their order, into the tables' gradients.
template <class I> DEVICE void sum_groups(
    const Arguments& a, const typename I::Compute* shared, const Team& team, unsigned self) {
    using S = Shape<I>;
    using C = typename I::Compute;
    const unsigned members = team.lanes * team.tokens, stride = slot_stride<I>(members * team.groups);
    const unsigned run_columns = team.lanes * S::columns, row_columns = S::runs * run_columns;
    const unsigned all = row_columns * team.tokens * (I::cos + I::sin);
    for (unsigned at = self; at < all; at += team.workers) {
        const unsigned row = at / row_columns, run = at % row_columns / run_columns;
        const unsigned lane = at % run_columns / S::columns, i = at % S::columns;
        const bool is_sin = !I::cos || row >= team.tokens;
        const unsigned y = row - (I::cos && is_sin ? team.tokens : 0);
        const unsigned slot = run * S::columns + i + (I::cos && is_sin ? S::slots : 0);
        const C* terms = shared + slot * stride + lane + team.lanes * y;
        C sum = terms[0];
        for (unsigned group = 1; group < team.groups; ++group) sum = plus(sum, terms[group * members]);
        const Place place = place_of<I>(a, team.number + y, team.lane + lane);
        if (run ? place.second : place.first) {
            const long long column = (place.lane + run * I::lanes) * S::columns + i;
            write_column<I>(is_sin ? a.grad_sin.at : a.grad_cos.at, is_sin ? a.grad_sin.batch : a.grad_cos.batch,
                            is_sin ? a.grad_sin.token : a.grad_cos.token,
                            is_sin ? a.grad_sin.column : a.grad_cos.column, place, column, sum);
        }
    }
}
