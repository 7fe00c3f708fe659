// The memory pass of the QKV projections' gradients: D, X and W as 16-bit matrices, scaled by powers of two,
// or as float32.
//
// Launches: convert (scales guessed from a sample; every input read once, every copy written once, maxima of
// rows and columns measured; the last block judges whether the scales are right), mend (convert again; back
// at once if all is well), the product D·W, mend (what scales of single rows and columns left to do; convert
// D again), the product Dᵀ·X, mend. Where results must be added, rounded or spread by strides, mend does that.
// Float32 operands have no scales: convert just copies, and mend is launched for that alone. Operands in two
// terms have one scale; convert is launched again, should they be larger than the sample lets guess, and mend
// computes anew what no scale serves.
//
// Behind numbers.cuh, memory.cuh, qkv_inputs.cuh, qkv_scales.cuh, qkv_terms.cuh and qkv_rows.cuh.

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
    job.second = of_part(a.second, matrix);
    job.largest = a.largest + matrix;
    job.row_maxima = matrix == D ? a.d_rows : I::two ? nullptr : matrix == X ? a.x_rows : a.w_rows;
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
    using Target = Window<typename I::Operand>;
    const unsigned self = threadIdx.x, warps = gridDim.x * blockDim.x / 32;
    const bool again = I::two && __ldcg(a.done) >= gridDim.x;  // all blocks of the first launch have been
    if (again && !a.state->mend[0]) return;
    if (self >= SAMPLERS) {
        if (self < SAMPLERS + 3) fill_job<I>(jobs[self - SAMPLERS], a, self - SAMPLERS, warps);
    } else if (!again) sample<I>(a, samples);
    __syncthreads();
    if (self < 3) {
        Job& job = jobs[self];
        job.exponent = again ? a.state->exponent[self] : guess(samples[self], I::two ? AIM : Target::guess);
        job.least = least_to_carry(job.exponent);
        if (again && !a.state->again[self]) job.rows = 0;
    }
    __syncthreads();
    convert_all<I, true>(a, jobs);
    __syncthreads();
    if (self == 0) {  // for the whole block, which the barrier has put before it
        __threadfence();
        last = atomicAdd(a.done, 1u) == (again ? 2 : 1) * gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    if constexpr (I::two) {
        if (self < 3) a.state->exponent[self] = jobs[self].exponent;
        __syncthreads();
        if (!again && judge_guesses(a)) return;
        __syncthreads();
        judge_terms(a);
    } else judge<I>(a, jobs[D].exponent, jobs[X].exponent, jobs[W].exponent);
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

// A tile of a product that is computed anew; of it, a thread has 8 x 4 neighbours.
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 64, DEPTH = 16;

struct alignas(16) Tile {
    float left[DEPTH][TILE_ROWS + 4], right[DEPTH][TILE_COLUMNS];
    unsigned outer[TILE_ROWS], inner[TILE_ROWS];  // tokens of D·W's rows
};

// Elements from `start` on of D·W's operands: neighbouring threads take neighbours in memory.
template <class I> DEVICE void read_hidden(
    const Arguments& a, const Finish& f, Tile& tile, unsigned row, unsigned column, unsigned start) {
    const unsigned k = threadIdx.x % DEPTH, depth = static_cast<unsigned>(a.width);
    const unsigned rows = static_cast<unsigned>(f.rows), columns = static_cast<unsigned>(f.columns);
    const GradientColumn<I> source(a, start + k < depth ? start + k : 0);
    #pragma unroll
    for (unsigned i = threadIdx.x / DEPTH; i < TILE_ROWS; i += 256 / DEPTH) {
        const bool there = row + i < rows && start + k < depth;
        tile.left[k][i] = there ? source.at(Row(row + i, tile.outer[i], tile.inner[i])) : 0.0f;
    }
    const unsigned across = threadIdx.x % TILE_COLUMNS;
    #pragma unroll
    for (unsigned l = threadIdx.x / TILE_COLUMNS; l < DEPTH; l += 256 / TILE_COLUMNS) {
        const bool there = column + across < columns && start + l < depth;
        tile.right[l][across] = there ? weight_at<I>(a, start + l, column + across) : 0.0f;
    }
}

// The same of Dᵀ·X; a thread stays with its column of D.
template <class I> DEVICE void read_weights(
    const Arguments& a, const Finish& f, Tile& tile, const GradientColumn<I>& source, bool inside,
    unsigned column, unsigned start) {
    const unsigned i = threadIdx.x % TILE_ROWS, depth = static_cast<unsigned>(a.tokens);
    #pragma unroll
    for (unsigned k = threadIdx.x / TILE_ROWS; k < DEPTH; k += 256 / TILE_ROWS) {
        const bool there = inside && start + k < depth;
        tile.left[k][i] = there ? source.at(Row(a, start + k)) : 0.0f;
    }
    const unsigned across = threadIdx.x % TILE_COLUMNS, columns = static_cast<unsigned>(f.columns);
    #pragma unroll
    for (unsigned l = threadIdx.x / TILE_COLUMNS; l < DEPTH; l += 256 / TILE_COLUMNS) {
        const bool there = column + across < columns && start + l < depth;
        tile.right[l][across] = there ? hidden_at<I>(a, Row(a, start + l), column + across) : 0.0f;
    }
}

DEVICE void add_products(const Tile& tile, unsigned y, unsigned x, float (&sums)[8][4]) {
    #pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
        const float4* left = reinterpret_cast<const float4*>(tile.left[k]) + 2 * y;
        const float4 l[2] = {left[0], left[1]}, r = reinterpret_cast<const float4*>(tile.right[k])[x];
        const float of_left[8] = {l[0].x, l[0].y, l[0].z, l[0].w, l[1].x, l[1].y, l[1].z, l[1].w};
        const float of_right[4] = {r.x, r.y, r.z, r.w};
        #pragma unroll
        for (int i = 0; i < 8; ++i)
            #pragma unroll
            for (int j = 0; j < 4; ++j) sums[i][j] = times_plus(of_left[i], of_right[j], sums[i][j]);
    }
}

// The whole product in float32, straight from the inputs: for ranges that no scale serves.
template <class I> DEVICE void compute_anew(const Arguments& a, const Finish& f) {
    __shared__ Tile tile;
    const bool hidden = f.which == HIDDEN;
    const unsigned rows = static_cast<unsigned>(f.rows), columns = static_cast<unsigned>(f.columns);
    const unsigned depth = static_cast<unsigned>(hidden ? a.width : a.tokens);
    const unsigned across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const unsigned tiles = (rows + TILE_ROWS - 1) / TILE_ROWS * across;
    const unsigned x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (unsigned number = blockIdx.x; number < tiles; number += gridDim.x) {
        const unsigned row = number / across * TILE_ROWS, column = number % across * TILE_COLUMNS;
        float sums[8][4] = {};
        if (hidden) {
            for (unsigned i = threadIdx.x; i < TILE_ROWS; i += blockDim.x) {
                const Row token(a, row + i);
                tile.outer[i] = token.outer;
                tile.inner[i] = token.inner;
            }
            __syncthreads();
            for (unsigned start = 0; start < depth; start += DEPTH) {
                read_hidden<I>(a, f, tile, row, column, start);
                __syncthreads();
                add_products(tile, y, x, sums);
                __syncthreads();
            }
        } else {
            const unsigned own = row + threadIdx.x % TILE_ROWS;
            const GradientColumn<I> source(a, static_cast<unsigned>(f.first_row) + (own < rows ? own : 0));
            for (unsigned start = 0; start < depth; start += DEPTH) {
                read_weights<I>(a, f, tile, source, own < rows, column, start);
                __syncthreads();
                add_products(tile, y, x, sums);
                __syncthreads();
            }
        }
        #pragma unroll
        for (int i = 0; i < 32; ++i) {
            const unsigned at = row + 8 * y + i / 4, there = column + 4 * x + i % 4;
            if (at < rows && there < columns) put<I>(f, at, there, to_double(sums[i / 4][i % 4]));
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
    if constexpr (!I::two)
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
