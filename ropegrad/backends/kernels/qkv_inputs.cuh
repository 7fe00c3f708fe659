// The three matrices of the products and how their elements are read: D, the gradients with RoPE undone, laid
// side by side [tokens, width]; X, the hidden states [tokens, C]; W, the weights below each other [width, C].
//
// A thread stays with two vectors of V neighbouring columns, a *unit*, and reads row after row. In D's rotary
// channels both members of a pair are in the same unit, so every gradient is read once. Neighbouring threads
// have neighbouring vectors: a unit's second vector is half a run of channels behind its first, and missing
// where that run has an odd number of them. Strides are in bytes.

struct Heads { char* at; long long outer, inner, head, step; };
struct Rows { char* at; long long outer, inner, step; };

enum { D, X, W };              // the matrices
enum { HIDDEN, WEIGHTS };      // the products: D·W and Dᵀ·X
constexpr int FURTHER = 11;    // of two terms, the second is scaled by 2^FURTHER

struct State {
    int exponent[3];           // D, X, W: one scale for the matrix, 2^exponent
    int again[3], again_d;     // to be converted again before D·W; D before Dᵀ·X
    int own[2], own_columns[3];  // rows or columns with scales of their own: D in either product; X, W
    int unscale[2];            // the product is left to `finish`
    float alpha[2], one, zero;
    unsigned largest[3];       // bits of the largest finite magnitude
    int recompute[2];          // the product is left to `finish`, all of it, in float32
    int mend[3];               // whether there is anything to do before D·W, before Dᵀ·X, behind it
    float further[2];          // alpha of products with a second term
};

// Maxima are the bits of the largest finite magnitude of a row or column, zeros at first and between them, so
// that each array is whole accesses of a warp. Of matrices in two terms there are tallies in their place
// (qkv_terms.cuh), of D's rows and of columns.
struct Arguments {
    Heads grad[3];             // of query, key, value; a token is (outer, inner)
    long long columns[3];      // of D that they fill; 0 where not wanted
    Rows cos, sin;
    Rows hidden, weight[3];    // weights have their rows in `inner`
    long long wanted[2];       // of HIDDEN and WEIGHTS
    long long tokens, inner, head_dim, rotary, width, hidden_size;
    char* copy[3];             // D, X, W in the operands' dtype
    long long pitch[3];        // bytes from row to row of them
    long long second[3];       // bytes from the first term to the second
    unsigned *d_rows, *d_columns, *x_columns, *w_columns, *x_rows, *w_rows;
    unsigned* largest;         // of D, X, W in two terms; zeros at first
    unsigned* done;            // blocks that have measured, and tiles that are taken; zeros at first
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

// A row of D or X is a token; one of W has itself in `inner`.
struct Row {
    unsigned number, outer, inner;

    DEVICE Row(unsigned number, unsigned outer, unsigned inner) : number(number), outer(outer), inner(inner) {}
    DEVICE Row(const Arguments& a, unsigned number) : number(number) {
        const unsigned n = static_cast<unsigned>(a.inner);
        outer = number / n;
        inner = number % n;
    }
    DEVICE void step(const Arguments& a) {
        ++number;
        if (++inner == static_cast<unsigned>(a.inner)) inner = 0, ++outer;
    }
};
template <class Strides> DEVICE long long row_offset(const Strides& of, const Row& row) {
    return of.outer * row.outer + of.inner * row.inner;
}

// The columns at which a unit's vectors start, and whether there is a second.
struct Unit { unsigned first, second; bool both; };

template <int V> DEVICE unsigned units_of(unsigned columns) { return (columns / V + 1) / 2; }
template <int V> DEVICE Unit unit_of(unsigned columns, unsigned number) {
    const unsigned apart = units_of<V>(columns);
    return {number * V, (number + apart) * V, number + apart < columns / V};
}

// Bytes from a unit's first vector to its second: vectors of several elements have unit strides.
template <int V> struct DistanceOf { using Type = unsigned; };
template <> struct DistanceOf<1> { using Type = long long; };
template <int V> using Distance = typename DistanceOf<V>::Type;

template <class I, int V> using Loaded = Vector<typename I::Storage, V>[2];

template <class T, int V> DEVICE void load_unit(
    Vector<T, V> (&to)[2], const char* at, long long apart, bool both) {
    load<1, true>(to[0], at, 0);
    if (both) load<1, true>(to[1], at + apart, 0);
    else to[1] = {};
}
template <class T, int V> DEVICE void widen(const Vector<T, V> (&from)[2], float (&to)[2 * V]) {
    #pragma unroll
    for (int i = 0; i < 2 * V; ++i) to[i] = to_float(from[i / V].get(i % V));
}

// ---- D ----------------------------------------------------------------------------------------------------

// dx_j = g_j·c_j - σ_j·g_p(j)·s_p(j), and channels past the rotary width as they are.
template <class I, int V> struct Gradients {
    static constexpr bool within = I::interleaved && V > 1;  // partners stand in the same vector
    static constexpr bool shared = I::half_table && within;  // a column of the table serves two channels
    static constexpr int columns = shared ? V / 2 : V;
    static constexpr int in_flight = V > 4 ? 1 : I::two ? 2 : 3;  // rows and their tables, as registers allow
    using Table = Vector<typename I::Table, columns>[2];
    struct Tables { Table c, s; };

    const Arguments& a;
    const char *at, *cos, *sin;
    long long outer, inner;
    Distance<V> apart, cos_apart, sin_apart;
    Unit unit;
    bool turned;

    DEVICE Gradients(const Arguments& a, unsigned number) : a(a) {
        const unsigned head_dim = static_cast<unsigned>(a.head_dim), rotary = static_cast<unsigned>(a.rotary);
        const unsigned pairs = units_of<V>(rotary), each = pairs + units_of<V>(head_dim - rotary);
        const unsigned head = number / each * head_dim, self = number % each;
        const Place place = place_of(a, head);
        turned = self < pairs;
        if (!turned) {
            unit = unit_of<V>(head_dim - rotary, self - pairs);
            unit.first += rotary, unit.second += rotary;
        } else if (I::interleaved && V == 1) unit = {2 * self, 2 * self + 1, true};
        else unit = unit_of<V>(rotary, self);
        turned &= place.part < 2;
        const Heads from = of_part(a.grad, place.part);
        outer = from.outer, inner = from.inner;
        at = from.at + from.head * (place.at / head_dim) + from.step * unit.first;
        apart = static_cast<Distance<V>>(from.step * (unit.second - unit.first));
        const unsigned column = column_of(unit.first), further = column_of(unit.second) - column;
        cos = a.cos.at + a.cos.step * column;
        sin = a.sin.at + a.sin.step * column;
        cos_apart = static_cast<Distance<V>>(a.cos.step * further);
        sin_apart = static_cast<Distance<V>>(a.sin.step * further);
        unit.first += head, unit.second += head;
    }
    DEVICE unsigned column_of(unsigned channel) const {  // of the table
        const unsigned half = static_cast<unsigned>(a.rotary) / 2;
        if (!I::half_table) return channel;
        return I::interleaved ? channel / 2 : channel >= half ? channel - half : channel;
    }
    DEVICE void read(const Row& row, Loaded<I, V>& to) const {
        load_unit(to, at + outer * row.outer + inner * row.inner, apart, unit.both);
    }
    DEVICE void read_tables(const Row& row, Tables& to) const {
        if (!turned) return;
        load_table(to.c, cos + row_offset(a.cos, row), cos_apart);
        load_table(to.s, sin + row_offset(a.sin, row), sin_apart);
    }
    DEVICE void values(const Loaded<I, V>& from, const Tables& tables, float (&to)[2 * V]) const {
        widen(from, to);
        if (!turned) return;
        const Table &c = tables.c, &s = tables.s;
        #pragma unroll
        for (int pair = 0; pair < V; ++pair) {
            const int i = within ? 2 * pair : pair, j = within ? i + 1 : i + V;  // first and second member
            const float g = to[i], h = to[j];
            to[i] = times_plus(g, column(c, i), times(h, column(s, j)));
            to[j] = minus_times(g, column(s, i), times(h, column(c, j)));
        }
    }
    DEVICE void load_table(Table& to, const char* at, long long apart) const {
        load<0, true>(to[0], at, 0);
        if (I::half_table && !I::interleaved) to[1] = to[0];
        else if (!unit.both) to[1] = {};
        else load<0, true>(to[1], at + apart, 0);
    }
    static DEVICE float column(const Table& table, int element) {
        return to_float(table[element / V].get(shared ? element % V / 2 : element % V));
    }
};

// One column of D, element by element.
template <class I> struct GradientColumn {
    const Gradients<I, 1> source;
    const bool second;

    DEVICE GradientColumn(const Arguments& a, unsigned column)
        : source(a, number_of(a, column)), second(source.unit.first != column) {}
    DEVICE float at(const Row& row) const {
        Loaded<I, 1> loaded;
        float x[2];
        source.read(row, loaded);
        typename Gradients<I, 1>::Tables tables = {};
        source.read_tables(row, tables);
        source.values(loaded, tables, x);
        return second ? x[1] : x[0];
    }
    static DEVICE unsigned number_of(const Arguments& a, unsigned column) {  // of the unit it is in
        const unsigned head_dim = static_cast<unsigned>(a.head_dim);
        const unsigned pairs = static_cast<unsigned>(a.rotary) / 2;
        const unsigned rest = units_of<1>(head_dim - 2 * pairs), channel = column % head_dim;
        const unsigned self = channel >= 2 * pairs ? pairs + (channel - 2 * pairs) % rest
                            : I::interleaved ? channel / 2 : channel % pairs;
        return column / head_dim * (pairs + rest) + self;
    }
};

// ---- X and W ----------------------------------------------------------------------------------------------

template <class I, int V> struct Hidden {
    static constexpr int in_flight = 4;
    struct Tables {};
    const Arguments& a;
    Unit unit;
    const char* at;

    DEVICE Hidden(const Arguments& a, unsigned number)
        : a(a), unit(unit_of<V>(static_cast<unsigned>(a.hidden_size), number)),
          at(a.hidden.at + a.hidden.step * unit.first) {}
    DEVICE void read(const Row& row, Loaded<I, V>& to) const {
        load_unit(to, at + row_offset(a.hidden, row), apart(), unit.both);
    }
    DEVICE long long apart() const { return a.hidden.step * (unit.second - unit.first); }
    DEVICE void read_tables(const Row&, Tables&) const {}
    DEVICE void values(const Loaded<I, V>& from, Tables, float (&to)[2 * V]) const { widen(from, to); }
};

template <class I, int V> struct Weights {
    static constexpr int in_flight = 4;
    struct Tables {};
    const Arguments& a;
    Unit unit;

    DEVICE Weights(const Arguments& a, unsigned number)
        : a(a), unit(unit_of<V>(static_cast<unsigned>(a.hidden_size), number)) {}
    DEVICE void read(const Row& row, Loaded<I, V>& to) const {
        const Place place = place_of(a, row.number);
        const Rows from = of_part(a.weight, place.part);
        load_unit(to, first(from, place), from.step * (unit.second - unit.first), unit.both);
    }
    DEVICE const char* first(const Rows& from, const Place& place) const {
        return from.at + from.inner * place.at + from.step * unit.first;
    }
    DEVICE void read_tables(const Row&, Tables&) const {}
    DEVICE void values(const Loaded<I, V>& from, Tables, float (&to)[2 * V]) const { widen(from, to); }
};

// One element of X or W.
template <class I> DEVICE float element_at(const char* at) {
    Vector<typename I::Storage, 1> x;
    load<0, true>(x, at, 0);
    return to_float(x.get(0));
}
template <class I> DEVICE float hidden_at(const Arguments& a, const Row& row, unsigned column) {
    return element_at<I>(a.hidden.at + row_offset(a.hidden, row) + a.hidden.step * column);
}
template <class I> DEVICE float weight_at(const Arguments& a, unsigned row, unsigned column) {
    const Place place = place_of(a, row);
    const Rows from = of_part(a.weight, place.part);
    return element_at<I>(from.at + from.inner * place.at + from.step * column);
}
