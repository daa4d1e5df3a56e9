// Compaction by sorting: sums the rows of equal positions. The default: robust under any skew.
//
// Pipeline:
//   sort_segments   a stable sort of the positions (radix_sort.cuh) and, as a last stage, the heads of runs of equal
//                   positions, numbered in one pass by look-back
//   reduce_runs     sums the runs in chunks of CHUNK sorted rows; a run that crosses a chunk's edge leaves
//                   partial sums, at most two for each chunk, which the last block to end goes on with
//
// The sum of a row that occurs 10^5 times is a tree of depth 4, not a queue: the time depends on the number
// of rows alone. Deterministic: the positions alone fix the order of addition (described in
// zenps/kernels/gpu/sort_compact.py), and sums are rounded to the stored dtype once. No atomics on data, and
// nothing is zeroed.
//
// Lower bound: each row is read once and each sum is written once; positions, order and segments add 16 to 28
// bytes a row, the partial sums 1/16 of the rows at worst. For 10^6 x 64 float32 rows, of which a third is
// unique, that is 0.38 GB.
//
// Source: fixed chunks that may divide runs are the load balance of Merrill and Garland, "Merge-based
// Parallel Sparse Matrix-Vector Multiplication", SC 2016, without its search.
#include "packs.cuh"
#include "radix_sort.cuh"

constexpr int64 CHUNK = 64;  // rows that one thread adds up; zenps.kernels.gpu.sort_compact.CHUNK
constexpr int64 FAMILY = CHUNK / 2;  // chunks whose partial sums are a chunk of the next level
constexpr int BATCH = 8;     // rows that it loads at once
constexpr int PART_BATCH = 4;  // partial sums, which are few: with 8 the kernel takes 102 registers, not 96
constexpr int32 NONE = -1;   // the segment of a slot that holds no partial sum

// The runs of equal positions, called segments. `count` sorted positions give
//   segments[i] = the number of different positions before the i-th,
//   unique[segments[i]] = that position, *unique_count = the number of different positions,
//   offsets[c] = the number of those below cuts[c], which ascend.
template <typename Position>
struct Runs {
    ScanState* state;
    Position* unique;
    int32* segments;
    int64* unique_count;
    const int64* cuts;
    int64 cut_count;
    int64* offsets;
};

// A whole block takes part; each warp goes over WARP * ITEMS positions in order, so that all loads and stores are
// coalesced.
template <typename Position>
__device__ void find_segments(const Runs<Position>& runs, const Position* sorted, int64 count, int64 tile) {
    constexpr int ITEMS = RadixSort<Position>::ITEMS, TILE = RadixSort<Position>::TILE;
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64 first = tile * TILE + warp * (WARP * ITEMS) + lane;
    Position position[ITEMS];
    uint32 heads[ITEMS];  // of the warp: a bit for each lane whose position opens a run
    uint32 warp_heads = 0;
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * WARP;
        position[item] = i < count ? sorted[i] : 0;
        const bool head = i < count && (i == 0 || sorted[i - 1] != position[item]);
        heads[item] = __ballot_sync(ALL_LANES, head);
        warp_heads += __popc(heads[item]);
    }
    // Only the last lane holds the warp's sum, so it counts for later warps alone.
    uint32 tile_heads;
    const uint32 warps_before = block_exclusive_sum<THREADS>(lane == WARP - 1 ? warp_heads : 0, tile_heads);
    const int64 before = tiles_before(runs.state, tile, tile_heads);
    int64 next = before + warps_before;
    const uint32 lanes_until = (2u << lane) - 1;  // this one and those before it
    #pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * WARP;
        const int64 segment = next + __popc(heads[item] & lanes_until) - 1;
        if (i < count) runs.segments[i] = int32(segment);
        if (heads[item] >> lane & 1u) runs.unique[segment] = position[item];
        next += __popc(heads[item]);
    }
    const int64 begin = tile * TILE, end = min_of(begin + TILE, count);
    if (threadIdx.x == 0 && end == count) *runs.unique_count = before + tile_heads;

    // The cuts that lie behind the tile before and not behind this one, or behind all.
    const int64 first_cut = begin ? upper_bound(runs.cuts, runs.cut_count, sorted[begin - 1]) : 0;
    const int64 last_cut = end < count ? upper_bound(runs.cuts, runs.cut_count, sorted[end - 1]) : runs.cut_count;
    if (first_cut == last_cut) return;
    __syncthreads();  // the tile's segments are there
    for (int64 cut = first_cut + threadIdx.x; cut < last_cut; cut += THREADS) {
        const int64 i = begin + lower_bound(sorted + begin, end - begin, runs.cuts[cut]);
        runs.offsets[cut] = i < end ? runs.segments[i] : before + tile_heads;
    }
}

// Sorts positions and finds their runs.
template <typename Position>
__global__ void sort_segments(Stages* stages, const __grid_constant__ RadixSort<Position> sort,
                              const __grid_constant__ Runs<Position> runs) {
    run_stages(stages, sort.tiles, 2 + sort.passes, [&](uint32 stage, int64 tile) {
        if (stage <= sort.passes) {
            sort_tile(sort, stage, tile);
        } else {
            find_segments(runs, sort.result(), sort.count, tile);
        }
    });
}

template <int SIZE>
struct Batch {
    int32 segment[SIZE];
    uint32 source[SIZE];  // the row's index
};

// The sorted rows from `first` on, NONE from `end` on.
template <int SIZE>
__device__ __forceinline__ Batch<SIZE> read_batch(const int32* order, const int32* segments, int64 first,
                                                  int64 end) {
    Batch<SIZE> batch;
    for (int k = 0; k < SIZE; ++k) {
        const int64 i = first + k;
        batch.segment[k] = i < end ? segments[i] : NONE;
        batch.source[k] = uint32(order && i < end ? order[i] : i);
    }
    return batch;
}

// sums[s] = the sum of the rows of segment s, for each segment that lies within one chunk. `segments` of the
// `count` rows ascend, except for NONE, which marks empty slots and never occurs within a run. Row i is
// rows[order[i]], or rows[i] without an order. `before` and `after` are the segments on the other sides of
// the chunk's two edges, NONE where there is nothing.
//
// If chunk c shares a segment with the chunk before, the sum of its rows in c goes to slot 2c of `carries`;
// if c shares one only with the chunk after, to slot 2c + 1. A segment that fills the chunk from edge to edge
// has both slots, the second with the neutral element, so that a segment's slots are adjacent and another
// level can read them as rows. Other slots get NONE and no number.
//
// Each thread works alone, on LANES columns of one chunk, and loads SIZE rows at once.
template <int SIZE, typename Row, typename T, int LANES>
__device__ __forceinline__ void reduce_chunk(Cell cell, int32 before, int32 after, const Row* rows,
                                             const int32* order, const int32* segments, int64 count,
                                             int64 packs, T* sums, typename Number<T>::Sum* carries,
                                             int32* carry_segments) {
    using Sum = typename Number<T>::Sum;
    const int64 chunk = cell.row, begin = chunk * CHUNK, end = min_of(begin + CHUNK, count);

    int32 leading = NONE, trailing = NONE;
    int32 open = NONE;  // the segment that `sum` belongs to
    Pack<Sum, LANES> sum = {};
    const auto close = [&] {
        if (open == NONE) return;
        if (open == before) {
            leading = open;
            pack_at<Sum, LANES>(carries, 2 * chunk * packs + cell.pack) = sum;
        } else {
            pack_at<T, LANES>(sums, open * packs + cell.pack) = narrow<T, LANES>(sum);
        }
    };

    // The order and segments of the next batch are loaded before the rows of this batch are used.
    Batch<SIZE> next = read_batch<SIZE>(order, segments, begin, end);
    for (int64 i = begin; i < end; i += SIZE) {
        const Batch<SIZE> batch = next;
        Pack<Row, LANES> row[SIZE];
        for (int k = 0; k < SIZE; ++k) {
            if (batch.segment[k] == NONE) continue;
            row[k] = pack_at<Row, LANES>(rows, batch.source[k] * packs + cell.pack);
        }
        next = read_batch<SIZE>(order, segments, i + SIZE, end);
        for (int k = 0; k < SIZE; ++k) {
            if (batch.segment[k] == NONE) continue;
            const Pack<Sum, LANES> wide = widen(row[k]);
            if (batch.segment[k] != open) {
                close();
                open = batch.segment[k];
                sum = wide;  // not added to a zero: a lone row keeps its bits, -0.0 too
            } else {
                sum = add(sum, wide);
            }
        }
    }

    if (open == NONE || open != after) {
        close();
    } else {
        trailing = open;
        if (open == before) {
            close();
            for (int lane = 0; lane < LANES; ++lane) sum.lane[lane] = neutral<Sum>();
        }
        pack_at<Sum, LANES>(carries, (2 * chunk + 1) * packs + cell.pack) = sum;
    }
    if (cell.pack == 0) {
        carry_segments[2 * chunk] = leading;
        carry_segments[2 * chunk + 1] = trailing;
    }
}

struct Range {
    int64 begin, end;
};

// After a block has done the cells `done` of a level of `cells`: the chunks of the next level that it goes on
// with. A chunk consists of `width` cells of this level. If several blocks share a chunk, the block that ends
// last goes on with it: ended[chunk], initially zero, counts the cells done. Called by one thread.
__device__ inline Range chunks_completed(Range done, int64 cells, int64 width, uint32* ended) {
    const auto completes = [&](int64 chunk) {
        const int64 begin = chunk * width, end = min_of(begin + width, cells);
        const uint32 mine = uint32(min_of(done.end, end) - max_of(done.begin, begin));
        return mine == end - begin || add_acq_rel(&ended[chunk], mine) + mine == end - begin;
    };
    const int64 first = done.begin / width, last = (done.end - 1) / width;
    const bool with_first = completes(first), with_last = last == first ? with_first : completes(last);
    return {with_first ? first : first + 1, with_last ? last + 1 : last};
}

// The sum of each segment. The partial sums of a level's chunks are the rows of the next level, whose chunk
// has those of FAMILY chunks: the block that ends last among theirs adds them up, and so on until one chunk is
// left. carries and carry_segments have room for the slots of all levels, `ended` for a counter for each chunk
// of all levels but the first.
template <typename T, int LANES>
__global__ void reduce_runs(const T* rows, const int32* order, const int32* segments, int64 count,
                            int64 columns, T* sums, typename Number<T>::Sum* carries, int32* carry_segments,
                            uint32* ended) {
    using Sum = typename Number<T>::Sum;
    SHARED_ARRAY(Range, completed, 1);
    const int64 packs = columns / LANES;
    int64 chunks = ceil_div(count, CHUNK), span = CHUNK;  // of this level, and the given rows of each
    // Sorted, so what two chunks of any level share shows on both sides of the edge between them.
    const auto before = [&](int64 chunk) { return chunk ? segments[chunk * span - 1] : NONE; };
    const auto after = [&](int64 chunk) {
        return (chunk + 1) * span < count ? segments[(chunk + 1) * span] : NONE;
    };
    Range cells = {int64(blockIdx.x) * blockDim.x, 0};
    cells.end = min_of(cells.begin + blockDim.x, chunks * packs);
    if (global_thread() < cells.end) {
        const Cell cell = cell_of(global_thread(), packs);
        reduce_chunk<BATCH, T, T, LANES>(cell, before(cell.row), after(cell.row), rows, order, segments, count,
                                         packs, sums, carries, carry_segments);
    }
    while (chunks > 1) {
        __syncthreads();
        if (threadIdx.x == 0) *completed = chunks_completed(cells, chunks * packs, FAMILY * packs, ended);
        __syncthreads();
        if (completed->begin >= completed->end) return;
        cells = {completed->begin * packs, completed->end * packs};
        const Sum* const parts = carries;
        const int32* const part_segments = carry_segments;
        const int64 slots = 2 * chunks;
        chunks = ceil_div(slots, CHUNK), span *= FAMILY;
        carries += slots * columns, carry_segments += slots, ended += chunks;
        for (int64 index = cells.begin + threadIdx.x; index < cells.end; index += blockDim.x) {
            const Cell cell = cell_of(index, packs);
            reduce_chunk<PART_BATCH, Sum, T, LANES>(cell, before(cell.row), after(cell.row), parts, nullptr,
                                                    part_segments, slots, packs, sums, carries, carry_segments);
        }
    }
}
