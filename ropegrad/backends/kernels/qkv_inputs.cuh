// The three matrices of the products and how their elements are read: D, the gradients with RoPE undone, laid
// side by side [tokens, width]; X, the hidden states [tokens, C]; W, the weights below each other [width, C].
//
// A thread stays with `V` neighbouring columns and reads row after row. Strides are in bytes.

struct Heads { char* at; long long outer, inner, head, step; };
struct Rows { char* at; long long outer, inner, step; };

enum { D, X, W };              // the matrices
enum { HIDDEN, WEIGHTS };      // the products: D·W and Dᵀ·X

struct State {
    int exponent[3];           // D, X, W: one scale for the matrix, 2^exponent
    int again[3], again_d;     // to be converted again before D·W; D before Dᵀ·X
    int own[2], own_columns[3];  // rows or columns with scales of their own: D in either product; X, W
    int unscale[2];            // the product is left to `finish`
    float alpha[2], one, zero;
    unsigned largest[3];       // bits of the largest finite magnitude
    int recompute[2];          // the product is left to `finish`, all of it, in float32
};

struct Arguments {
    Heads grad[3];             // of query, key, value; a token is (outer, inner)
    long long columns[3];      // of D that they fill; 0 where not wanted
    Rows cos, sin;
    Rows hidden, weight[3];    // weights have their rows in `inner`
    long long wanted[2];       // of HIDDEN and WEIGHTS
    long long tokens, inner, head_dim, rotary, width, hidden_size;
    char* copy[3];             // D, X, W in the operands' dtype
    long long pitch[3];        // bytes from row to row of them
    unsigned *d_rows, *d_columns, *x_columns, *w_columns, *x_rows, *w_rows;  // bits of their largest magnitudes
    long long measured;        // of these, one behind the other
    State* state;
};

// A column of D (or a row of W): in which of the three, and where in it.
// (Below 2^31: 64-bit divisions would be calls.)
struct Place { int part; unsigned at; };

DEVICE Place place_of(const Arguments& a, unsigned column) {
    if (column < a.columns[0]) return {0, column};
    column -= static_cast<unsigned>(a.columns[0]);
    if (column < a.columns[1]) return {1, column};
    return {2, column - static_cast<unsigned>(a.columns[1])};
}

template <class T> DEVICE T of_part(const T (&three)[3], int part) {  // without an address: registers
    return part == 0 ? three[0] : part == 1 ? three[1] : three[2];
}

struct Token { unsigned outer, inner; };

DEVICE Token token_of(const Arguments& a, unsigned row) {
    const unsigned n = static_cast<unsigned>(a.inner);
    return {row / n, row % n};
}
template <class Strides> DEVICE long long row_offset(const Strides& of, const Token& token) {
    return of.outer * token.outer + of.inner * token.inner;
}

// ---- D ----------------------------------------------------------------------------------------------------

// dx_j = g_j·c_j - σ_j·g_p(j)·s_p(j), and channels past the rotary width as they are.
template <class I, int V> struct Gradients {
    static constexpr bool within = I::interleaved && V > 1;  // partners stand in the same vector
    static constexpr bool shared = I::half_table && within;  // a column of the table serves two channels
    static constexpr int columns = shared ? V / 2 : V;
    using G = Vector<typename I::Storage, V>;
    using T = Vector<typename I::Table, columns>;

    const Arguments& a;
    Heads from;
    const char *at, *partner, *cos, *sin;
    bool turned, second;

    DEVICE Gradients(const Arguments& a, unsigned column) : a(a) {
        const Place place = place_of(a, column);
        from = of_part(a.grad, place.part);
        const unsigned head_dim = static_cast<unsigned>(a.head_dim);
        const unsigned half = static_cast<unsigned>(a.rotary) / 2;
        const unsigned channel = place.at % head_dim;
        turned = place.part < 2 && channel < 2 * half;
        second = I::interleaved ? channel % 2 : channel >= half;
        const unsigned away = I::interleaved ? channel ^ 1u : second ? channel - half : channel + half;
        const unsigned other = within ? channel : away;
        const char* head = from.at + from.head * (place.at / head_dim);
        at = head + from.step * channel;
        partner = head + from.step * other;
        cos = a.cos.at + a.cos.step * column_of(channel, half);
        sin = a.sin.at + a.sin.step * column_of(other, half);
    }
    static DEVICE unsigned column_of(unsigned channel, unsigned half) {
        if (!I::half_table) return channel;
        return I::interleaved ? channel / 2 : channel >= half ? channel - half : channel;
    }
    DEVICE void read(unsigned row_number, float (&to)[V]) const {
        const Token token = token_of(a, row_number);
        const long long row = row_offset(from, token);
        G g, p = {};
        T c = {}, s = {};
        load<0, true>(g, at + row, from.step);
        if (turned) {
            if (!within) load<0, true>(p, partner + row, from.step);
            load<0, true>(c, cos + row_offset(a.cos, token), a.cos.step);
            load<0, true>(s, sin + row_offset(a.sin, token), a.sin.step);
        }
        #pragma unroll
        for (int i = 0; i < V; ++i) {
            to[i] = to_float(g.get(i));
            if (!turned) continue;
            const float other = to_float(within ? g.get(i ^ 1) : p.get(i));
            const float cosine = to_float(c.get(shared ? i / 2 : i));
            const float sine = to_float(s.get(shared ? i / 2 : within ? i ^ 1 : i));
            const bool last = within ? i % 2 : second;
            to[i] = last ? minus_times(other, sine, times(to[i], cosine))
                         : times_plus(to[i], cosine, times(other, sine));
        }
    }
};

// ---- X and W ----------------------------------------------------------------------------------------------

template <class I, int V> struct Hidden {
    const Arguments& a;
    const char* at;

    DEVICE Hidden(const Arguments& a, unsigned column) : a(a), at(a.hidden.at + a.hidden.step * column) {}
    DEVICE void read(unsigned row, float (&to)[V]) const {
        Vector<typename I::Storage, V> x;
        load<0, true>(x, at + row_offset(a.hidden, token_of(a, row)), a.hidden.step);
        #pragma unroll
        for (int i = 0; i < V; ++i) to[i] = to_float(x.get(i));
    }
};

template <class I, int V> struct Weights {
    const Arguments& a;
    unsigned column;

    DEVICE Weights(const Arguments& a, unsigned column) : a(a), column(column) {}
    DEVICE void read(unsigned row, float (&to)[V]) const {
        const Place place = place_of(a, row);
        const Rows from = of_part(a.weight, place.part);
        Vector<typename I::Storage, V> x;
        load<0, true>(x, from.at + from.inner * place.at + from.step * column, from.step);
        #pragma unroll
        for (int i = 0; i < V; ++i) to[i] = to_float(x.get(i));
    }
};
