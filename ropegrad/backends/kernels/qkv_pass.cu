// The memory pass of the QKV projections' gradients: D, X and W as 16-bit matrices, scaled by powers of two,
// or as float32.
//
// Launches: convert (scales guessed from a sample; every input read once, every copy written once, maxima of
// rows and columns measured; the last block judges whether the scales are right), mend (convert again; back
// at once if all is well), the product D·W, mend (what scales of single rows and columns left to do; convert
// D again), the product Dᵀ·X, mend. Where results must be added, rounded or spread by strides, mend does that.
// Float32 operands have no scales: convert just copies, and mend is launched for that alone.
//
// Behind numbers.cuh, memory.cuh, qkv_inputs.cuh, qkv_scales.cuh and qkv_rows.cuh.

constexpr long long BEFORE_HIDDEN = 0, BEFORE_WEIGHTS = 1;  // turns of `mend`: what is converted again

template <class I> DEVICE void fill_job(Job& job, const Arguments& a, int matrix, unsigned warps) {
    constexpr int V = I::vector, U = I::matrix_vector;
    const unsigned head_dim = static_cast<unsigned>(a.head_dim), width = static_cast<unsigned>(a.width);
    const unsigned rotary = static_cast<unsigned>(a.rotary), tokens = static_cast<unsigned>(a.tokens);
    const unsigned head = units_of<V>(rotary) + units_of<V>(head_dim - rotary);
    const unsigned across = units_of<U>(static_cast<unsigned>(a.hidden_size));
    job.units = matrix != D ? across : width ? width / head_dim * head : 0;
    job.rows = matrix == D ? tokens : matrix == X ? (a.wanted[WEIGHTS] ? tokens : 0)
                                                  : (a.wanted[HIDDEN] ? width : 0);
    job.out = of_part(a.copy, matrix);
    job.pitch = of_part(a.pitch, matrix);
    job.row_maxima = matrix == D ? a.d_rows : matrix == X ? a.x_rows : a.w_rows;
    job.column_maxima = matrix == D ? a.d_columns : matrix == X ? a.x_columns : a.w_columns;
    job.own_rows = job.own_columns = false;
    if (!job.out) job.rows = 0;  // the products read it where it is
    job.divide(warps, matrix == D ? Gradients<I, V>::in_flight : Hidden<I, U>::in_flight);
}

// float32 operands are the values themselves.
template <class I> DEVICE void copy(const Arguments& a) {
    __shared__ Job jobs[3];
    const unsigned self = threadIdx.x;
    if (self < 3) fill_job<I>(jobs[self], a, self, gridDim.x * blockDim.x / 32);
    if (blockIdx.x == 0 && self == 0) {
        State s = {};
        s.alpha[HIDDEN] = s.alpha[WEIGHTS] = s.one = 1.0f;
        *a.state = s;
    }
    __syncthreads();
    convert_all<I, false>(a, jobs);
}

template <class I> DEVICE void convert(const Arguments& a) {
    __shared__ Job jobs[3];
    __shared__ unsigned samples[3][SAMPLERS / 32];
    __shared__ bool last;
    const unsigned self = threadIdx.x, warps = gridDim.x * blockDim.x / 32;
    if (self < SAMPLERS) sample<I>(a, samples);
    else if (self < SAMPLERS + 3) fill_job<I>(jobs[self - SAMPLERS], a, self - SAMPLERS, warps);
    __syncthreads();
    if (self < 3) jobs[self].exponent = guess<typename I::Operand>(samples[self]);
    __syncthreads();
    convert_all<I, true>(a, jobs);
    __syncthreads();
    if (self == 0) {  // for the whole block, which the barrier has put before it
        __threadfence();
        last = atomicAdd(a.done, 1u) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    judge<I>(a, jobs[D].exponent, jobs[X].exponent, jobs[W].exponent);
}

template <class I> DEVICE void qkv_convert_of(const Arguments& a) {
    if constexpr (SCALED<typename I::Operand>) convert<I>(a);
    else copy<I>(a);
}

template <class I> DEVICE void convert_again(const Arguments& a, long long turn) {
    __shared__ Job jobs[3];
    const State& s = *a.state;
    const bool weights = turn == BEFORE_WEIGHTS;
    if (threadIdx.x < 3) {
        const int matrix = threadIdx.x;
        Job& job = jobs[matrix];
        fill_job<I>(job, a, matrix, gridDim.x * blockDim.x / 32);
        job.exponent = s.exponent[matrix];
        if (matrix != D) job.own_columns = s.own_columns[matrix];
        else if (weights) job.own_columns = s.own[WEIGHTS];
        else job.own_rows = s.own[HIDDEN];
        if (weights ? matrix != D || !s.again_d : !s.again[matrix]) job.rows = 0;
    }
    __syncthreads();
    convert_all<I, false>(a, jobs);
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
    const GradientColumn<I> column(a, hidden ? k : static_cast<unsigned>(f.first_row) + row);
    return column.at(Row(a, hidden ? row : k));
}
template <class I> DEVICE float right_of(const Arguments& a, const Finish& f, unsigned k, unsigned column) {
    return f.which == HIDDEN ? weight_at<I>(a, k, column) : hidden_at<I>(a, Row(a, k), column);
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

constexpr int BATCH = 6;  // elements of a row that a thread has in flight

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
        for (unsigned start = threadIdx.x; start < f.columns; start += BATCH * blockDim.x) {
            float sums[BATCH];
            unsigned maxima[BATCH] = {};
            #pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const unsigned column = start + i * blockDim.x;
                if (column >= f.columns) continue;
                sums[i] = f.product[row * f.columns + column];
                if (unscale) maxima[i] = columns[column];
            }
            #pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const unsigned column = start + i * blockDim.x;
                if (column >= f.columns) continue;
                double sum = to_double(sums[i]);
                if (unscale) {
                    const int own = own_exponent<Operand>(maxima[i]);
                    const int other = s.own_columns[right] ? own : s.exponent[right];
                    sum = times(sum, power_of_two_wide(-left - other));
                }
                put<I>(f, row, column, sum);
            }
        }
    }
}

template <class I> DEVICE void mend(const Arguments& a, const Finish& f, long long turn) {
    const bool finish = f.rows && !f.in_place;
    if (!finish && !a.state->mend[turn]) return;
    if (f.rows) finish_all<I>(a, f);
    if (turn <= BEFORE_WEIGHTS) convert_again<I>(a, turn);
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
        const GradientColumn<I> source(a, column);
        for (unsigned token = self; token < a.tokens; token += SUMMERS)
            sum = plus(sum, source.at(Row(a, token)));
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
