// Compaction by sorting: sums the rows of equal positions. The default: robust under any skew.
//
// Pipeline, after a stable sort of the positions (torch.sort):
//   find_segments   heads of runs of equal positions, numbered in one pass by look-back
//   reduce_runs     sums the runs in chunks of CHUNK sorted rows; a run that crosses a chunk's edge leaves
//                   partial sums, at most two for each chunk
//   reduce_runs     again over the partial sums, until few are left, which the last block adds up
//
// The sum of a row that occurs 10^5 times is a tree of depth 4, not a queue: the time depends on the number
// of rows alone. Deterministic: the positions alone fix the order of addition (described in
// zenps/kernels/gpu/sort_compact.py), and sums are rounded to the stored dtype once. No atomics on data, and
// nothing is zeroed.
//
// Lower bound: each row is read once and each sum is written once; positions, order and segments add 20 to 32
// bytes a row, the partial sums 1/16 of the rows at worst. For 10^6 x 64 float32 rows, of which a third is
// unique, that is 0.38 GB.
//
// Source: fixed chunks that may divide runs are the load balance of Merrill and Garland, "Merge-based
// Parallel Sparse Matrix-Vector Multiplication", SC 2016, without its search.
#include "packs.cuh"
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int ITEMS = 8;      // positions of a thread
constexpr int64 SEGMENT_TILE = THREADS * ITEMS;  // zenps.kernels.gpu.sort_compact.SEGMENT_TILE

constexpr int64 CHUNK = 64;  // rows that one thread adds up; zenps.kernels.gpu.sort_compact.CHUNK
constexpr int BATCH = 8;     // rows that it loads at once
constexpr int32 NONE = -1;   // the segment of a slot that holds no partial sum

// segments[i] = the number of different positions before the i-th sorted one, unique[segments[i]] = that
// position, *unique_count = the number of different positions, offsets[c] = the number of those below cuts[c],
// which ascend; *outside = 1 if a position is negative. A whole block takes part; each warp goes over
// WARP * ITEMS positions in order, so that all loads and stores are coalesced.
template <typename Position>
__global__ void find_segments(ScanState* state, const Position* sorted, int64 count, Position* unique,
                              int32* segments, int64* unique_count, const int64* cuts, int64 cut_count,
                              int64* offsets, int64* outside) {
    const int64 tile = take_tile(state);
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64 first = tile * SEGMENT_TILE + warp * (WARP * ITEMS) + lane;
    Position position[ITEMS];
    uint32 heads[ITEMS];  // of the warp: a bit for each lane whose position opens a run
    uint32 warp_heads = 0;
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
    const int64 before = tiles_before(state, tile, tile_heads);
    int64 next = before + warps_before;
    const uint32 lanes_until = (2u << lane) - 1;  // this one and those before it
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * WARP;
        const int64 segment = next + __popc(heads[item] & lanes_until) - 1;
        if (i < count) segments[i] = int32(segment);
        if (heads[item] >> lane & 1u) unique[segment] = position[item];
        next += __popc(heads[item]);
    }
    const int64 begin = tile * SEGMENT_TILE, end = min_of(begin + SEGMENT_TILE, count);
    if (threadIdx.x == 0 && begin == 0) *outside = sorted[0] < 0;
    if (threadIdx.x == 0 && end == count) *unique_count = before + tile_heads;

    // The cuts that lie behind the tile before and not behind this one, or behind all.
    const int64 first_cut = begin ? upper_bound(cuts, cut_count, sorted[begin - 1]) : 0;
    const int64 last_cut = end < count ? upper_bound(cuts, cut_count, sorted[end - 1]) : cut_count;
    if (first_cut == last_cut) return;
    __syncthreads();  // the tile's segments are there
    for (int64 cut = first_cut + threadIdx.x; cut < last_cut; cut += THREADS) {
        const int64 i = begin + lower_bound(sorted + begin, end - begin, cuts[cut]);
        offsets[cut] = i < end ? segments[i] : before + tile_heads;
    }
}

struct Batch {
    int32 segment[BATCH];
    uint32 source[BATCH];  // the row's index
};

// The sorted rows from `first` on, NONE from `end` on.
__device__ __forceinline__ Batch read_batch(const int64* order, const int32* segments, int64 first,
                                            int64 end) {
    Batch batch;
    for (int k = 0; k < BATCH; ++k) {
        const int64 i = first + k;
        batch.segment[k] = i < end ? segments[i] : NONE;
        batch.source[k] = uint32(order && i < end ? order[i] : i);
    }
    return batch;
}

// sums[s] = the sum of the rows of segment s, for each segment that lies within one chunk. `segments` of the
// `count` rows ascend, except for NONE, which marks empty slots and never occurs within a run. Row i is
// rows[order[i]], or rows[i] without an order.
//
// If chunk c shares a segment with the chunk before, the sum of its rows in c goes to slot 2c of `carries`;
// if c shares one only with the chunk after, to slot 2c + 1. A segment that fills the chunk from edge to edge
// has both slots, the second with the neutral element, so that a segment's slots are adjacent and another
// pass can read them as rows. Other slots get NONE and no number.
//
// Each thread works alone, on LANES columns of one chunk.
template <typename Row, typename T, int LANES>
__device__ __forceinline__ void reduce_chunk(Cell cell, const Row* rows, const int64* order,
                                             const int32* segments, int64 count, int64 packs, T* sums,
                                             typename Number<T>::Sum* carries, int32* carry_segments) {
    using Sum = typename Number<T>::Sum;
    const int64 chunk = cell.row, begin = chunk * CHUNK, end = min_of(begin + CHUNK, count);

    const int32 segment_before = begin > 0 ? segments[begin - 1] : NONE;
    const int32 segment_after = end < count ? segments[end] : NONE;
    int32 leading = NONE, trailing = NONE;
    int32 open = NONE;  // the segment that `sum` belongs to
    Pack<Sum, LANES> sum = {};
    const auto close = [&] {
        if (open == NONE) return;
        if (open == segment_before) {
            leading = open;
            pack_at<Sum, LANES>(carries, 2 * chunk * packs + cell.pack) = sum;
        } else {
            pack_at<T, LANES>(sums, open * packs + cell.pack) = narrow<T, LANES>(sum);
        }
    };

    // The order and segments of the next batch are loaded before the rows of this batch are used.
    Batch next = read_batch(order, segments, begin, end);
    for (int64 i = begin; i < end; i += BATCH) {
        const Batch batch = next;
        Pack<Row, LANES> row[BATCH];
        for (int k = 0; k < BATCH; ++k) {
            if (batch.segment[k] == NONE) continue;
            row[k] = pack_at<Row, LANES>(rows, batch.source[k] * packs + cell.pack);
        }
        next = read_batch(order, segments, i + BATCH, end);
        for (int k = 0; k < BATCH; ++k) {
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

    if (open == NONE || open != segment_after) {
        close();
    } else {
        trailing = open;
        if (open == segment_before) {
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

// reduce_chunk() of all chunks. With `finished`, a zero at first, the block that ends last goes on over the
// partial sums, whose own partial sums lie behind them, until one chunk is left. Without, the host launches
// this kernel for them.
template <typename Row, typename T, int LANES>
__global__ void reduce_runs(const Row* rows, const int64* order, const int32* segments, int64 count,
                            int64 columns, T* sums, typename Number<T>::Sum* carries, int32* carry_segments,
                            uint32* finished) {
    const int64 packs = columns / LANES;
    int64 chunks = ceil_div(count, CHUNK), pack = global_thread();
    if constexpr (sizeof(Row) < sizeof(*carries)) {
        if (pack < chunks * packs)
            reduce_chunk<Row, T, LANES>(cell_of(pack, packs), rows, order, segments, count, packs, sums, carries,
                                        carry_segments);
    } else {
        SHARED_ARRAY(uint32, before, 1);  // blocks that have ended
        int64 threads = int64(gridDim.x) * blockDim.x;
        for (bool is_alone = false;; is_alone = true) {
            for (; pack < chunks * packs; pack += threads)
                reduce_chunk<Row, T, LANES>(cell_of(pack, packs), rows, order, segments, count, packs, sums,
                                            carries, carry_segments);
            if (!finished || chunks == 1) return;
            __syncthreads();
            if (!is_alone) {
                if (threadIdx.x == 0) *before = add_acq_rel(finished, 1);
                __syncthreads();
                if (*before != gridDim.x - 1) return;
            }
            rows = carries, order = nullptr, segments = carry_segments;
            count = 2 * chunks, chunks = ceil_div(count, CHUNK);
            carries += count * columns, carry_segments += count;
            pack = threadIdx.x, threads = blockDim.x;
        }
    }
}
