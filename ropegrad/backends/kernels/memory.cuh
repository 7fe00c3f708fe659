// Vectors of elements between memory and registers.

// Loads and stores are volatile, so they stay in the order in which they are written here: all loads of a
// turn before the first use, and every element read before it is written, should an output be an input.
// HINT is a sum. 1: loads pass L1 by. 2: what is stored leaves L2 first.
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
    if (HINT & 1) asm volatile("ld.global.L1::no_allocate" SUFFIX __VA_ARGS__ : "memory");               \
    else asm volatile("ld.global" SUFFIX __VA_ARGS__ : "memory");
#define STORE(SUFFIX, ...)                                                                               \
    if (HINT & 2) asm volatile("st.global.cs" SUFFIX :: __VA_ARGS__ : "memory");                         \
    else asm volatile("st.global" SUFFIX :: __VA_ARGS__ : "memory");
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

// DENSE: unit stride, and aligned to the vector or to 16 bytes; else element by element, `step` bytes apart.
template <int HINT, bool DENSE, class T, int N>
DEVICE void load(Vector<T, N>& to, const char* from, long long step) {
    using V = Vector<T, N>;
    if constexpr (DENSE) {
        #pragma unroll
        for (int at = 0; at < V::bytes; at += V::access)
            load_words<HINT, V::access>(to.word + at / 4, from + at);
    } else {
        to = {};
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            Vector<T, 1> one;
            load<HINT, true>(one, from + i * step, step);
            to.set(i, one.get(0));
        }
    }
}

template <int HINT, bool DENSE, class T, int N>
DEVICE void store(char* to, const Vector<T, N>& from, long long step) {
    using V = Vector<T, N>;
    if constexpr (DENSE) {
        #pragma unroll
        for (int at = 0; at < V::bytes; at += V::access)
            store_words<HINT, V::access>(to + at, from.word + at / 4);
    } else {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            Vector<T, 1> one = {};
            one.set(0, from.get(i));
            store<HINT, true>(to + i * step, one, step);
        }
    }
}
