// Products of matrices in two float16 terms, for Hopper. First·first is taken over by float32 every 64 terms,
// since a tensor core cuts off where float32 rounds; first·second and second·first, which are 2^-11 of it, stay
// in the tensor cores.
//
// One launch for D·W and Dᵀ·X, a block a multiprocessor. A block takes tiles of 128 x 128 results by a counter,
// those of the longer sums first. Of its three warpgroups two multiply, 64 rows each; a thread of the third has
// the copy engine fill shared memory, some stages ahead.
//
// Behind numbers.cuh, memory.cuh, qkv_inputs.cuh and hopper.cuh.

constexpr unsigned TILE = 128, STAGES = 3;
constexpr unsigned TERM_BYTES = 2 * BOX_BYTES, STAGE_BYTES = 4 * TERM_BYTES;  // left in two terms, right in two
constexpr unsigned MULTIPLIERS = 256;                                         // threads
constexpr unsigned NONE = 0xffffffffu;                                        // no tile

struct Maps { TensorMap d[2], x[2], w[2]; };      // first and second terms
struct Results { float* hidden; float* weights[3]; };

// A product's tiles: their number, how many are side by side, boxes of the sums.
struct Extent {
    unsigned tiles, across, boxes;
    DEVICE Extent(const Arguments& a, int product) {
        const unsigned tokens = static_cast<unsigned>(a.tokens), width = static_cast<unsigned>(a.width);
        const unsigned rows = product == HIDDEN ? tokens : width, terms = product == HIDDEN ? width : tokens;
        across = (static_cast<unsigned>(a.hidden_size) + TILE - 1) / TILE;
        tiles = a.wanted[product] ? (rows + TILE - 1) / TILE * across : 0;
        boxes = (terms + BOX - 1) / BOX;
    }
};

struct Tile {
    int product;
    unsigned row, column, boxes;
};

struct Tiles {
    Extent of[2];
    int longer;
    DEVICE explicit Tiles(const Arguments& a) : of{Extent(a, HIDDEN), Extent(a, WEIGHTS)} {
        longer = of[WEIGHTS].boxes > of[HIDDEN].boxes ? WEIGHTS : HIDDEN;
    }
    DEVICE unsigned count() const { return of[0].tiles + of[1].tiles; }
    DEVICE Tile at(unsigned number) const {
        const unsigned first = longer == WEIGHTS ? of[1].tiles : of[0].tiles;
        const bool in_first = number < first;
        const int product = in_first ? longer : 1 - longer;
        const unsigned self = in_first ? number : number - first, across = of[0].across;
        const unsigned boxes = product == HIDDEN ? of[0].boxes : of[1].boxes;
        return {product, self / across * TILE, self % across * TILE, boxes};
    }
};

// Shared memory: stages, and barriers of each.
struct Pipe {
    unsigned stages, full, empty;
    DEVICE unsigned stage(unsigned i) const { return stages + i * STAGE_BYTES; }
    DEVICE unsigned is_full(unsigned i) const { return full + 8 * i; }
    DEVICE unsigned is_empty(unsigned i) const { return empty + 8 * i; }
};

struct Turn {  // through the stages
    unsigned stage = 0, parity = 0;
    DEVICE void step() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The copy engine's thread. The tile's number goes with every stage; at the end a stage without one.
DEVICE void feed(const Arguments& a, const Maps& maps, const Pipe& pipe, volatile unsigned* numbers) {
    const Tiles tiles(a);
    const unsigned count = tiles.count();
    unsigned* ticket = a.done + 1;
    Turn turn;
    for (unsigned number = atomicAdd(ticket, 1u); number < count;) {
        const unsigned next = atomicAdd(ticket, 1u);
        const Tile tile = tiles.at(number);
        const bool hidden = tile.product == HIDDEN;
        for (unsigned box = 0; box < tile.boxes; ++box, turn.step()) {
            const unsigned full = pipe.is_full(turn.stage), depth = box * BOX;
            unsigned to = pipe.stage(turn.stage);
            barrier_wait(pipe.is_empty(turn.stage), turn.parity ^ 1);
            numbers[turn.stage] = number;
            barrier_expect(full, STAGE_BYTES);
            #pragma unroll
            for (int term = 0; term < 2; ++term)
                #pragma unroll
                for (unsigned i = 0; i < TILE; i += BOX, to += BOX_BYTES)
                    load_box(to, maps.d[term], full, hidden ? depth : tile.row + i,
                             hidden ? tile.row + i : depth);
            #pragma unroll
            for (int term = 0; term < 2; ++term)
                #pragma unroll
                for (unsigned i = 0; i < TILE; i += BOX, to += BOX_BYTES)
                    load_box(to, hidden ? maps.w[term] : maps.x[term], full, tile.column + i, depth);
        }
        number = next;
    }
    barrier_wait(pipe.is_empty(turn.stage), turn.parity ^ 1);
    numbers[turn.stage] = NONE;
    barrier_arrive(pipe.is_full(turn.stage));
}

// A tile's sums, from its first stage, which is full, to its last; `small` are the products with a second term.
template <int BY_COLUMNS> DEVICE void sum_up(
    const Pipe& pipe, Turn& turn, unsigned group, unsigned boxes, float (&sums)[SUMS], float (&small)[SUMS]) {
    constexpr unsigned step = BY_COLUMNS ? DOWN : ALONG;
    const bool signals = threadIdx.x % 128 == 0;
    float part[SUMS];
    #pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = small[i] = part[i] = 0.0f;
    unsigned before = 0;
    for (unsigned box = 0; box < boxes; ++box, turn.step()) {
        barrier_wait(pipe.is_full(turn.stage), turn.parity);
        const unsigned at = pipe.stage(turn.stage);
        const unsigned long long left = descriptor(at + group * BOX_BYTES);
        const unsigned long long left_second = descriptor(at + TERM_BYTES + group * BOX_BYTES);
        const unsigned long long right = descriptor(at + 2 * TERM_BYTES);
        const unsigned long long right_second = descriptor(at + 3 * TERM_BYTES);
        multiply_begin();
        multiply<BY_COLUMNS, 0>(part, left, right);
        #pragma unroll
        for (unsigned i = 1; i < BOX / 16; ++i) multiply<BY_COLUMNS, 1>(part, left + i * step, right + i * DOWN);
        multiply_end();
        #pragma unroll
        for (unsigned i = 0; i < BOX / 16; ++i) {
            multiply<BY_COLUMNS, 1>(small, left + i * step, right_second + i * DOWN);
            multiply<BY_COLUMNS, 1>(small, left_second + i * step, right + i * DOWN);
        }
        multiply_end();
        multiply_wait<1>();  // the part, and all of the stage before
        if (box && signals) barrier_arrive(pipe.is_empty(before));
        before = turn.stage;
        #pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] = plus(sums[i], part[i]);
    }
    multiply_wait<0>();
    if (signals) barrier_arrive(pipe.is_empty(before));
}

DEVICE float* result_row(const Arguments& a, const Results& results, int product, unsigned row) {
    if (product == HIDDEN) return row < a.tokens ? results.hidden + row * a.hidden_size : nullptr;
    if (row >= a.width) return nullptr;
    const Place place = place_of(a, row);
    float* of = of_part(results.weights, place.part);
    return of ? of + place.at * a.hidden_size : nullptr;
}

// Columns come in pairs: a thread's neighbours. ADD: to what is there. Nothing where `mend` computes it anew.
template <bool ADD> DEVICE void write_tile(
    const Arguments& a, const Results& results, const Tile& tile, unsigned group, const float (&sums)[SUMS],
    const float (&small)[SUMS]) {
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const unsigned columns = static_cast<unsigned>(a.hidden_size);
    const unsigned row = tile.row + group * BOX + warp * 16 + lane / 4, column = tile.column + lane % 4 * 2;
    if (a.state->recompute[tile.product]) return;
    const float alpha = a.state->alpha[tile.product];
    constexpr float second = 1.0f / (1 << FURTHER);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float* to = result_row(a, results, tile.product, row + 8 * half);
        if (!to) continue;
        #pragma unroll
        for (unsigned i = 0; i < TILE / 8; ++i) {
            const int j = 4 * i + 2 * half;
            float2 both = {times(times_plus(small[j], second, sums[j]), alpha),
                           times(times_plus(small[j + 1], second, sums[j + 1]), alpha)};
            if (column + 8 * i >= columns) continue;
            float2* at = reinterpret_cast<float2*>(to + column + 8 * i);
            if constexpr (ADD) {
                const float2 before = *at;
                both = {plus(both.x, before.x), plus(both.y, before.y)};
            }
            *at = both;
        }
    }
}

template <bool ADD> DEVICE void multiply_tiles(
    const Arguments& a, const Results& results, const Pipe& pipe, volatile unsigned* numbers) {
    const Tiles tiles(a);
    const unsigned group = threadIdx.x / 128;
    Turn turn;
    while (true) {
        barrier_wait(pipe.is_full(turn.stage), turn.parity);
        const unsigned number = numbers[turn.stage];
        if (number == NONE) return;
        warpgroup_sync(group);  // all have read it before one of them gives the stage back
        const Tile tile = tiles.at(number);
        float sums[SUMS], small[SUMS];
        if (tile.product == HIDDEN) sum_up<0>(pipe, turn, group, tile.boxes, sums, small);
        else sum_up<1>(pipe, turn, group, tile.boxes, sums, small);
        write_tile<ADD>(a, results, tile, group, sums, small);
    }
}

template <bool ADD> DEVICE void multiply_all(
    const Arguments& a, const Results& results, const Maps& maps) {
    extern __shared__ unsigned char dynamic[];
    __shared__ alignas(8) unsigned long long barriers[2][STAGES];
    __shared__ unsigned numbers[STAGES];
    const Pipe pipe = {(shared_address(dynamic) + 1023) / 1024 * 1024, shared_address(barriers[0]),
                       shared_address(barriers[1])};
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < STAGES; ++i) {
            barrier_init(pipe.is_full(i), 1);
            barrier_init(pipe.is_empty(i), 2);  // warpgroups
        }
        barriers_are_ready();
    }
    __syncthreads();
    const unsigned group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (group == 2) {
        fewer_registers<40>();
        if (threadIdx.x == MULTIPLIERS) feed(a, maps, pipe, numbers);
    } else {
        more_registers<232>();
        multiply_tiles<ADD>(a, results, pipe, numbers);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
qkv_multiply(const Arguments a, const Results results, const __grid_constant__ Maps maps) {
    multiply_all<false>(a, results, maps);
}
extern "C" __global__ void __launch_bounds__(384, 1)
qkv_multiply_add(const Arguments a, const Results results, const __grid_constant__ Maps maps) {
    multiply_all<true>(a, results, maps);
}
