// The memory pass of the QKV projections' gradients: D, X and W as 16-bit matrices, scaled by powers of two.
//
// Kernels, in the order of their launches: guess (scales from a sample; maxima to zero), convert (every input
// read once, every copy written once, maxima of rows and columns measured), judge (are the scales right?),
// convert again and at once back if they are; cuBLAS's products follow, and finish (scales of single rows and
// columns undone, results added, rounded, spread by strides; back at once if there is nothing of this to do).
// Maxima of integers are the same in any order: the same launch gives the same bits.
//
// Behind numbers.cuh, memory.cuh, qkv_inputs.cuh and qkv_scales.cuh.

constexpr int WARPS = 8, TILE_ROWS = 64;
constexpr long long FIRST = 0, BEFORE_HIDDEN = 1, BEFORE_WEIGHTS = 2;  // turns of `convert`

// One matrix in tiles of TILE_ROWS rows and 32 vectors of columns.
struct Job {
    long long rows, columns;
    char* out;
    long long pitch;
    unsigned *row_maxima, *column_maxima;
    bool own_rows, own_columns;
    int exponent;
};

template <class I, int V, bool MEASURE, class Source> DEVICE void convert_tile(
    const Arguments& a, const Job& job, unsigned tile, unsigned (&shared)[WARPS][32 * V]) {
    using Operand = typename I::Operand;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned across = (job.columns + 32 * V - 1) / (32 * V);
    const unsigned first = tile / across * TILE_ROWS, column = (tile % across * 32 + lane) * V;
    const bool inside = column < job.columns;
    const Source source(a, inside ? column : 0);
    unsigned found[V] = {};
    int own[V];
    #pragma unroll
    for (int i = 0; i < V; ++i)
        own[i] = inside && job.own_columns ? own_exponent<Operand>(job.column_maxima[column + i])
                                           : job.exponent;
    #pragma unroll 2
    for (int r = warp; r < TILE_ROWS; r += WARPS) {
        const unsigned row = first + r;
        if (row >= job.rows) break;
        unsigned largest = 0;
        if (inside) {
            float x[V];
            source.read(row, x);
            Vector<Operand, V> narrow = {};
            #pragma unroll
            for (int i = 0; i < V; ++i) {
                const int exponent = job.own_rows ? own_exponent<Operand>(job.row_maxima[row]) : own[i];
                narrow.set(i, Narrow<Operand>::from(scaled(x[i], exponent)));
                if constexpr (MEASURE) {
                    found[i] = most(found[i], finite_bits(x[i]));
                    largest = most(largest, finite_bits(x[i]));
                }
            }
            store<0, true>(job.out + job.pitch * row + sizeof(Operand) * column, narrow, sizeof(Operand));
        }
        if constexpr (MEASURE) {
            largest = most_of_warp(largest);
            if (lane == 0 && largest) atomicMax(job.row_maxima + row, largest);
        }
    }
    if constexpr (MEASURE) {
        #pragma unroll
        for (int i = 0; i < V; ++i) shared[warp][lane * V + i] = found[i];
        __syncthreads();
        for (int i = threadIdx.x; i < 32 * V; i += 32 * WARPS) {
            unsigned largest = 0;
            #pragma unroll
            for (int w = 0; w < WARPS; ++w) largest = most(largest, shared[w][i]);
            const unsigned at = tile % across * 32 * V + i;
            if (at < job.columns && largest) atomicMax(job.column_maxima + at, largest);
        }
        __syncthreads();
    }
}

DEVICE unsigned tiles_of(const Job& job, int vector) {
    const unsigned across = (static_cast<unsigned>(job.columns) + 32 * vector - 1) / (32 * vector);
    return static_cast<unsigned>((job.rows + TILE_ROWS - 1) / TILE_ROWS) * across;
}

template <class I, bool MEASURE> DEVICE void convert_all(
    const Arguments& a, const Job& d, const Job& x, const Job& w) {
    constexpr int V = I::vector, U = I::matrix_vector;
    __shared__ unsigned of_d[WARPS][32 * V], of_matrix[WARPS][32 * U];
    const unsigned tiles_d = tiles_of(d, V), tiles_dx = tiles_d + tiles_of(x, U);
    const unsigned tiles = tiles_dx + tiles_of(w, U);
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (tile < tiles_d) convert_tile<I, V, MEASURE, Gradients<I, V>>(a, d, tile, of_d);
        else if (tile < tiles_dx) convert_tile<I, U, MEASURE, Hidden<I, U>>(a, x, tile - tiles_d, of_matrix);
        else convert_tile<I, U, MEASURE, Weights<I, U>>(a, w, tile - tiles_dx, of_matrix);
    }
}

template <class I> DEVICE void qkv_convert_of(const Arguments& a, long long turn) {
    const State& s = *a.state;
    const bool first = turn == FIRST, last = turn == BEFORE_WEIGHTS;
    const long long x_rows = a.wanted[WEIGHTS] ? a.tokens : 0, w_rows = a.wanted[HIDDEN] ? a.width : 0;
    const long long columns = a.hidden_size;
    Job d = {a.tokens, a.width, a.copy[D], a.pitch[D], a.d_rows, a.d_columns, false, false, s.exponent[D]};
    Job x = {x_rows, columns, a.copy[X], a.pitch[X], a.x_rows, a.x_columns, false, false, s.exponent[X]};
    Job w = {w_rows, columns, a.copy[W], a.pitch[W], a.w_rows, a.w_columns, false, false, s.exponent[W]};
    if (first) {
        convert_all<I, true>(a, d, x, w);
        return;
    }
    if (last ? !s.again_d : !s.again[D]) d.rows = 0;
    if (last || !s.again[X]) x.rows = 0;
    if (last || !s.again[W]) w.rows = 0;
    d.own_rows = !last && s.own[HIDDEN];
    d.own_columns = last && s.own[WEIGHTS];
    x.own_columns = s.own_columns[X];
    w.own_columns = s.own_columns[W];
    convert_all<I, false>(a, d, x, w);
}

// ---- behind the products ----------------------------------------------------------------------------------

struct Finish {
    const float* product;              // dense
    Rows to;                           // a row is (outer, inner)
    long long rows, columns, inner;
    long long which, first_row;        // HIDDEN or WEIGHTS; the latter's rows start at this column of D
    long long in_place;                // the product stands where the result belongs
};

template <class I> DEVICE void put(const Finish& f, unsigned row, unsigned column, double sum) {
    using T = typename I::Storage;
    const unsigned inner = static_cast<unsigned>(f.inner);
    T* to = reinterpret_cast<T*>(
        f.to.at + f.to.outer * (row / inner) + f.to.inner * (row % inner) + f.to.step * column);
    if constexpr (I::add) sum = plus(sum, Wide<double>::from(*to));
    *to = Narrow<T>::from(sum);
}

constexpr int SIDE = 32, DEPTH = 16;  // of a tile of a product that is computed anew: 2 x 2 elements a thread

// One element of D·W or Dᵀ·X's operands.
template <class I> DEVICE float left_of(const Arguments& a, const Finish& f, unsigned row, unsigned k) {
    const bool hidden = f.which == HIDDEN;
    float x[1];
    Gradients<I, 1>(a, hidden ? k : static_cast<unsigned>(f.first_row) + row).read(hidden ? row : k, x);
    return x[0];
}
template <class I> DEVICE float right_of(const Arguments& a, const Finish& f, unsigned k, unsigned column) {
    float x[1];
    if (f.which == HIDDEN) Weights<I, 1>(a, column).read(k, x);
    else Hidden<I, 1>(a, column).read(k, x);
    return x[0];
}

// The whole product in float32, straight from the inputs: for ranges that no scale serves.
template <class I> DEVICE void compute_anew(const Arguments& a, const Finish& f) {
    __shared__ float left[DEPTH][SIDE + 1], right[DEPTH][SIDE + 1];
    const unsigned rows = f.rows, columns = f.columns, depth = f.which == HIDDEN ? a.width : a.tokens;
    const unsigned across = (columns + SIDE - 1) / SIDE, tiles = (rows + SIDE - 1) / SIDE * across;
    const unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    const bool hidden = f.which == HIDDEN;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const unsigned first_row = tile / across * SIDE, first_column = tile % across * SIDE;
        float sum[2][2] = {};
        for (unsigned start = 0; start < depth; start += DEPTH) {
            for (unsigned i = threadIdx.x; i < DEPTH * SIDE; i += blockDim.x) {
                // Neighbouring threads take neighbours in memory.
                const unsigned row = hidden ? i / DEPTH : i % SIDE, k = hidden ? i % DEPTH : i / SIDE;
                const bool there = first_row + row < rows && start + k < depth;
                left[k][row] = there ? left_of<I>(a, f, first_row + row, start + k) : 0.0f;
                const unsigned column = i % SIDE, l = i / SIDE;
                const bool other = first_column + column < columns && start + l < depth;
                right[l][column] = other ? right_of<I>(a, f, start + l, first_column + column) : 0.0f;
            }
            __syncthreads();
            #pragma unroll
            for (int k = 0; k < DEPTH; ++k)
                #pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& at = sum[i / 2][i % 2];
                    at = times_plus(left[k][y + 16 * (i / 2)], right[k][x + 16 * (i % 2)], at);
                }
            __syncthreads();
        }
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned row = first_row + y + 16 * (i / 2), column = first_column + x + 16 * (i % 2);
            if (row < rows && column < columns) put<I>(f, row, column, to_double(sum[i / 2][i % 2]));
        }
    }
}

template <class I> DEVICE void finish_all(const Arguments& a, const Finish& f) {
    using Operand = typename I::Operand;
    const State& s = *a.state;
    if (s.recompute[f.which]) {
        compute_anew<I>(a, f);
        return;
    }
    const int which = static_cast<int>(f.which), right = which == HIDDEN ? W : X;
    const bool unscale = s.unscale[which] != 0;
    if (f.in_place && !unscale) return;
    const unsigned* rows = which == HIDDEN ? a.d_rows : a.d_columns + f.first_row;
    const unsigned* columns = which == HIDDEN ? a.w_columns : a.x_columns;
    for (unsigned row = blockIdx.x; row < f.rows; row += gridDim.x) {
        const int left = s.own[which] ? own_exponent<Operand>(rows[row]) : s.exponent[D];
        for (unsigned column = threadIdx.x; column < f.columns; column += blockDim.x) {
            double sum = to_double(f.product[row * f.columns + column]);
            if (unscale) {
                const int own = own_exponent<Operand>(columns[column]);
                const int other = s.own_columns[right] ? own : s.exponent[right];
                sum = times(sum, power_of_two_wide(-left - other));
            }
            put<I>(f, row, column, sum);
        }
    }
}

// ---- biases -----------------------------------------------------------------------------------------------

struct Biases { char* to[3]; long long step[3]; };  // null where not wanted

constexpr int SUMMERS = 32;  // threads that share a column of D: their sums are added in their order

template <class I> DEVICE void bias_all(const Arguments& a, const Biases& b) {
    using T = typename I::Storage;
    __shared__ float shared[SUMMERS][33];
    const int lane = threadIdx.x % 32, self = threadIdx.x / 32;
    const unsigned column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < a.width) {
        const Gradients<I, 1> source(a, column);
        for (unsigned token = self; token < a.tokens; token += SUMMERS) {
            float x[1];
            source.read(token, x);
            sum = plus(sum, x[0]);
        }
    }
    shared[self][lane] = sum;
    __syncthreads();
    if (self || column >= a.width) return;
    for (int i = 1; i < SUMMERS; ++i) sum = plus(sum, shared[i][lane]);
    const Place place = place_of(a, column);
    char* at = of_part(b.to, place.part);
    if (at == nullptr) return;
    T* to = reinterpret_cast<T*>(at + of_part(b.step, place.part) * place.at);
    if constexpr (I::add) sum = plus(sum, to_float(*to));
    *to = Narrow<T>::from(sum);
}
