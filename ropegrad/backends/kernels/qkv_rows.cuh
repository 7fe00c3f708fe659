// Rows of a matrix on their way to 16 bits: read, scaled, rounded, written, and measured.
//
// A warp stays with 32 neighbouring units, a *group*, and takes some rows at a time, all in flight.
// Neighbouring warps have neighbouring groups of the same rows, then the next rows: a block's warps find D's
// tables in L1. Column maxima stay in registers and go to memory at the end, neighbours together; maxima of
// integers are the same in any order.

constexpr int CONVERTERS = 16;  // warps of a block of `convert`, one block a multiprocessor

struct Job {
    unsigned rows, units;      // 0 rows: nothing to do
    char* out;
    long long pitch;
    unsigned *row_maxima, *column_maxima;  // or tallies; null where not wanted
    long long second;          // bytes to the second term
    unsigned *largest, least;  // of both terms: where the maximum goes; bits of what carries a sum
    bool own_rows, own_columns;  // scales of their own, by their maxima
    int exponent;              // else this one
    unsigned groups, shares, more;  // shares: warps of a group; more: warps that have a turn more than others

    // Among so many warps, `in_flight` rows a turn.
    DEVICE void divide(unsigned warps, unsigned in_flight) {
        groups = (units + 31) / 32;
        const unsigned turns = (rows + in_flight - 1) / in_flight;
        shares = most(warps / most(groups, 1), 1);
        more = turns % shares * groups % warps;
    }
};

// 2^exponent in two factors, since exponents reach 169.
struct Scale {
    float once, twice;
    DEVICE explicit Scale(int exponent)
        : once(power_of_two(exponent >> 1)), twice(power_of_two(exponent - (exponent >> 1))) {}
    DEVICE float of(float x) const { return times(times(x, once), twice); }
};

// The maxima of a warp's columns, V words a lane; lanes trade so that neighbours write neighbours. Most are no
// news, and reading costs less than raising. TALLY: they are added instead.
template <bool TALLY, int V> DEVICE void add_columns(
    unsigned* maxima, unsigned column, const unsigned* found, unsigned (&shared)[32 * V]) {
    const unsigned lane = threadIdx.x % 32;
    #pragma unroll
    for (int i = 0; i < V; ++i) shared[lane * V + i] = found[i];
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < V; ++i) {
        const unsigned at = i * 32 + lane, largest = shared[at];
        const unsigned start = __shfl_sync(0xffffffffu, column, at / V);
        unsigned* to = maxima + start + at % V;
        if constexpr (TALLY) {
            if (largest) add(to, largest);
        } else if (largest > __ldcg(to)) raise(to, largest);
    }
    __syncwarp();
}

// One row of a group: rounded and written; its largest magnitude, and the columns' so far; or tallies.
template <class I, int V, bool MEASURE, class Source> DEVICE unsigned convert_row(
    const Job& job, const Source& source, const Row& row, const Loaded<I, V>& loaded,
    const typename Source::Tables& tables, const Scale& scale,
    char* out, unsigned apart, const int (&own)[2 * V], unsigned (&found)[2 * V], unsigned& top) {
    using Operand = typename I::Operand;
    unsigned largest = 0;
    float x[2 * V];
    source.values(loaded, tables, x);
    Vector<Operand, V> narrow[2] = {}, rest[2] = {};
    #pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
        float y;
        if constexpr (!SCALED<Operand>) y = x[i];
        else if constexpr (I::two) {
            const unsigned bits = finite_bits(x[i]), tally = bits ? NONZERO + (bits >= job.least) : 0;
            found[i] += tally;
            largest += tally;
            top = most(top, bits);
            y = scale.of(x[i]);
        } else if constexpr (MEASURE) {
            const unsigned bits = finite_bits(x[i]);
            found[i] = most(found[i], bits);
            largest = most(largest, bits);
            y = scale.of(x[i]);
        } else {
            const unsigned maximum = job.own_rows ? job.row_maxima[row.number] : 0;
            y = Scale(job.own_rows ? own_exponent<Operand>(maximum) : own[i]).of(x[i]);
        }
        const Operand first = Narrow<Operand>::from(y);
        narrow[i / V].set(i % V, first);
        if constexpr (I::two) {
            constexpr float further = 1 << FURTHER;
            const float second = times(minus_times(1.0f, to_float(first), y), further);
            rest[i / V].set(i % V, Narrow<Operand>::from(second));
        }
    }
    char* to = out + job.pitch * row.number;
    store<0, true>(to, narrow[0], sizeof(Operand));
    if (source.unit.both) store<0, true>(to + apart, narrow[1], sizeof(Operand));
    if constexpr (I::two) {
        store<0, true>(to + job.second, rest[0], sizeof(Operand));
        if (source.unit.both) store<0, true>(to + job.second + apart, rest[1], sizeof(Operand));
    }
    return largest;
}

// A group's rows from `first` on, `step` apart from turn to turn.
template <class I, int V, bool MEASURE, class Source> DEVICE void convert_group(
    const Arguments& a, const Job& job, unsigned group, unsigned first, unsigned step,
    unsigned (&shared)[32 * V]) {
    using Operand = typename I::Operand;
    constexpr int ROWS = Source::in_flight;
    const unsigned lane = threadIdx.x % 32, number = group * 32 + lane;
    const bool inside = number < job.units;
    const Source source(a, inside ? number : 0);
    const Unit unit = source.unit;
    const bool both = inside && unit.both;
    char* out = job.out + sizeof(Operand) * unit.first;
    const unsigned apart = sizeof(Operand) * (unit.second - unit.first);
    unsigned found[2 * V] = {};
    int own[2 * V];
    if constexpr (!MEASURE && SCALED<Operand>) {
        #pragma unroll
        for (int i = 0; i < 2 * V; ++i) {
            const bool there = job.own_columns && (i < V ? inside : both);
            const unsigned column = i < V ? unit.first + i : unit.second + i - V;
            own[i] = there ? own_exponent<Operand>(job.column_maxima[column]) : job.exponent;
        }
    }
    const Scale scale(job.exponent);
    unsigned top = 0;
    for (unsigned start = first; start < job.rows; start += step) {
        Loaded<I, V> loaded[ROWS];
        Row ahead(a, start), row = ahead;
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (start + r < job.rows && inside) source.read(ahead, loaded[r]);
            ahead.step(a);
        }
        typename Source::Tables tables[ROWS] = {};
        ahead = row;
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (start + r < job.rows && inside) source.read_tables(ahead, tables[r]);
            ahead.step(a);
        }
        unsigned mine = 0;
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (start + r >= job.rows) break;
            unsigned largest = 0;
            if (inside)
                largest = convert_row<I, V, MEASURE>(
                    job, source, row, loaded[r], tables[r], scale, out, apart, own, found, top);
            if constexpr (MEASURE) {
                largest = I::two ? sum_of_warp(largest) : most_of_warp(largest);
                if (lane == r) mine = largest;
            }
            row.step(a);
        }
        if constexpr (MEASURE && I::two) {
            if (mine && job.row_maxima) add(job.row_maxima + start + lane, mine);
        } else if (MEASURE && mine) raise(job.row_maxima + start + lane, mine);
    }
    if constexpr (MEASURE) {
        add_columns<I::two, V>(job.column_maxima, unit.first, found, shared);
        add_columns<I::two, V>(job.column_maxima, both ? unit.second : unit.first, found + V, shared);
    }
    if constexpr (I::two) {
        top = most_of_warp(top);
        if (lane == 0 && top) raise(job.largest, top);
    }
}

// One matrix by all warps, of which this is number `self`.
template <class I, int V, bool MEASURE, class Source> DEVICE void convert_matrix(
    const Arguments& a, const Job& job, unsigned self, unsigned warps, unsigned (&shared)[32 * V]) {
    constexpr unsigned ROWS = Source::in_flight;
    for (unsigned i = self; i < job.groups * job.shares; i += warps) {
        const unsigned share = i / job.groups, group = i - share * job.groups;
        if (share * ROWS < job.rows)
            convert_group<I, V, MEASURE, Source>(a, job, group, share * ROWS, job.shares * ROWS, shared);
    }
}

// D, X, W in turn; who had less of one starts with the next. (Jobs are in shared memory to spare registers.)
template <class I, bool MEASURE> DEVICE void convert_all(const Arguments& a, const Job (&jobs)[3]) {
    constexpr int V = I::vector, U = I::matrix_vector, WARPS = MEASURE ? CONVERTERS : 1;
    __shared__ unsigned of_d[WARPS][32 * V], of_matrix[WARPS][32 * U];
    const unsigned each = blockDim.x / 32, warps = gridDim.x * each, warp = threadIdx.x / 32;
    const unsigned at = MEASURE ? warp : 0;
    unsigned self = blockIdx.x * each + warp;
    convert_matrix<I, V, MEASURE, Gradients<I, V>>(a, jobs[D], self, warps, of_d[at]);
    self = self < jobs[D].more ? self + warps - jobs[D].more : self - jobs[D].more;
    convert_matrix<I, U, MEASURE, Hidden<I, U>>(a, jobs[X], self, warps, of_matrix[at]);
    self = self < jobs[X].more ? self + warps - jobs[X].more : self - jobs[X].more;
    convert_matrix<I, U, MEASURE, Weights<I, U>>(a, jobs[W], self, warps, of_matrix[at]);
}
