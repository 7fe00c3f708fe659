// Two 16-bit terms for a float32: x = first + 2^-11 second, all but the last of its 24 bits. With the products
// first·first, first·second and second·first, a term of the sums errs by 8 units roundoff at the most.
//
// That needs |x|, scaled, between 2^-12 and 2^16. What is smaller errs by 2^-36 instead, which matters where a
// sum has nothing larger. So every row of the left matrix and every column of the right one is tallied: how
// many of its elements are large enough to carry a sum, how many are not zero. Where the tallies cannot
// exclude that such an error is seen, the product is computed anew in float32.

constexpr int AIM = 8;                     // exponent of the largest sample: 7 remain above it
constexpr int HIGHEST = 14;                // exponent of the largest element, at the most
constexpr int CARRIES = -5;                // exponent from which an element carries a sum
constexpr unsigned NONZERO = 1u << 16;     // in a tally; elements that carry are counted below it

// Bits of the smallest magnitude that carries, scaled by 2^exponent.
DEVICE unsigned least_to_carry(int exponent) {
    const int least = CARRIES - exponent;
    if (least > 127) return INFINITE;
    if (least >= -126) return static_cast<unsigned>(least + 127) << 23;
    return least >= -149 ? 1u << (least + 149) : 1u;
}

#ifdef ROPEGRAD_ON_CPU
DEVICE void add(unsigned* at, unsigned x) { atomicAdd(at, x); }
DEVICE unsigned sum_of_warp(unsigned x) {
    for (int apart = 16; apart; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
    return x;
}
#else
DEVICE void add(unsigned* at, unsigned x) {  // in global memory; nothing waits for it
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(at), "r"(x) : "memory");
}
DEVICE unsigned sum_of_warp(unsigned x) { return __reduce_add_sync(0xffffffffu, x); }
#endif

// Of rows or columns that are not all zero: the fewest elements that carry, the most that do not and are not
// zero. For all threads of the block. (Past L1: other blocks have counted.)
struct Tallies { unsigned fewest, most_lost; };

DEVICE Tallies tallies_of(const unsigned* tallies, unsigned count) {
    constexpr int AT_A_TIME = 8;
    unsigned found[2] = {0, 0};  // the largest complement, the most that do not carry
    #pragma unroll 1
    for (unsigned start = threadIdx.x; start < count; start += blockDim.x * AT_A_TIME) {
        unsigned loaded[AT_A_TIME];
        #pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
            const unsigned i = start + j * blockDim.x;
            loaded[j] = i < count ? __ldcg(tallies + i) : 0;
        }
        #pragma unroll
        for (int j = 0; j < AT_A_TIME; ++j) {
            const unsigned carry = loaded[j] % NONZERO, nonzero = loaded[j] / NONZERO;
            found[0] = most(found[0], nonzero ? NONZERO - carry : 0);
            found[1] = most(found[1], nonzero - carry);
        }
    }
    most_of_block(found);
    return {NONZERO - found[0], found[1]};
}

// Whether sums of `depth` products keep IEEE's promise, by tallies and scaled exponents of the largest.
DEVICE bool kept(Tallies left, Tallies right, int top_left, int top_right, long long depth) {
    const auto below = [](unsigned count, int top) {  // of factors below 2^(top+1), which is taken for 1 or more
        return static_cast<long long>(count) << (top < 0 ? 0 : top + 1);
    };
    const long long lost = below(left.most_lost, top_right) + below(right.most_lost, top_left);
    if (lost == 0) return true;
    // So many products of 2^-10 and more are in every sum. The bound has room for 4 roundoffs of it, which are
    // 2^-32 for each of them, and for half a roundoff for each of them, 2^-35 for each two.
    const long long carried = static_cast<long long>(left.fewest) + right.fewest - depth;
    return carried > 0 && lost <= 16 * carried + 2 * carried * carried;
}

// Matrices whose guessed scale is too large for them get the exact one, and empty tallies: convert comes again.
DEVICE bool judge_guesses(const Arguments& a) {
    bool any = false;
    #pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        const unsigned largest = __ldcg(a.largest + i);
        const bool again = largest && exponent_of(largest) + a.state->exponent[i] > HIGHEST;
        any |= again;
        __syncthreads();  // who writes it has all others behind
        if (threadIdx.x == 0) {
            a.state->again[i] = again;
            if (again) a.state->exponent[i] = HIGHEST - exponent_of(largest);
        }
        if (!again) continue;
        const unsigned columns = static_cast<unsigned>(i == D ? a.width : a.hidden_size);
        unsigned* of_columns = i == D ? a.d_columns : i == X ? a.x_columns : a.w_columns;
        for (unsigned j = threadIdx.x; j < columns; j += blockDim.x) of_columns[j] = 0;
        if (i == D) for (unsigned j = threadIdx.x; j < a.tokens; j += blockDim.x) a.d_rows[j] = 0;
    }
    if (threadIdx.x == 0) a.state->mend[0] = any;
    return any;
}

// By one block, once all tallies are there.
DEVICE void judge_terms(const Arguments& a) {
    const unsigned self = threadIdx.x;
    const unsigned tokens = static_cast<unsigned>(a.tokens), width = static_cast<unsigned>(a.width);
    const unsigned columns = static_cast<unsigned>(a.hidden_size);
    const bool hidden = a.wanted[HIDDEN], weights = a.wanted[WEIGHTS];
    const Tallies d_rows = tallies_of(a.d_rows, hidden ? tokens : 0);
    const Tallies w_columns = tallies_of(a.w_columns, hidden ? columns : 0);
    const Tallies d_columns = tallies_of(a.d_columns, weights ? width : 0);
    const Tallies x_columns = tallies_of(a.x_columns, weights ? columns : 0);
    if (self) return;
    State& s = *a.state;
    int top[3];  // scaled; small where all is zero
    for (int i = 0; i < 3; ++i) {
        s.largest[i] = __ldcg(a.largest + i);
        top[i] = s.largest[i] ? exponent_of(s.largest[i]) + s.exponent[i] : -60;
    }
    for (int product = HIDDEN; product <= WEIGHTS; ++product) {
        const bool first = product == HIDDEN;
        const int right = first ? W : X, exponent = -(s.exponent[D] + s.exponent[right]);
        // Results flushed to zero must not be seen, as `kept` counts: 2^-126 is less than 2^-36 of a product.
        const bool fits = exponent >= -80 && exponent <= 110;
        const bool same = first ? kept(d_rows, w_columns, top[D], top[W], width)
                                : kept(d_columns, x_columns, top[D], top[X], tokens);
        s.recompute[product] = (first ? hidden : weights) && !(fits && same);
        s.alpha[product] = fits ? power_of_two(exponent) : 1.0f;
        s.further[product] = fits ? power_of_two(exponent - FURTHER) : 1.0f;
    }
    s.mend[1] = s.recompute[HIDDEN];
    s.mend[2] = s.recompute[WEIGHTS];
    s.one = 1.0f;
    s.zero = 0.0f;
    s.again_d = s.own[HIDDEN] = s.own[WEIGHTS] = s.unscale[HIDDEN] = s.unscale[WEIGHTS] = 0;
    for (int i = 0; i < 3; ++i) s.own_columns[i] = 0;
}
