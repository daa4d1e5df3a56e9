// Radix sort: positions in ascending order and, for each, the row that it came from. Stable, by one launch.
//
// Stages:
//   count_digits   how often each digit of each pass occurs, in one reading of the positions
//   sort_pass      once for each digit of 8 bits, the lowest first: the pairs of position and row in the order of
//                  that digit, by one reading and one writing
//
// A tile of a pass publishes how often it has each digit, and looks back over the tiles before it, one thread for
// each digit, which reads the counts of WINDOW tiles at once. Deterministic: the result is the only stable one.
//
// Measured on an H200, for a million positions of 24 bits: WINDOW 8 is faster than 4 and 16, ballots are faster than
// __match_any_sync where digits differ, and tiles of 16 positions a thread faster than of 8 or 12.
//
// Lower bound: a pass reads and writes each pair once, 16 bytes for 32-bit positions; the first reads no rows, for
// they are the numbers of its threads. Counting reads the positions once more. The counts of tiles add 1 KiB for
// each tile and pass.
//
// Source: Adinets and Merrill, "Onesweep: A Faster Least Significant Digit Radix Sort for GPUs", 2022
// (https://arxiv.org/abs/2206.01784).
#pragma once

#include "stages.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int WARPS = THREADS / WARP;
constexpr int DIGIT_BITS = 8;  // zenps.kernels.gpu.radix_sort.DIGIT_BITS
constexpr int RADIX = 1 << DIGIT_BITS;
constexpr int WINDOW = 8;  // tiles that a thread looks back over at once

static_assert(THREADS == RADIX, "a thread for each digit");
static_assert(WARPS >= sizeof(int64), "shared memory for a digit of each warp is enough for one of each pass");

// Positions of a thread: shared memory holds no larger tile of 64-bit ones.
template <typename Position>
constexpr int ITEMS_OF = sizeof(Position) == sizeof(int32) ? 16 : 12;  // zenps.kernels.gpu.radix_sort.ITEMS

// A sort by the lowest `bits` bits, as zenps.kernels.gpu.radix_sort.RadixSort describes it.
template <typename Position>
struct RadixSort {
    static constexpr int ITEMS = ITEMS_OF<Position>, TILE = THREADS * ITEMS;

    const Position* positions;  // as they are given
    int64 count, tiles, bits, passes;
    uint32* histograms;  // of each pass, RADIX counts, zeroed
    uint32* counts;      // of each pass and tile, RADIX counts, zeroed
    uint64* outside;     // becomes 1 if a position is negative
    Position* sorted[2];  // written by the passes in turn, the last one into the first
    int32* order[2];

    __device__ const Position* result() const { return sorted[0]; }
};

// ---------------------------------------------------------------------------------------------------------
// Digits

template <typename Position>
__device__ __forceinline__ uint32 digit_of(Position position, int64 shift, uint32 mask) {
    if (sizeof(Position) > sizeof(uint32)) return uint32(uint64(position) >> shift) & mask;
    return uint32(position) >> shift & mask;
}

// The bits of the digit at `shift`: fewer in the last pass.
__device__ __forceinline__ uint32 digit_mask(int64 bits, int64 shift) {
    return (1u << min_of(bits - shift, DIGIT_BITS)) - 1;
}

// The lanes of the warp with this digit, as bits. All lanes take part.
__device__ __forceinline__ uint32 lanes_alike(uint32 digit) {
    uint32 alike = ALL_LANES;
    #pragma unroll
    for (int bit = 0; bit < DIGIT_BITS; ++bit) {
        const bool is_set = digit >> bit & 1;
        const uint32 set = __ballot_sync(ALL_LANES, is_set);
        alike &= is_set ? set : ~set;
    }
    return alike;
}

// histograms[RADIX * pass + digit] += how often the digit occurs in a tile. A negative position sets *outside. A whole
// block takes part.
template <typename Position>
__device__ void count_digits(const RadixSort<Position>& sort, int64 tile, uint32* counts) {
    constexpr int ITEMS = RadixSort<Position>::ITEMS;
    const int64 first = tile * RadixSort<Position>::TILE + threadIdx.x;
    Position position[ITEMS];
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        position[item] = i < sort.count ? sort.positions[i] : 0;
    }
    bool is_outside = false;
    for (int item = 0; item < ITEMS; ++item) is_outside |= position[item] < 0;
    if (is_outside) atomicExch(sort.outside, 1ull);

    const int64 passes = sort.passes;
    for (int64 pass = 0; pass < passes; ++pass) counts[pass * RADIX + threadIdx.x] = 0;
    __syncthreads();
    for (int64 pass = 0; pass < passes; ++pass) {
        const int64 shift = pass * DIGIT_BITS;
        const uint32 mask = digit_mask(sort.bits, shift);
        #pragma unroll
        for (int item = 0; item < ITEMS; ++item) {
            if (first + item * THREADS >= sort.count) break;
            // An addition of one, whose result nobody needs: for a warp's lanes with one digit that is one step.
            atomicAdd(&counts[pass * RADIX + digit_of(position[item], shift, mask)], 1u);
        }
    }
    __syncthreads();
    for (int64 pass = 0; pass < passes; ++pass) {
        const uint32 counted = counts[pass * RADIX + threadIdx.x];
        if (counted) atomicAdd(&sort.histograms[pass * RADIX + threadIdx.x], counted);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The counts of a digit in all tiles before. A word holds flag and count, as in ScanState, in 32 bits: there is
// one for each tile and digit.

constexpr uint32 COUNT_READY = 1u << 30;    // of the tile alone
constexpr uint32 COUNTS_READY = 2u << 30;   // of the tile and all before it
constexpr uint32 COUNT_MASK = COUNT_READY - 1;

// How often the thread's digit occurs in all tiles before `tile`. Each thread works alone.
__device__ __forceinline__ uint32 count_before(const uint32* counts, int64 tile) {
    uint32 before = 0;
    for (int64 newest = tile - 1;;) {
        uint32 word[WINDOW];
        #pragma unroll
        for (int k = 0; k < WINDOW; ++k) {
            word[k] = COUNTS_READY;  // before the first tile there is nothing
            if (newest >= k) word[k] = load_relaxed(&counts[(newest - k) * RADIX + threadIdx.x]);
        }
        const int64 looked_from = newest;
        #pragma unroll
        for (int k = 0; k < WINDOW; ++k) {
            if (word[k] < COUNT_READY) break;
            before += word[k] & COUNT_MASK;
            if (word[k] >= COUNTS_READY) return before;
            --newest;
        }
        if (newest == looked_from) spin_pause();
    }
}

// ---------------------------------------------------------------------------------------------------------
// A pass

// Puts a tile's pairs where a pass wants them: the positions in the order of its digit, those with the same digit in
// the order before. `places` is shared memory. A whole block takes part; each warp goes over WARP * ITEMS positions in
// order.
template <typename Position>
__device__ void sort_pass(const RadixSort<Position>& sort, int64 pass, int64 tile, uint32* places) {
    constexpr int ITEMS = RadixSort<Position>::ITEMS, TILE = RadixSort<Position>::TILE;
    // `places`: of each warp and digit, at first counts, then the first slot.
    SHARED_ARRAY(uint32, targets, RADIX);  // of each digit: the place of slot 0, if the digit were there
    SHARED_ARRAY(Position, tile_positions, TILE);
    SHARED_ARRAY(int32, tile_rows, TILE);
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64 count = sort.count, shift = pass * DIGIT_BITS, into = (sort.passes - 1 - pass) % 2;
    const uint32 mask = digit_mask(sort.bits, shift);
    const Position* const positions = pass ? sort.sorted[1 - into] : sort.positions;
    const int32* const rows = pass ? sort.order[1 - into] : nullptr;  // at first, they are the positions' numbers
    Position* const sorted = sort.sorted[into];
    int32* const order = sort.order[into];
    uint32* const counts = sort.counts + RADIX * sort.tiles * pass;

    const uint32 everywhere = sort.histograms[RADIX * pass + threadIdx.x];
    for (int other = 0; other < WARPS; ++other) places[other * RADIX + threadIdx.x] = 0;
    __syncthreads();
    const int64 first = tile * TILE + warp * (WARP * ITEMS) + lane;
    Position position[ITEMS];
    int32 row[ITEMS];
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * WARP;
        // What fills the last tile has the greatest digit, so that it comes last, in slots that are not written.
        position[item] = i < count ? positions[i] : Position(-1);
    }
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * WARP;
        row[item] = rows && i < count ? rows[i] : int32(i);
    }

    uint32* const mine = places + warp * RADIX;
    const uint32 lanes_until = (2u << lane) - 1;  // this one and those before it
    uint32 ranks[ITEMS];  // among the warp's positions with the same digit
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        uint32* const counted = &mine[digit_of(position[item], shift, mask)];
        const uint32 alike = lanes_alike(digit_of(position[item], shift, mask)), before = *counted;
        __syncwarp();
        if (alike >> lane == 1) *counted = before + __popc(alike);  // the last one, for all
        __syncwarp();
        ranks[item] = before + __popc(alike & lanes_until) - 1;
    }
    __syncthreads();

    // From here on, each thread has a digit too.
    uint32 warps_before[WARPS], in_tile = 0;
    #pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        warps_before[other] = in_tile;
        in_tile += places[other * RADIX + threadIdx.x];
    }
    uint32* const published = &counts[tile * RADIX + threadIdx.x];
    store_relaxed(published, (tile ? COUNT_READY : COUNTS_READY) | in_tile);
    uint32 total;
    const uint32 begin = block_exclusive_sum<THREADS>(in_tile, total);
    #pragma unroll
    for (int other = 0; other < WARPS; ++other) places[other * RADIX + threadIdx.x] = begin + warps_before[other];
    __syncthreads();

    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const uint32 slot = mine[digit_of(position[item], shift, mask)] + ranks[item];
        tile_positions[slot] = position[item];
        tile_rows[slot] = row[item];
    }

    const uint32 digits_before = block_exclusive_sum<THREADS>(everywhere, total);
    uint32 before = 0;
    if (tile) {
        before = count_before(counts, tile);
        store_relaxed(published, COUNTS_READY | (before + in_tile));
    }
    targets[threadIdx.x] = digits_before + before - begin;
    __syncthreads();
    const int64 filled = min_of(TILE, count - tile * TILE);
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const uint32 slot = item * THREADS + threadIdx.x;
        if (slot >= filled) break;
        const Position next = tile_positions[slot];
        const uint32 target = targets[digit_of(next, shift, mask)] + slot;
        sorted[target] = next;
        order[target] = tile_rows[slot];
    }
}

// ---------------------------------------------------------------------------------------------------------

// A tile of stage 0, counting, or of a pass. A whole block takes part.
template <typename Position>
__device__ __forceinline__ void sort_tile(const RadixSort<Position>& sort, uint32 stage, int64 tile) {
    SHARED_ARRAY(uint32, digits, WARPS * RADIX);
    if (stage == 0) {
        count_digits(sort, tile, digits);
    } else {
        sort_pass(sort, stage - 1, tile, digits);
    }
}
