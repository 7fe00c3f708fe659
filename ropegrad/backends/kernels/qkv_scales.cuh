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
// x·2^exponent: in two steps, since exponents reach 169
DEVICE float scaled(float x, int exponent) {
    const int half = exponent >> 1;
    return times(times(x, power_of_two(half)), power_of_two(exponent - half));
}
template <class Operand> DEVICE int own_exponent(unsigned bits) {
    return bits ? Window<Operand>::target - exponent_of(bits) : 0;
}

DEVICE unsigned most(unsigned a, unsigned b) { return a > b ? a : b; }
DEVICE unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

DEVICE unsigned most_of_warp(unsigned x) {
    #pragma unroll
    for (int apart = 16; apart; apart /= 2) x = most(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

struct Range { unsigned largest, smallest; };  // of nonzero maxima; NOTHING where there are none

constexpr int DECIDERS = 1024;

DEVICE Range range_of_block(unsigned largest, unsigned smallest) {
    __shared__ unsigned shared[2][DECIDERS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    largest = most_of_warp(largest);
    smallest = ~most_of_warp(~smallest);
    __syncthreads();  // what was read before is no longer needed
    if (lane == 0) shared[0][warp] = largest, shared[1][warp] = smallest;
    __syncthreads();
    return {most_of_warp(shared[0][lane]), ~most_of_warp(~shared[1][lane])};
}

// ---- the guess --------------------------------------------------------------------------------------------

constexpr int SAMPLES = 4;  // a thread

// Rows evenly spread, columns at random.
template <class Source> DEVICE void guess(
    const Arguments& a, int matrix, long long rows, long long columns, int place) {
    unsigned largest = 0;
    #pragma unroll 1
    for (unsigned i = threadIdx.x; i < SAMPLES * DECIDERS && rows && columns; i += DECIDERS) {
        const unsigned column = i * 2654435761u % static_cast<unsigned>(columns);
        float x[1];
        Source(a, column).read(static_cast<unsigned>(i * rows / (SAMPLES * DECIDERS)), x);
        largest = most(largest, finite_bits(x[0]));
    }
    const Range range = range_of_block(largest, NOTHING);
    if (threadIdx.x) return;
    const int exponent = range.largest ? place - exponent_of(range.largest) : 0;
    a.state->exponent[matrix] = exponent;
    a.state->largest[matrix] = 0;
}

template <class I> DEVICE void qkv_guess_of(const Arguments& a) {
    for (long long i = blockIdx.x * DECIDERS + threadIdx.x; i < a.measured; i += gridDim.x * DECIDERS)
        a.d_rows[i] = 0;
    if (blockIdx.x) return;
    constexpr int place = Window<typename I::Operand>::guess;
    guess<Gradients<I, 1>>(a, D, a.tokens, a.width, place);
    if (a.wanted[WEIGHTS]) guess<Hidden<I, 1>>(a, X, a.tokens, a.hidden_size, place);
    if (a.wanted[HIDDEN]) guess<Weights<I, 1>>(a, W, a.width, a.hidden_size, place);
}

// ---- the verdict ------------------------------------------------------------------------------------------

DEVICE Range range_of(const unsigned* maxima, long long count) {
    unsigned largest = 0, smallest = NOTHING;
    for (long long i = threadIdx.x; i < count; i += DECIDERS) {
        const unsigned bits = maxima[i];
        largest = most(largest, bits);
        if (bits) smallest = least(smallest, bits);
    }
    return range_of_block(largest, smallest);
}

template <class Operand> DEVICE bool fits(Range range, int exponent) {
    if (!range.largest) return true;
    return exponent_of(range.largest) + exponent <= Window<Operand>::high
        && exponent_of(range.smallest) + exponent >= Window<Operand>::low;
}

// Keep the guess, take the exact scale, or give up one scale for the matrix; the last for rows and columns
// apart.
template <class Operand> DEVICE void decide(
    State& s, int matrix, Range rows, Range columns, bool& own_rows, bool& own_columns) {
    const int guessed = s.exponent[matrix];
    s.largest[matrix] = most(rows.largest, columns.largest);
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
    s.own[product] = own;
    const bool finer = own || s.own_columns[right];
    s.unscale[product] = finer || exponent < -107 - 2 * Window<Operand>::low || exponent > 127;
    s.alpha[product] = s.unscale[product] ? 1.0f : power_of_two(exponent);
}

// Whether more than the largest product of maxima allows is lost by underflow: left[i] and right[i] belong to
// the same term of the sums. Exponents are shifted, so that 0 is none.
template <class Operand> DEVICE bool reciprocal(const unsigned* left, const unsigned* right, long long count,
                                                unsigned most_left, unsigned most_right) {
    constexpr int kept = Window<Operand>::kept, shift = 512;
    const int top_left = most_left ? exponent_of(most_left) : 0;
    const int top_right = most_right ? exponent_of(most_right) : 0;
    unsigned product = 0, lost = 0;
    for (long long i = threadIdx.x; i < count; i += DECIDERS) {
        if (!left[i] || !right[i]) continue;
        const int l = exponent_of(left[i]), r = exponent_of(right[i]);
        product = most(product, l + r + shift);
        if (l + kept < top_left) lost = most(lost, top_left + r + shift);
        if (r + kept < top_right) lost = most(lost, l + top_right + shift);
    }
    product = range_of_block(product, NOTHING).largest;
    lost = range_of_block(lost, NOTHING).largest;
    return lost > product + kept;
}

template <class I> DEVICE void qkv_judge_of(const Arguments& a) {
    using Operand = typename I::Operand;
    const bool hidden = a.wanted[HIDDEN], weights = a.wanted[WEIGHTS];
    const Range none = {0, NOTHING};
    const Range d_rows = range_of(a.d_rows, a.tokens), d_columns = range_of(a.d_columns, a.width);
    const Range x = weights ? range_of(a.x_columns, a.hidden_size) : none;
    const Range w = hidden ? range_of(a.w_columns, a.hidden_size) : none;
    const bool anew_hidden =
        hidden && reciprocal<Operand>(a.d_columns, a.w_rows, a.width, d_columns.largest, w.largest);
    const bool anew_weights =
        weights && reciprocal<Operand>(a.d_rows, a.x_rows, a.tokens, d_rows.largest, x.largest);
    if (threadIdx.x) return;
    State& s = *a.state;
    s.recompute[HIDDEN] = anew_hidden;
    s.recompute[WEIGHTS] = anew_weights;
    bool own_rows, own_columns, unused, own;
    decide<Operand>(s, D, hidden ? d_rows : none, weights ? d_columns : none, own_rows, own_columns);
    s.again_d = own_rows || own_columns;
    if (!weights) s.exponent[X] = 0;
    decide<Operand>(s, X, none, x, unused, own);
    s.own_columns[X] = own;
    s.again[X] |= own;
    if (!hidden) s.exponent[W] = 0;
    decide<Operand>(s, W, none, w, unused, own);
    s.own_columns[W] = own;
    s.again[W] |= own;
    s.own_columns[D] = own_columns;
    decide_product<Operand>(s, HIDDEN, W, own_rows);
    decide_product<Operand>(s, WEIGHTS, X, own_columns);
    s.one = 1.0f;
    s.zero = 0.0f;
}
