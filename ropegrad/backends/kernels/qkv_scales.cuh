// Scales of the operands: powers of two, guessed from a sample, judged by the maxima of rows and columns.
//
// A 16-bit operand keeps its significand where the scaled maxima of the rows of the left matrix and of the
// columns of the right one lie in [2^low, 2^(high+1)): what underflows is then below 2^-20 of them. One scale
// for a matrix if that is so; else rows or columns have their own, which can always be.
//
// That is normwise. Where the left matrix is small just where the right one is large, and the other way
// round, all that matters may underflow; such products are computed anew in float32.

template <class Operand> struct Window;
template <> struct Window<Float16> {
    static constexpr int low = -4, high = 14, guess = 7, target = 14, kept = 19;
};
template <> struct Window<BFloat16> {
    static constexpr int low = -20, high = 40, guess = 10, target = 20, kept = 120;
};

template <> struct Window<float> { static constexpr int target = 0; };  // float32 has no scales
template <class Operand> constexpr bool SCALED = sizeof(Operand) == 2;

constexpr unsigned INFINITE = 0x7f800000u, SMALLEST_NORMAL = 0x00800000u, NOTHING = 0xffffffffu;

// Bits of |x|, which are ordered as the magnitudes are; 0 for NaN and Inf. (Floating-point comparisons would
// take subnormals for zeros under -ftz=true.)
DEVICE unsigned finite_bits(float x) {
    const unsigned bits = bits_as<unsigned>(x) & 0x7fffffffu;
    return bits < INFINITE ? bits : 0;
}
DEVICE int exponent_of(unsigned bits) {  // floor(log2 |x|), x not 0
    if (bits >= SMALLEST_NORMAL) return static_cast<int>(bits >> 23) - 127;
    return 31 - __clz(static_cast<int>(bits)) - 149;
}
DEVICE float power_of_two(int exponent) {
    return bits_as<float>(static_cast<unsigned>(exponent + 127) << 23);
}
DEVICE double power_of_two_wide(int exponent) {
    return bits_as<double>(static_cast<unsigned long long>(exponent + 1023) << 52);
}
template <class Operand> DEVICE int own_exponent(unsigned bits) {
    return bits ? Window<Operand>::target - exponent_of(bits) : 0;
}

DEVICE unsigned most(unsigned a, unsigned b) { return a > b ? a : b; }
DEVICE unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

#ifdef ROPEGRAD_ON_CPU
DEVICE void raise(unsigned* at, unsigned x) { atomicMax(at, x); }
DEVICE unsigned most_of_warp(unsigned x) {
    for (int apart = 16; apart; apart /= 2) x = most(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}
#else
DEVICE void raise(unsigned* at, unsigned x) {  // in global memory; nothing waits for it
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" :: "l"(at), "r"(x) : "memory");
}
DEVICE unsigned most_of_warp(unsigned x) { return __reduce_max_sync(0xffffffffu, x); }
#endif

// N maxima over the block, for all of its threads.
template <int N> DEVICE void most_of_block(unsigned (&x)[N]) {
    __shared__ unsigned shared[N][32];
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int i = 0; i < N; ++i) {
        x[i] = most_of_warp(x[i]);
        if (lane == 0) shared[i][warp] = x[i];
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < N; ++i) x[i] = most_of_warp(lane < blockDim.x / 32 ? shared[i][lane] : 0);
    __syncthreads();  // `shared` may be written again
}

// ---- the guess --------------------------------------------------------------------------------------------

constexpr unsigned RUN = 8, RUNS = 32, SAMPLERS = RUN * RUNS;  // samples that are neighbours: one access

// An element a thread of each matrix, rows and columns evenly spread: the largest of each warp. Every block
// has the same. (No divisions: every block waits for this.)
template <class I> DEVICE void sample(const Arguments& a, unsigned (&to)[3][SAMPLERS / 32]) {
    const unsigned run = threadIdx.x / RUN, within = threadIdx.x % RUN, warp = threadIdx.x / 32;
    const auto spread = [](unsigned i, long long n) { return static_cast<unsigned>(i * n / RUNS); };
    const auto column_of = [&](long long n) {
        return least(spread(run * 13 % RUNS, n) + within, static_cast<unsigned>(n) - 1);
    };
    float d = 0.0f, x = 0.0f, w = 0.0f;
    if (a.hidden_size && a.wanted[WEIGHTS] && a.tokens)
        x = hidden_at<I>(a, Row(a, spread(run, a.tokens)), column_of(a.hidden_size));
    if (a.hidden_size && a.wanted[HIDDEN] && a.width)
        w = weight_at<I>(a, spread(run, a.width), column_of(a.hidden_size));
    if (a.tokens && a.width)
        d = GradientColumn<I>(a, column_of(a.width)).at(Row(a, spread(run, a.tokens)));
    const unsigned largest[3] = {finite_bits(d), finite_bits(x), finite_bits(w)};
    #pragma unroll
    for (int i = 0; i < 3; ++i) {
        const unsigned found = most_of_warp(largest[i]);
        if (threadIdx.x % 32 == 0) to[i][warp] = found;
    }
}

DEVICE int guess(const unsigned (&samples)[SAMPLERS / 32], int aim) {
    unsigned largest = 0;
    #pragma unroll
    for (unsigned i = 0; i < SAMPLERS / 32; ++i) largest = most(largest, samples[i]);
    return largest ? aim - exponent_of(largest) : 0;
}

// ---- the verdict ------------------------------------------------------------------------------------------

struct Range { unsigned largest, smallest; };  // of nonzero maxima; NOTHING where there are none

constexpr unsigned ACCESS = 128;  // words that a warp reads at once: each array is whole ones
constexpr int AT_ONCE = 8;        // accesses of a warp in flight

DEVICE unsigned index_of(const Arguments& a, const unsigned* maxima) {
    return static_cast<unsigned>(maxima - a.d_rows) / ACCESS;
}

// Of the six arrays of maxima, which stand one behind the other. (Past L1: other blocks have written them.)
DEVICE void ranges_of(const Arguments& a, Range (&ranges)[6]) {
    __shared__ unsigned shared[6][2];  // the largest, and the largest complement
    const unsigned lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (threadIdx.x < 12) shared[threadIdx.x / 2][threadIdx.x % 2] = 0;
    __syncthreads();
    const unsigned ends[5] = {index_of(a, a.d_columns), index_of(a, a.x_columns), index_of(a, a.w_columns),
                              index_of(a, a.x_rows), index_of(a, a.w_rows)};
    const unsigned all = index_of(a, a.done);
    #pragma unroll 1
    for (unsigned start = threadIdx.x / 32; start < all; start += warps * AT_ONCE) {
        uint4 fours[AT_ONCE];
        #pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const unsigned i = start + j * warps;
            if (i < all) fours[j] = __ldcg(reinterpret_cast<const uint4*>(a.d_rows) + (i * 32 + lane));
        }
        #pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
            const unsigned i = start + j * warps;
            if (i >= all) break;
            const unsigned bits[4] = {fours[j].x, fours[j].y, fours[j].z, fours[j].w};
            unsigned largest = 0, smallest = 0;
            #pragma unroll
            for (int k = 0; k < 4; ++k) {
                largest = most(largest, bits[k]);
                smallest = most(smallest, bits[k] ? ~bits[k] : 0);
            }
            largest = most_of_warp(largest);
            smallest = most_of_warp(smallest);
            int array = 0;
            #pragma unroll
            for (int k = 0; k < 5; ++k) array += i >= ends[k];
            if (lane || !largest) continue;
            atomicMax(&shared[array][0], largest);
            atomicMax(&shared[array][1], smallest);
        }
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 6; ++k) ranges[k] = {shared[k][0], ~shared[k][1]};
}
template <class Operand> DEVICE bool fits(Range range, int exponent) {
    if (!range.largest) return true;
    return exponent_of(range.largest) + exponent <= Window<Operand>::high
        && exponent_of(range.smallest) + exponent >= Window<Operand>::low;
}

// Keep the guess, take the exact scale, or give up one scale for the matrix; the last for rows and columns
// apart.
template <class Operand> DEVICE void decide(
    State& s, int matrix, int guessed, Range rows, Range columns, bool& own_rows, bool& own_columns) {
    s.largest[matrix] = most(rows.largest, columns.largest);
    s.exponent[matrix] = guessed;
    own_rows = own_columns = false;
    if (!fits<Operand>(rows, guessed) || !fits<Operand>(columns, guessed)) {
        const int exact = own_exponent<Operand>(s.largest[matrix]);
        s.exponent[matrix] = exact;
        own_rows = !fits<Operand>(rows, exact);
        own_columns = !fits<Operand>(columns, exact);
    }
    s.again[matrix] = s.exponent[matrix] != guessed || own_rows;
}

// cuBLAS multiplies by alpha where no result can then be so small that a flush to zero would break the bound.
template <class Operand> DEVICE void decide_product(State& s, int product, int right, bool own) {
    const int exponent = -(s.exponent[D] + s.exponent[right]);
    const bool finer = own || s.own_columns[right];
    s.unscale[product] = finer || exponent < -107 - 2 * Window<Operand>::low || exponent > 127;
    s.alpha[product] = s.unscale[product] ? 1.0f : power_of_two(exponent);
}

// Whether more than the largest product of maxima allows is lost by underflow: left[i] and right[i] belong to
// the same term of the sums. Exponents are shifted, so that 0 is none.
template <class Operand> DEVICE bool reciprocal(const unsigned* left, const unsigned* right, long long count,
                                                Range of_left, Range of_right) {
    constexpr int kept = Window<Operand>::kept, shift = 512;
    if (!of_left.largest || !of_right.largest) return false;
    const int top_left = exponent_of(of_left.largest), top_right = exponent_of(of_right.largest);
    if (exponent_of(of_left.smallest) + kept >= top_left
        && exponent_of(of_right.smallest) + kept >= top_right)
        return false;  // nothing is lost
    unsigned products[2] = {0, 0};  // the largest one, the largest of what may be lost
    #pragma unroll 1
    for (long long i = threadIdx.x; i < count; i += blockDim.x) {
        const unsigned in_left = __ldcg(left + i), in_right = __ldcg(right + i);
        if (!in_left || !in_right) continue;
        const int l = exponent_of(in_left), r = exponent_of(in_right);
        products[0] = most(products[0], l + r + shift);
        if (l + kept < top_left) products[1] = most(products[1], top_left + r + shift);
        if (r + kept < top_right) products[1] = most(products[1], l + top_right + shift);
    }
    most_of_block(products);
    const unsigned product = products[0], lost = products[1];
    return lost > product + kept;
}

// By one block, once all maxima are there. One thread a matrix, one a product: little code, which is cold.
template <class I> DEVICE void judge(const Arguments& a, int d, int x, int w) {
    using Operand = typename I::Operand;
    __shared__ bool lost[2];
    const int self = threadIdx.x;
    const bool hidden = a.wanted[HIDDEN], weights = a.wanted[WEIGHTS];
    const Range none = {0, NOTHING};
    Range ranges[6];  // rows and columns of D, columns of X and of W, rows of X and of W
    ranges_of(a, ranges);
    #pragma unroll 1
    for (int product = HIDDEN; product <= WEIGHTS; ++product) {
        const bool first = product == HIDDEN;
        const bool anew = (first ? hidden : weights) && reciprocal<Operand>(
            first ? a.d_columns : a.d_rows, first ? a.w_rows : a.x_rows, first ? a.width : a.tokens,
            first ? ranges[1] : ranges[0], first ? ranges[5] : ranges[4]);
        if (self == 0) lost[product] = anew;
    }
    State& s = *a.state;
    if (self < 3) {
        bool own_rows, own_columns;
        const Range rows = self == D && hidden ? ranges[0] : none;
        const Range columns = self == D ? (weights ? ranges[1] : none) : self == X ? ranges[2] : ranges[3];
        decide<Operand>(s, self, self == D ? d : self == X ? x : w, rows, columns, own_rows, own_columns);
        s.own_columns[self] = own_columns;
        if (self != D) s.again[self] |= own_columns;
        else s.own[HIDDEN] = own_rows, s.own[WEIGHTS] = own_columns;
        if (self == D) s.again_d = weights && (own_rows || own_columns);
    }
    __syncthreads();
    if (self < 2) {
        s.recompute[self] = lost[self];
        decide_product<Operand>(s, self, self == HIDDEN ? W : X, s.own[self]);
    }
    __syncthreads();
    if (self) return;
    s.mend[0] = s.again[D] || s.again[X] || s.again[W];
    s.mend[1] = s.unscale[HIDDEN] || s.recompute[HIDDEN] || s.again_d;
    s.mend[2] = s.unscale[WEIGHTS] || s.recompute[WEIGHTS];
    s.one = 1.0f;
    s.zero = 0.0f;
}
