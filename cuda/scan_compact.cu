// Compaction of an element-sparse gradient: a dense tensor's non-zeros, sorted by position, in one pass.
//
// The reads are permuted, not the writes. The kernel walks positions in order; each granule of positions is
// one contiguous range of the tensor, found by one π⁻¹; its non-zeros are appended to the output. So the
// output is sorted, hence grouped by server, with no sort and no atomics on data.
//
// Pipeline of a tile of TILE positions:
//   load                          all of a thread's PACKS at once
//   ticket, π⁻¹ of its granules   of the block's next tile, while these loads are in flight
//   mark                          a bit for each position, set where the value is not zero
//   count                         prefix sums in the warps and the block
//   look back                     the first warp, while the others list
//   list, write                   set bits in shared memory, in order; their positions and values, coalesced
//
// The values of set bits are loaded again, from the multiprocessor's cache, so that no register holds them.
//
// Deterministic: the output is a function of the tensor and the layout. Values keep their bits.
//
// Lower bound: the tensor is read once and the output, position and value, written once: 0.95 GB for 214M
// float32 of which 5.2 % are not zero, 10 % above reading alone. A block has 32 KB in flight, and a
// multiprocessor has three blocks: a fourth would spill registers while it computes π⁻¹ beside the loads.
//
// Source: stream compaction by decoupled look-back is Merrill and Garland's (scan.cuh, §5 of their paper).
#include "bitmap.cuh"
#include "keyspace.cuh"

constexpr int PACKS = 8;  // of a thread; zenps.kernels.gpu.scan_compact.PACKS
constexpr int SCAN_LISTED = 4096;  // bits that are listed at once, in 8 KB
constexpr int RESIDENT = 3;  // blocks of a multiprocessor; zenps.kernels.gpu.scan_compact.RESIDENT

using Quad = Pack<uint32, 4>;

// Positions of one tile.
template <int LANES>
constexpr int TILE = THREADS * PACKS * LANES;

// Granules of one tile at most. Packs of several lanes are for granules of WARP rows and more.
template <int LANES>
constexpr int MOST_PIECES = LANES == 1 ? TILE<LANES> : TILE<LANES> / WARP;

// The granules that a tile reads, in order of place.
template <int LANES>
struct Pieces {
    int shift;     // log2 of the positions of a granule, or 31 if it is larger than a tile
    int64* rows;   // of each granule: its first row in the tile, less the offset of its first position there

    // The row at a position of the tile, which is given by its offset.
    __device__ int64 row_at(uint32 offset) const { return rows[offset >> shift] + offset; }

    // Finds the granules of a tile; beyond the last one are rows beyond the tensor. The block shares the work;
    // a barrier must follow.
    __device__ void find(const Placement& at, int64 tile) const {
        const int64 first_position = tile * TILE<LANES>, granule = 1ll << at.granule_bits;
        const int64 first_place = first_position >> at.granule_bits, inside = first_position & (granule - 1);
        const int64 pieces = max_of(TILE<LANES> >> shift, 1);
        for (int64 piece = threadIdx.x; piece < pieces; piece += THREADS) {
            const int64 place = first_place + piece;
            const int64 row = place < at.granules ? granule_in(at, place) << at.granule_bits : at.rows;
            rows[piece] = row + inside - (piece << shift);
        }
    }
};

// The tiles with positions of the tensor's last granule. Only they and the last tile may have positions that
// no row has.
struct Ragged {
    int64 first, last;

    // One thread finds them; a barrier must follow.
    __device__ void find(const Placement& at, int64 tile_size) {
        const int64 place = place_of(at, at.granules - 1);
        first = (place << at.granule_bits) / tile_size;
        last = (((place + 1) << at.granule_bits) - 1) / tile_size;
    }

    __device__ bool has(int64 tile) const { return tile >= first && tile <= last; }
};

// The values of a pack, a bit for each, set if it is neither 0.0 nor -0.0. Not `value != 0.0f`: if the
// compiler flushes subnormals, it takes them for zero.
template <typename Bits>
__device__ __forceinline__ uint32 nonzeros(const Quad& quad) {
    constexpr int PER_WORD = sizeof(uint32) / sizeof(Bits), WIDTH = 8 * sizeof(Bits);
    constexpr uint32 MAGNITUDE = Bits(~Bits(0)) >> 1;
    uint32 set = 0;
    #pragma unroll
    for (int lane = 0; lane < 4 * PER_WORD; ++lane)
        if (quad.lane[lane / PER_WORD] & MAGNITUDE << lane % PER_WORD * WIDTH) set |= 1u << lane;
    return set;
}

// A thread's values. A warp goes over WARP * PACKS packs in order of position, in PACKS steps of one pack for
// each lane, so that its loads are coalesced; then each lane gets the bits of adjacent positions.
template <typename Bits, int LANES>
struct Slice {
    static_assert(LANES * sizeof(Bits) == sizeof(Quad), "a pack is one load");
    static constexpr int WORDS = PACKS * LANES / WORD_BITS;  // of bits that a thread gets

    Quad packs[PACKS];

    // The first position of a pack, relative to the tile.
    __device__ static uint32 offset_of(int pack) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        return (warp * (WARP * PACKS) + pack * WARP + lane) * LANES;
    }

    // Starts all loads; nothing waits for them yet.
    __device__ void load(const Pieces<LANES>& pieces, const Bits* dense) {
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack)
            packs[pack] = *reinterpret_cast<const Quad*>(dense + pieces.row_at(offset_of(pack)));
    }

    // The same for a tile of which rows may lie beyond the tensor: they count as zeros.
    __device__ void load_ragged(const Pieces<LANES>& pieces, const Bits* dense, int64 rows) {
        constexpr int PER_WORD = sizeof(uint32) / sizeof(Bits), WIDTH = 8 * sizeof(Bits);
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            const int64 row = pieces.row_at(offset_of(pack));
            Quad quad = {};
            if (row + LANES <= rows) quad = *reinterpret_cast<const Quad*>(dense + row);
            else
                for (int lane = 0; lane < LANES; ++lane)
                    if (row + lane < rows)
                        quad.lane[lane / PER_WORD] |= uint32(dense[row + lane]) << lane % PER_WORD * WIDTH;
            packs[pack] = quad;
        }
    }

    // The set bits of the positions from threadIdx.x * WORDS * WORD_BITS on. `marks` are of the whole block.
    __device__ void mark(uint8* marks, uint32 (&words)[WORDS]) const {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        uint8* const of_warp = marks + warp * (WARP * PACKS);
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) of_warp[pack * WARP + lane] = uint8(nonzeros<Bits>(packs[pack]));
        __syncwarp();
        const auto mine = reinterpret_cast<const Pack<uint32, 2>*>(of_warp)[lane];  // PACKS bytes
        if constexpr (LANES == 8) {
            words[0] = mine.lane[0];
            words[1] = mine.lane[1];
        } else {
            words[0] = join_nibbles(mine.lane[0]) | join_nibbles(mine.lane[1]) << 16;
        }
    }
};

// A thread's values, for tensors that are not aligned to packs and granules that are smaller.
template <typename Bits>
struct Slice<Bits, 1> {
    static constexpr int WORDS = 1;

    Bits values[PACKS];

    __device__ void load(const Pieces<1>&, const Bits*) {}

    __device__ void load_ragged(const Pieces<1>& pieces, const Bits* dense, int64 rows) {
        const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        #pragma unroll
        for (int item = 0; item < PACKS; ++item) {
            const int64 row = pieces.row_at(warp * (WARP * PACKS) + item * WARP + lane);
            values[item] = row < rows ? dense[row] : Bits(0);
        }
    }

    // The first PACKS lanes of a warp get the bits, of WARP positions each.
    __device__ void mark(uint8*, uint32 (&words)[WORDS]) const {
        words[0] = 0;
        #pragma unroll
        for (int item = 0; item < PACKS; ++item) {
            const uint32 set = __ballot_sync(ALL_LANES, Bits(values[item] << 1) != 0);
            if (threadIdx.x % WARP == uint32(item)) words[0] = set;
        }
    }
};

// The offset in the tile of the first bit that a thread gets.
template <int LANES>
__device__ __forceinline__ uint32 first_bit() {
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return LANES == 1 ? (warp * PACKS + lane) * WARP : threadIdx.x * (PACKS * LANES);
}

// positions[i], values[i] = the i-th non-zero of `dense` in order of position, for i below `capacity`;
// *count = the number of non-zeros. Bits is as wide as a value. Any number of blocks take tiles until none is
// left. With LANES > 1, `dense` is aligned to packs, and granules have at least WARP rows.
template <typename Bits, typename Position, int LANES>
__global__ void __launch_bounds__(THREADS, RESIDENT)
scan_compact(ScanState* state, const __grid_constant__ Placement placement, const Bits* dense, int64 capacity,
             Position* positions, Bits* values, int64* count) {
    SHARED_ARRAY(int64, rows_of_pieces, 2 * MOST_PIECES<LANES>);
    SHARED_ARRAY(uint64, marks, THREADS * PACKS / sizeof(uint64));
    SHARED_ARRAY(int64, shared_before, 1);
    SHARED_ARRAY(Ragged, ragged, 1);
    const int64 rows = placement.rows;
    const int64 tiles = ceil_div(placement.granules << placement.granule_bits, TILE<LANES>);

    if (threadIdx.x == 0) ragged->find(placement, TILE<LANES>);
    int64 tile = take_tile(state);
    Pieces<LANES> pieces{int(min_of(placement.granule_bits, 31)), rows_of_pieces};
    if (tile < tiles) pieces.find(placement, tile);
    __syncthreads();
    while (tile < tiles) {
        Slice<Bits, LANES> slice;
        if (LANES == 1 || tile == tiles - 1 || ragged->has(tile)) slice.load_ragged(pieces, dense, rows);
        else slice.load(pieces, dense);

        // While these loads are in flight. The barriers of take_tile come after the last use of these pieces.
        const int64 next = take_tile(state);
        Pieces<LANES> next_pieces = pieces;
        next_pieces.rows = rows_of_pieces + (pieces.rows == rows_of_pieces ? MOST_PIECES<LANES> : 0);
        if (next < tiles) next_pieces.find(placement, next);

        uint32 words[Slice<Bits, LANES>::WORDS];
        slice.mark(reinterpret_cast<uint8*>(marks), words);
        uint32 set = 0, total;
        for (const uint32 word : words) set += __popc(word);
        const uint32 rank = block_exclusive_sum<THREADS>(set, total);
        if (threadIdx.x < WARP) {
            const int64 before = int64(look_back(state, tile, total));
            if (threadIdx.x == 0) {
                *shared_before = before;
                if (tile == tiles - 1) *count = before + total;
            }
        }
        for_each_bit<SCAN_LISTED>(words, first_bit<LANES>(), rank, total, [&](uint32 bit_rank, uint32 bit) {
            const int64 i = *shared_before + bit_rank;
            if (i >= capacity) return;
            positions[i] = Position(tile * TILE<LANES> + bit);
            values[i] = dense[pieces.row_at(bit)];
        });
        tile = next;
        pieces = next_pieces;
    }
}
