// RoPE backward in one pass: every input is read once and every output written once.
//
// A row is one head of one token. A thread owns two vectors of `vector` channels of its rows, a fixed distance
// apart (channels j and j + R/2 where the pairing is "half", so both members of a pair; whole pairs where it
// is "interleaved"). threadIdx.x and blockIdx.y count these lanes, threadIdx.y and blockIdx.x tokens,
// threadIdx.z the groups that share a token's rows: the first ones q's heads, the others k's, in turns.
//
// Table gradients are summed over a thread's rows in registers, then over groups, in their order, through
// shared memory. No atomics: the same launch gives the same bits. Where a table is shared by the batch and its
// gradient is wanted, a block walks over the batch. Without table gradients blockIdx.z splits the rows.
//
// What is compiled is said by a struct `Instance` behind this text (see kernel.py): the dtypes Storage, Table
// and Compute, the vector, what is wanted. Strides and sizes are run-time values, 64 bits wide.
//
// Products and sums are PTX instructions, since CuPy compiles with -ftz=true: C++ would flush subnormals.
// With ROPEGRAD_ON_CPU they are plain C++, for running this very text without a GPU.

#define DEVICE __device__ __forceinline__

struct Float16 { unsigned short bits; };
struct BFloat16 { unsigned short bits; };

// ---- arithmetic ------------------------------------------------------------------------------------------

template <class To, class From> DEVICE To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From), "the same bits as another type");
    To result;
    memcpy(&result, &x, sizeof result);
    return result;
}

#ifdef ROPEGRAD_ON_CPU
template <class A> DEVICE A times(A a, A b) { return a * b; }
template <class A> DEVICE A plus(A a, A b) { return a + b; }
template <class A> DEVICE A times_plus(A a, A b, A c) { return __builtin_fma(a, b, c); }
template <> inline float times_plus(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
template <class A> DEVICE A minus_times(A a, A b, A c) { return times_plus(-a, b, c); }
DEVICE float to_float(Float16 x) { return float(bits_as<_Float16>(x)); }
DEVICE double to_double(float x) { return x; }
DEVICE Float16 to_float16(float x) { return bits_as<Float16>(_Float16(x)); }
DEVICE BFloat16 to_bfloat16(float x) {
    const unsigned b = bits_as<unsigned>(x);
    if (x != x) return {static_cast<unsigned short>(0x7fff)};
    return {static_cast<unsigned short>((b + 0x7fff + (b >> 16 & 1)) >> 16)};
}
DEVICE float toward_zero(double x) {
    float r = float(x);
    return __builtin_fabs(double(r)) > __builtin_fabs(x) ? __builtin_nextafterf(r, 0.0f) : r;
}
DEVICE float nearest(double x) { return float(x); }
#else
DEVICE float times(float a, float b) {
    float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
DEVICE float plus(float a, float b) {
    float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r;
}
DEVICE float times_plus(float a, float b, float c) {  // a·b + c
    float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r;
}
DEVICE float minus_times(float a, float b, float c) {  // c - a·b
    float r;
    asm("{ .reg .f32 n; neg.f32 n, %1; fma.rn.f32 %0, n, %2, %3; }" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}
DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
DEVICE double times_plus(double a, double b, double c) { return __fma_rn(a, b, c); }
DEVICE double minus_times(double a, double b, double c) { return __fma_rn(-a, b, c); }
DEVICE float to_float(Float16 x) {
    float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r;
}
DEVICE double to_double(float x) { double r; asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x)); return r; }
DEVICE Float16 to_float16(float x) {
    Float16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r;
}
DEVICE BFloat16 to_bfloat16(float x) {  // the instruction that makes one alone needs sm_90
    unsigned r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(0.0f), "f"(x));
    return {static_cast<unsigned short>(r)};
}
DEVICE float toward_zero(double x) { float r; asm("cvt.rz.f32.f64 %0, %1;" : "=f"(r) : "d"(x)); return r; }
DEVICE float nearest(double x) { float r; asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x)); return r; }
#endif

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(BFloat16 x) { return bits_as<float>(static_cast<unsigned>(x.bits) << 16); }

// Any of the four dtypes as the compute dtype A: exact.
template <class A> struct Wide;
template <> struct Wide<float> {
    template <class T> static DEVICE float from(T x) { return to_float(x); }
};
template <> struct Wide<double> {
    template <class T> static DEVICE double from(T x) { return to_double(to_float(x)); }
    static DEVICE double from(double x) { return x; }
};

// The compute dtype as T, rounded once. From float64 by way of a float32 that is rounded to odd: its last bit
// keeps what was cut off, so that the second rounding cannot be misled by the first.
DEVICE float rounded_to_odd(double x) {
    const float cut = toward_zero(x);
    return to_double(cut) == x ? cut : bits_as<float>(bits_as<unsigned>(cut) | 1u);
}
template <class T> struct Narrow;
template <> struct Narrow<double> { static DEVICE double from(double x) { return x; } };
template <> struct Narrow<float> {
    static DEVICE float from(float x) { return x; }
    static DEVICE float from(double x) { return nearest(x); }
};
template <> struct Narrow<Float16> {
    static DEVICE Float16 from(float x) { return to_float16(x); }
    static DEVICE Float16 from(double x) { return to_float16(rounded_to_odd(x)); }
};
template <> struct Narrow<BFloat16> {
    static DEVICE BFloat16 from(float x) { return to_bfloat16(x); }
    static DEVICE BFloat16 from(double x) { return to_bfloat16(rounded_to_odd(x)); }
};

// ---- memory ----------------------------------------------------------------------------------------------

// Loads and stores are volatile, so they stay in the order in which they are written here: all loads of a
// turn before the first use, and every element read before it is written, should an output be an input.
// HINT 0: none. 1: loads pass L1 by, stores leave L2 first. 2: as 1, and loads fetch 256 bytes into L2.
#ifdef ROPEGRAD_ON_CPU
template <int BYTES> struct alignas(BYTES) Access { unsigned char at[BYTES]; };
template <int HINT, int BYTES> DEVICE void load_words(unsigned* to, const void* from) {
    const Access<BYTES> words = *static_cast<const Access<BYTES>*>(from);
    memcpy(to, &words, BYTES);
}
template <int HINT, int BYTES> DEVICE void store_words(void* to, const unsigned* from) {
    Access<BYTES> words;
    memcpy(&words, from, BYTES);
    *static_cast<Access<BYTES>*>(to) = words;
}
#else
#define LOAD(SUFFIX, ...)                                                                                \
    if (HINT == 0) asm volatile("ld.global" SUFFIX __VA_ARGS__ : "memory");                              \
    else if (HINT == 1) asm volatile("ld.global.L1::no_allocate" SUFFIX __VA_ARGS__ : "memory");         \
    else asm volatile("ld.global.L1::no_allocate.L2::256B" SUFFIX __VA_ARGS__ : "memory");
#define STORE(SUFFIX, ...)                                                                               \
    if (HINT == 0) asm volatile("st.global" SUFFIX :: __VA_ARGS__ : "memory");                           \
    else asm volatile("st.global.cs" SUFFIX :: __VA_ARGS__ : "memory");
template <int HINT, int BYTES> DEVICE void load_words(unsigned* w, const void* from) {
    if constexpr (BYTES == 16) {
        LOAD(".v4.u32 {%0, %1, %2, %3}, [%4];", : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(from))
    } else if constexpr (BYTES == 8) {
        LOAD(".v2.u32 {%0, %1}, [%2];", : "=r"(w[0]), "=r"(w[1]) : "l"(from))
    } else if constexpr (BYTES == 4) {
        LOAD(".u32 %0, [%1];", : "=r"(w[0]) : "l"(from))
    } else {
        unsigned short half;
        LOAD(".u16 %0, [%1];", : "=h"(half) : "l"(from))
        w[0] = half;
    }
}
template <int HINT, int BYTES> DEVICE void store_words(void* to, const unsigned* w) {
    if constexpr (BYTES == 16) {
        STORE(".v4.u32 [%0], {%1, %2, %3, %4};", "l"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]))
    } else if constexpr (BYTES == 8) {
        STORE(".v2.u32 [%0], {%1, %2};", "l"(to), "r"(w[0]), "r"(w[1]))
    } else if constexpr (BYTES == 4) {
        STORE(".u32 [%0], %1;", "l"(to), "r"(w[0]))
    } else {
        STORE(".u16 [%0], %1;", "l"(to), "h"(static_cast<unsigned short>(w[0])))
    }
}
#endif

// N consecutive elements as they are in memory.
template <class T, int N> struct Vector {
    static constexpr int bytes = N * sizeof(T), access = bytes < 16 ? bytes : 16;
    unsigned word[(bytes + 3) / 4];

    DEVICE T get(int i) const {
        if constexpr (sizeof(T) == 8)
            return bits_as<T>(word[2 * i] | static_cast<unsigned long long>(word[2 * i + 1]) << 32);
        else if constexpr (sizeof(T) == 4) return bits_as<T>(word[i]);
        else return {static_cast<unsigned short>(word[i / 2] >> i % 2 * 16)};
    }
    DEVICE void set(int i, T x) {  // once an element, of a vector that was zero
        if constexpr (sizeof(T) == 8) {
            const unsigned long long both = bits_as<unsigned long long>(x);
            word[2 * i] = static_cast<unsigned>(both);
            word[2 * i + 1] = static_cast<unsigned>(both >> 32);
        } else if constexpr (sizeof(T) == 4) word[i] = bits_as<unsigned>(x);
        else word[i / 2] |= static_cast<unsigned>(x.bits) << i % 2 * 16;
    }
};

// DENSE: unit stride, and aligned to the vector or to 16 bytes; otherwise element by element.
template <int HINT, bool DENSE, class T, int N>
DEVICE void load(Vector<T, N>& to, const T* from, long long stride) {
    using V = Vector<T, N>;
    if constexpr (DENSE) {
        #pragma unroll
        for (int at = 0; at < V::bytes; at += V::access)
            load_words<HINT, V::access>(to.word + at / 4, from + at / sizeof(T));
    } else {
        to = {};
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            Vector<T, 1> one;
            load<HINT, true>(one, from + i * stride, 1);
            to.set(i, one.get(0));
        }
    }
}

template <int HINT, bool DENSE, class T, int N>
DEVICE void store(T* to, const Vector<T, N>& from, long long stride) {
    using V = Vector<T, N>;
    if constexpr (DENSE) {
        #pragma unroll
        for (int at = 0; at < V::bytes; at += V::access)
            store_words<HINT, V::access>(to + at / sizeof(T), from.word + at / 4);
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            Vector<T, 1> one = {};
            one.set(0, from.get(i));
            store<HINT, true>(to + i * stride, one, 1);
        }
    }
}

// ---- the problem -----------------------------------------------------------------------------------------

struct Heads { void* at; long long batch, head, token, channel; };  // strides in elements
struct Rows { void* at; long long batch, token, column; };

struct Arguments {
    Heads grad_q, grad_k, q, k, out_q, out_k;  // `at` is null where an output is not wanted
    Rows cos, sin, grad_cos, grad_sin;
    long long heads, kv_heads, seq;   // 0 heads: that side is absent
    long long groups_q;               // the first groups of a block share q's heads, the others k's
    long long tokens, walk;           // tokens of all blocks; batches that each of them walks over
    long long vectors, rest;          // of a row: rotated vectors, vectors that pass through
    long long own_sine;               // adjoint="paired"
};

// Elements of a thread are numbered through both its vectors, pairs 0 … vector-1. A half table has a column a
// pair, a full one a column an element.
template <class I> struct Shape {
    static constexpr int V = I::vector;
    static constexpr bool one_run = I::half_table && !I::interleaved;  // table columns of both vectors
    static constexpr int runs = one_run ? 1 : 2;
    static constexpr int columns = I::half_table && I::interleaved ? V / 2 : V;  // in a run
    static constexpr int slots = runs * columns;
    static DEVICE constexpr int first(int pair) { return I::interleaved ? 2 * pair : pair; }
    static DEVICE constexpr int second(int pair) { return I::interleaved ? 2 * pair + 1 : pair + V; }
    static DEVICE constexpr int column(int element, int pair) { return I::half_table ? pair : element; }
};

// A thread's place: its token, whether there is one, and which of its two vectors exist.
struct Place { int batch, token, lane; bool inside, first, second; };

template <class I> DEVICE Place place_of(const Arguments& a, long long number, int lane) {
    const bool inside = number < a.tokens;
    if (!inside) number = 0;
    const bool small = number <= 0xffffffff;
    const long long batch = small ? static_cast<unsigned>(number) / static_cast<unsigned>(a.seq) : number / a.seq;
    return {static_cast<int>(batch), static_cast<int>(number - batch * a.seq), lane, inside,
            inside && lane < I::lanes, inside && lane < I::lanes && lane + I::lanes < a.vectors};
}

// ---- one row ---------------------------------------------------------------------------------------------

template <class I> using RowOf = Vector<typename I::Storage, I::vector>[2];

template <class I> DEVICE typename I::Compute element(const RowOf<I>& row, int i) {
    return Wide<typename I::Compute>::from(row[i / I::vector].get(i % I::vector));
}

template <class I> DEVICE void load_row(
    RowOf<I>& row, const typename I::Storage* at, long long apart, long long channel, bool first, bool second) {
    if (first) load<I::hint, I::dense>(row[0], at, channel);
    else row[0] = {};
    if (second) load<I::hint, I::dense>(row[1], at + apart, channel);
    else row[1] = {};
}

template <class I> struct Sums {
    typename I::Compute cos[Shape<I>::slots], sin[Shape<I>::slots];
};

// dcos_j += g_j·x_j and dsin_j += σ_j·g_j·x_p(j)
template <class I> DEVICE void add_products(Sums<I>& sums, const RowOf<I>& g, const RowOf<I>& x) {
    using S = Shape<I>;
    #pragma unroll
    for (int pair = 0; pair < I::vector; ++pair) {
        const int f = S::first(pair), s = S::second(pair), cf = S::column(f, pair), cs = S::column(s, pair);
        const typename I::Compute g1 = element<I>(g, f), g2 = element<I>(g, s);
        const typename I::Compute x1 = element<I>(x, f), x2 = element<I>(x, s);
        if constexpr (I::cos) {
            sums.cos[cf] = times_plus(g1, x1, sums.cos[cf]);
            sums.cos[cs] = times_plus(g2, x2, sums.cos[cs]);
        }
        if constexpr (I::sin) {
            sums.sin[cf] = minus_times(g1, x2, sums.sin[cf]);
            sums.sin[cs] = times_plus(g2, x1, sums.sin[cs]);
        }
    }
}

// dx_j = g_j·c_j - σ_j·g_p(j)·s; `tables.sin` already holds the sine that belongs into element j's gradient
template <class I> DEVICE void rotate_back(RowOf<I>& row, const Sums<I>& tables, const RowOf<I>& g, const RowOf<I>& old) {
    using S = Shape<I>;
    using T = typename I::Storage;
    constexpr int V = I::vector;
    #pragma unroll
    for (int pair = 0; pair < V; ++pair) {
        const int f = S::first(pair), s = S::second(pair), cf = S::column(f, pair), cs = S::column(s, pair);
        const typename I::Compute g1 = element<I>(g, f), g2 = element<I>(g, s);
        typename I::Compute d1 = times_plus(g1, tables.cos[cf], times(g2, tables.sin[cf]));
        typename I::Compute d2 = minus_times(g1, tables.sin[cs], times(g2, tables.cos[cs]));
        if constexpr (I::add) {
            d1 = plus(d1, element<I>(old, f));
            d2 = plus(d2, element<I>(old, s));
        }
        row[f / V].set(f % V, Narrow<T>::from(d1));
        row[s / V].set(s % V, Narrow<T>::from(d2));
    }
}

// ---- all rows of a thread --------------------------------------------------------------------------------

// One array as a thread sees it in one batch: its first channel in the token's first row.
template <class I> struct Stream {
    typename I::Storage* at;
    long long head, step;

    DEVICE Stream(const Heads& q, const Heads& k, bool of_k, int batch, int token, int channel)
        : head(of_k ? k.head : q.head), step(I::dense ? 1 : of_k ? k.channel : q.channel) {
        at = static_cast<typename I::Storage*>(of_k ? k.at : q.at) + (of_k ? k.batch : q.batch) * batch
            + (of_k ? k.token : q.token) * token + step * channel;
    }
    DEVICE typename I::Storage* row(int r) const { return at + head * r; }
};

// Channels past the rotary width: the same bits.
template <class I> DEVICE void pass_through(
    const typename I::Storage* from, long long from_step, typename I::Storage* to, long long to_step, int rest, int lane) {
    using T = typename I::Storage;
    constexpr int V = I::dense ? I::vector : 1;
    for (int v = lane; v < rest; v += gridDim.y * blockDim.x) {
        Vector<T, V> x;
        load<I::hint, I::dense>(x, from + v * V * from_step, from_step);
        if constexpr (I::add) {
            using Compute = Wide<typename I::Compute>;
            Vector<T, V> old, sum = {};
            load<I::hint, I::dense>(old, to + v * V * to_step, to_step);
            #pragma unroll
            for (int i = 0; i < V; ++i)
                sum.set(i, Narrow<T>::from(plus(Compute::from(x.get(i)), Compute::from(old.get(i)))));
            x = sum;
        }
        store<I::hint, I::dense>(to + v * V * to_step, x, to_step);
    }
}

// The rows of one batch, `rows` of them in flight.
template <class I> DEVICE void rows_of_batch(
    const Arguments& a, const Place& place, int batch, const Sums<I>& tables, Sums<I>& sums) {
    constexpr int U = I::rows, apart = I::lanes * I::vector;
    constexpr bool products = I::cos || I::sin;
    const bool of_k = threadIdx.z >= a.groups_q;
    const int rows = of_k ? a.kv_heads : a.heads, groups = of_k ? blockDim.z - a.groups_q : a.groups_q;
    const int start = place.lane * I::vector;
    const Stream<I> grad(a.grad_q, a.grad_k, of_k, batch, place.token, start);
    const Stream<I> x(a.q, a.k, of_k, batch, place.token, start);
    const Stream<I> out(a.out_q, a.out_k, of_k, batch, place.token, start);
    const bool rotate = I::rotate && (of_k ? a.out_k.at : a.out_q.at) != nullptr;
    int row = threadIdx.z - (of_k ? a.groups_q : 0) + blockIdx.z * groups * U;
    for (; row < rows; row += gridDim.z * groups * U) {
        RowOf<I> gs[U], xs[U], olds[U];
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * groups;
            const bool first = place.first && r < rows, second = place.second && r < rows;
            load_row<I>(gs[u], grad.row(r), apart * grad.step, grad.step, first, second);
            if constexpr (products) load_row<I>(xs[u], x.row(r), apart * x.step, x.step, first, second);
            if constexpr (I::rotate && I::add)
                load_row<I>(olds[u], out.row(r), apart * out.step, out.step, first && rotate, second && rotate);
        }
        #pragma unroll
        for (int u = 0; u < U; ++u) {
            const int r = row + u * groups;
            if constexpr (products) add_products<I>(sums, gs[u], xs[u]);
            if constexpr (I::rotate) {
                if (!rotate || r >= rows) continue;
                RowOf<I> made = {};
                rotate_back<I>(made, tables, gs[u], olds[u]);
                if (place.first) store<I::hint, I::dense>(out.row(r), made[0], out.step);
                if (place.second) store<I::hint, I::dense>(out.row(r) + apart * out.step, made[1], out.step);
                if constexpr (I::rest) {
                    const int skipped = static_cast<int>(a.vectors) * I::vector - start;
                    pass_through<I>(grad.row(r) + skipped * grad.step, grad.step,
                                    out.row(r) + skipped * out.step, out.step, a.rest, place.lane);
                }
            }
        }
    }
}

// ---- tables ----------------------------------------------------------------------------------------------

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

// Sums over the groups of a block, in their order, into the tables' gradients.
template <class I> DEVICE void write_tables(const Arguments& a, const Sums<I>& sums) {
    using S = Shape<I>;
    using C = typename I::Compute;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    C* shared = reinterpret_cast<C*>(shared_memory);
    const unsigned members = blockDim.x * blockDim.y, threads = members * blockDim.z;
    const unsigned stride = slot_stride<I>(threads);
    const unsigned self = threadIdx.x + blockDim.x * threadIdx.y + members * threadIdx.z;
    #pragma unroll
    for (int slot = 0; slot < S::slots; ++slot) {
        if constexpr (I::cos) shared[slot * stride + self] = sums.cos[slot];
        if constexpr (I::sin) shared[(slot + (I::cos ? S::slots : 0)) * stride + self] = sums.sin[slot];
    }
    __syncthreads();
    const unsigned run_columns = blockDim.x * S::columns, row_columns = S::runs * run_columns;
    const unsigned all = row_columns * blockDim.y * (I::cos + I::sin);
    for (unsigned at = self; at < all; at += threads) {
        const unsigned row = at / row_columns, run = at % row_columns / run_columns;
        const unsigned lane = at % run_columns / S::columns, i = at % S::columns;
        const bool is_sin = !I::cos || row >= blockDim.y;
        const unsigned y = row - (I::cos && is_sin ? blockDim.y : 0);
        const unsigned slot = run * S::columns + i + (I::cos && is_sin ? S::slots : 0);
        const C* terms = shared + slot * stride + lane + blockDim.x * y;
        C sum = terms[0];
        for (unsigned group = 1; group < blockDim.z; ++group) sum = plus(sum, terms[group * members]);
        const Place place = place_of<I>(a, blockIdx.x * static_cast<long long>(blockDim.y) + y,
                                     blockIdx.y * blockDim.x + lane);
        if (run ? place.second : place.first) {
            const long long column = (place.lane + run * I::lanes) * S::columns + i;
            write_column<I>(is_sin ? a.grad_sin.at : a.grad_cos.at, is_sin ? a.grad_sin.batch : a.grad_cos.batch,
                            is_sin ? a.grad_sin.token : a.grad_cos.token,
                            is_sin ? a.grad_sin.column : a.grad_cos.column, place, column, sum);
        }
    }
}

// ---- the kernel ------------------------------------------------------------------------------------------

template <class I> DEVICE void rope_backward_of(const Arguments& a) {
    const Place place = place_of<I>(a, blockIdx.x * static_cast<long long>(blockDim.y) + threadIdx.y,
                                 blockIdx.y * blockDim.x + threadIdx.x);
    Sums<I> tables, sums = {};
    if constexpr (I::rotate) {
        load_table<I>(tables.cos, a.cos, a, place);
        load_table<I>(tables.sin, a.sin, a, place);
        exchange_sines<I>(a, tables);
    }
    if (place.inside)
        for (int batch = place.batch; batch < place.batch + a.walk; ++batch)
            rows_of_batch<I>(a, place, batch, tables, sums);
    if constexpr (I::cos || I::sin) write_tables<I>(a, sums);
}
