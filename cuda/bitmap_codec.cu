// Position codecs on the device: bitmap and COO, with the same bytes as zenps/codecs.
//
// Deterministic. Encoded bytes come from the network: none of them make a kernel read or write beyond its
// arrays; on invalid bytes *error is set and the rows mean nothing. Decoding maps positions to table rows at
// once, because nothing else needs the positions.
//
// Lower bound: encoding a bitmap reads its positions and writes it, without zeroing and without global
// atomics; decoding reads the bytes and writes 8 bytes a row.
#include "bitmap.cuh"
#include "keyspace.cuh"

// The columns of a table with a row for each chunk, which zenps/kernels/gpu/bitmap_codec.py writes. A chunk's
// bitmap has the positions from `starts` on that are among positions[begins, ends), and `words` words.
struct Chunks {
    const int64 *first_tiles, *begins, *ends, *starts, *first_words, *words;

    __device__ Chunks(const int64* table, int64 count)
        : first_tiles(table), begins(table + count), ends(table + 2 * count), starts(table + 3 * count),
          first_words(table + 4 * count), words(table + 5 * count) {}
};

// The bitmaps of all chunks, of positions that ascend within each. One block makes one tile in shared memory
// from the positions that lie in it.
template <typename Position>
__global__ void encode_bitmaps(const Position* positions, const int64* table, int64 count, uint32* bitmaps) {
    SHARED_ARRAY(uint32, tile_words, TILE_WORDS);
    SHARED_ARRAY(int64, bounds, 2);
    const Chunks chunks(table, count);
    const int64 chunk = upper_bound(chunks.first_tiles, count, blockIdx.x) - 1;
    const int64 tile = blockIdx.x - chunks.first_tiles[chunk];
    const int64 tile_start = chunks.starts[chunk] + tile * BITMAP_TILE;
    if (threadIdx.x < 2) {
        const int64 bound = tile_start + threadIdx.x * BITMAP_TILE, begin = chunks.begins[chunk];
        bounds[threadIdx.x] = begin + lower_bound(positions + begin, chunks.ends[chunk] - begin, bound);
    }
    for (int word = threadIdx.x; word < TILE_WORDS; word += THREADS) tile_words[word] = 0;
    __syncthreads();
    for (int64 i = bounds[0] + threadIdx.x; i < bounds[1]; i += THREADS) {
        const uint32 bit = uint32(positions[i] - tile_start);
        atomicOr(&tile_words[bit / WORD_BITS], 1u << (bit % WORD_BITS));
    }
    __syncthreads();
    const int64 first = tile * TILE_WORDS, words = min_of(TILE_WORDS, chunks.words[chunk] - first);
    uint32* const bitmap = bitmaps + chunks.first_words[chunk] + first;
    for (int64 word = threadIdx.x; word < words; word += THREADS) bitmap[word] = tile_words[word];
}

// The table row at position start + relative, if relative lies in [0, span) and the position is a row's; else
// *error is set and the row is 0.
__device__ inline int64 checked_row(const Placement& placement, int64 start, int64 relative, int64 span,
                                    uint64* error) {
    const bool inside = relative >= 0 && relative < span;
    const int64 row = inside ? row_at(placement, start + relative) : placement.rows;
    if (row < placement.rows) return row;
    atomicExch(error, 1ull);
    return 0;
}

// table_rows[k] = the row at start + the k-th set bit of the bitmap of `span` positions, which are all below
// the layout's size. *error is set if the number of set bits is not `rows`, or one is no row's position.
__global__ void decode_bitmap(ScanState* state, const __grid_constant__ Placement placement,
                              const uint8* bitmap, int64 rows, int64 start, int64 span, int64* table_rows, uint64* error) {
    const auto check = [&](int64 set) {
        if (set != rows) atomicExch(error, 1ull);
    };
    for_each_position(state, bitmap, span, check, [&](int64 number, int64 position) {
        const int64 row = checked_row(placement, start, position, span, error);
        if (number < rows) table_rows[number] = row;
    });
}

// relative[i] = positions[i] minus the start of its chunk. starts[0] is not greater than any position.
template <typename Position, typename Relative>
__global__ void encode_coo(const Position* positions, int64 count, const int64* starts, int64 chunks,
                           Relative* relative) {
    const int64 i = global_thread();
    if (i >= count) return;
    const int64 position = positions[i];
    relative[i] = Relative(position - starts[upper_bound(starts, chunks, position) - 1]);
}

// table_rows[i] = the row at start + relative[i]; these positions are all below the layout's size.
// *error is set if they do not increase, lie outside [0, span), or are no row's.
template <typename Relative>
__global__ void decode_coo(const __grid_constant__ Placement placement, const Relative* relative,
                           int64 rows, int64 start, int64 span, int64* table_rows, uint64* error) {
    const int64 i = global_thread();
    if (i >= rows) return;
    const int64 here = relative[i], previous = i ? int64(relative[i - 1]) : -1;
    if (here <= previous) atomicExch(error, 1ull);
    table_rows[i] = checked_row(placement, start, here, span, error);
}
