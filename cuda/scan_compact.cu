// Compaction of an element-sparse gradient: a dense tensor's non-zeros, sorted by position, in one pass.
//
// The reads are permuted, not the writes. The kernel walks positions in order; each granule of positions is
// one contiguous range of the tensor, found by one π⁻¹; its non-zeros are appended to the output. So the
// output is sorted, hence grouped by server, with no sort and no atomics on data.
//
// Pipeline of a tile of TILE positions:
//   ticket, π⁻¹ of its granules   while the values of the block's previous tile are loading
//   load                          all of a thread's PACKS at once
//   count                         prefix sums in the warps and the block
//   look back                     the first warp, while the others stage
//   stage                         offsets and values in shared memory, in order
//   write                         coalesced
//
// Deterministic: the output is a function of the tensor and the layout. Values keep their bits.
//
// Lower bound: the tensor is read once and the output, position and value, written once: 0.95 GB for 214M
// float32 of which 5.2 % are not zero, 10 % above reading alone. A block has 32 KB of float32 in flight, and
// a multiprocessor has three blocks: four would spill registers while they compute π⁻¹ beside the loads.
//
// Source: stream compaction by decoupled look-back is Merrill and Garland's (scan.cuh, §5 of their paper).
#include "keyspace.cuh"
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int PACKS = 8;      // of a thread; zenps.kernels.gpu.scan_compact.PACKS
constexpr int STAGE = 1024;   // rows that are written at once: an eighth of a tile of packs

// Positions of one tile.
template <int LANES>
constexpr int TILE = THREADS * PACKS * LANES;

// Granules of one tile at most. Packs of several lanes are for granules of WARP rows and more.
template <int LANES>
constexpr int MOST_PIECES = LANES == 1 ? TILE<LANES> : TILE<LANES> / WARP;

// Not `value != 0.0f`: if the compiler flushes subnormals, it takes them for zero. The shift drops the sign.
template <typename Bits>
__device__ __forceinline__ bool is_nonzero(Bits bits) {
    return Bits(bits << 1) != 0;
}

// The granules that a tile reads, in order of place.
struct Pieces {
    int64 first_position;
    int granule_bits;
    const int64* first_rows;  // of each granule

    // The row at a position of this tile.
    __device__ int64 row_at(int64 position) const {
        const int64 piece = (position >> granule_bits) - (first_position >> granule_bits);
        return first_rows[piece] + (position & ((1ll << granule_bits) - 1));
    }
};

// Finds the first row of each granule of a tile; after the last granule, rows beyond the tensor. The block
// shares the work; a barrier must follow.
template <int LANES>
__device__ void find_pieces(const Placement& at, int64 tile, int64* first_rows) {
    const int64 first_place = tile * TILE<LANES> >> at.granule_bits;
    const int64 pieces = max_of(TILE<LANES> >> at.granule_bits, 1);
    for (int64 piece = threadIdx.x; piece < pieces; piece += THREADS) {
        const int64 place = first_place + piece;
        first_rows[piece] = place < at.granules ? granule_in(at, place) << at.granule_bits : at.rows;
    }
}

// A thread's packs, and the non-zeros before each. A warp goes over WARP * PACKS packs in order of position,
// in PACKS steps of one pack for each lane, so that its loads are coalesced.
template <typename Bits, int LANES>
struct Slice {
    static constexpr int PACKS_OF_WORD = 4;  // a step of a warp has at most 128 non-zeros: 8 bits
    static constexpr int WORDS = PACKS / PACKS_OF_WORD;
    static_assert(WARP * LANES <= 128 && PACKS % PACKS_OF_WORD == 0, "counts fit their 8 bits");

    Pack<Bits, LANES> packs[PACKS];
    uint32 lanes_before[WORDS];  // in each step, the non-zeros of the lanes before this one,
    uint32 warp_counts[WORDS];   // and of the warp
    uint32 warps_before;         // the non-zeros of the warps before this one

    // The first position of a pack, relative to the tile.
    __device__ static uint32 offset_of(int pack) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return (warp * (WARP * PACKS) + pack * WARP + lane) * LANES;
    }

    // Starts all loads; nothing waits for them yet. Rows beyond the tensor count as zeros.
    __device__ void load(const Pieces& pieces, const Bits* dense, int64 rows) {
        int cut = PACKS;  // the pack that crosses the tensor's end, if this thread has it
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            const int64 row = pieces.row_at(pieces.first_position + offset_of(pack));
            packs[pack] = Pack<Bits, LANES>{};
            if (row + LANES <= rows) packs[pack] = *reinterpret_cast<const Pack<Bits, LANES>*>(dense + row);
            else if (row < rows) cut = pack;
        }
        // After the loop, because among the loads this branch would keep them from starting together.
        if (cut < PACKS) load_end(cut, dense, rows);
    }

    // Counts the non-zeros of the tile and those before each pack. A whole block takes part.
    __device__ uint32 count() {
        uint32 counts[WORDS] = {};
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack)
            for (int lane = 0; lane < LANES; ++lane)
                if (is_nonzero(packs[pack].lane[lane])) counts[pack / PACKS_OF_WORD] += 1u << shift_of(pack);
        #pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            lanes_before[word] = warp_exclusive_sum(counts[word]);
            warp_counts[word] = __shfl_sync(ALL_LANES, lanes_before[word] + counts[word], WARP - 1);
        }
        uint32 warp_total = 0, total;
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) warp_total += count_in(warp_counts, pack);
        // Only the last lane holds the warp's sum, so it counts for later warps alone.
        const uint32 lane = threadIdx.x % WARP;
        warps_before = block_exclusive_sum<THREADS>(lane == WARP - 1 ? warp_total : 0, total);
        return total;
    }

    // Stages the tile's non-zeros from the `window`-th on, at most STAGE, in order; each thread its own.
    __device__ void stage(uint32 window, uint16* offsets, Bits* values) const {
        uint32 step_begin = warps_before - window;  // wraps where it comes before the window
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            uint32 place = step_begin + count_in(lanes_before, pack);
            step_begin += count_in(warp_counts, pack);
            for (int lane = 0; lane < LANES; ++lane) {
                if (!is_nonzero(packs[pack].lane[lane])) continue;
                if (place < STAGE) {
                    offsets[place] = uint16(offset_of(pack) + lane);
                    values[place] = packs[pack].lane[lane];
                }
                ++place;
            }
        }
    }

private:
    __device__ void load_end(int cut, const Bits* dense, int64 rows) {
        const int64 left = rows % LANES;
        Pack<Bits, LANES> end = {};
        for (int lane = 0; lane < left; ++lane) end.lane[lane] = dense[rows - left + lane];
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack)
            if (pack == cut) packs[pack] = end;
    }

    __device__ static constexpr int shift_of(int pack) { return pack % PACKS_OF_WORD * 8; }

    __device__ static uint32 count_in(const uint32* words, int pack) {
        return words[pack / PACKS_OF_WORD] >> shift_of(pack) & 0xffu;
    }
};

// positions[i], values[i] = the i-th non-zero of `dense` in order of position, for i below `capacity`;
// *count = the number of non-zeros. Bits is as wide as a value. Any number of blocks take tiles until none is
// left. With LANES > 1, `dense` is aligned to packs, and granules have at least WARP rows.
template <typename Bits, typename Position, int LANES>
__global__ void __launch_bounds__(THREADS, 3)
scan_compact(ScanState* state, const Placement* placement, const Bits* dense, int64 capacity,
             Position* positions, Bits* values, int64* count) {
    SHARED_ARRAY(int64, first_rows, MOST_PIECES<LANES>);
    SHARED_ARRAY(uint16, offsets, STAGE);
    SHARED_ARRAY(Bits, staged, STAGE);
    SHARED_ARRAY(int64, shared_before, 1);
    const int granule_bits = int(placement->granule_bits);
    const int64 tiles = ceil_div(placement->granules << granule_bits, TILE<LANES>);

    int64 tile = take_tile(state);
    if (tile < tiles) find_pieces<LANES>(*placement, tile, first_rows);
    __syncthreads();
    while (tile < tiles) {
        const Pieces pieces{tile * TILE<LANES>, granule_bits, first_rows};
        Slice<Bits, LANES> slice;
        slice.load(pieces, dense, placement->rows);

        // While these loads are in flight. The barriers of take_tile separate the two tiles' first_rows.
        const int64 next = take_tile(state);
        if (next < tiles) find_pieces<LANES>(*placement, next, first_rows);

        const uint32 total = slice.count();
        if (threadIdx.x < WARP) {
            const int64 before = int64(look_back(state, tile, total));
            if (threadIdx.x == 0) {
                *shared_before = before;
                if (tile == tiles - 1) *count = before + total;
            }
        }
        for (uint32 window = 0; window < total; window += STAGE) {
            slice.stage(window, offsets, staged);
            __syncthreads();
            const int64 begin = *shared_before + window;
            const int64 writable = min_of(min_of(total - window, STAGE), capacity - begin);
            for (int64 i = threadIdx.x; i < writable; i += THREADS) {
                positions[begin + i] = Position(pieces.first_position + offsets[i]);
                values[begin + i] = staged[i];
            }
            __syncthreads();
        }
        tile = next;
    }
}
