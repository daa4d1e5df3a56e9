// Compaction by bitmap: for rows that are nearly unique.
//
// Pipeline:
//   mark_positions   sets each position's bit; the row that finds it clear is the position's first
//   number_bits      counts bits in one pass by look-back → sorted positions, and a directory: for each word
//                    of the bitmap its bits, and the number of bits set before it
//   find_targets     looks each row's output row up in the directory
//   put_first        copies each position's first row to its output row
//   add_others       adds the other rows to it with atomics
//   round_sums       only for dtypes that are summed in a wider one: sums → values
//
// Not deterministic: the hardware decides which of a position's rows comes first, and in which order the
// others are added. A row that occurs once keeps its bits and a sum of two has defined bits; longer sums may
// differ from run to run in their last bits. Atomics flush subnormal sums to zero (PTX ISA, `red`).
// sort_compact is deterministic, and faster under skew, when atomics to one row wait for each other.
//
// Lower bound: rows are read once and unique ones written once; only the bitmap is zeroed. The index adds 32
// to 44 bytes a row, and half a byte for each position of the table. Dtypes of 16 bits also write and read
// float32 sums, 8 bytes an element.
#include "bitmap.cuh"

constexpr int ITEMS = 4;  // positions of a thread, all in flight at once

// Sets the bit of each position. targets[i] = 1 if row i is the first of its position, else 0. A negative
// position sets *outside, and counts as 0.
template <typename Position>
__global__ void mark_positions(const Position* positions, int64 count, uint32* bitmap, int32* targets,
                               uint64* outside) {
    const int64 first = int64(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x;
    int64 position[ITEMS];
    uint32 found[ITEMS];
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        position[item] = i < count ? positions[i] : 0;
        if (position[item] >= 0) continue;
        atomicExch(outside, 1ull);
        position[item] = 0;
    }
    // A load first: atomics to one word run one at a time, so hot rows would wait for each other.
    for (int item = 0; item < ITEMS; ++item) found[item] = load_relaxed(&bitmap[position[item] / WORD_BITS]);
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        if (i >= count) break;
        const uint32 bit = 1u << (position[item] % WORD_BITS);
        if (!(found[item] & bit)) found[item] = atomicOr(&bitmap[position[item] / WORD_BITS], bit);
        targets[i] = !(found[item] & bit);
    }
}

// A word of the bitmap and the number of set bits before it, loaded together.
using Entry = Pack<uint32, 2>;

// The number of set bits below a position.
__device__ __forceinline__ int64 bits_below(const Entry* directory, int64 position) {
    const Entry entry = directory[position / WORD_BITS];
    return int64(entry.lane[1]) + __popc(entry.lane[0] & ((1u << (position % WORD_BITS)) - 1));
}

// unique[k] = the position of the k-th set bit, *unique_count = their number, directory[w] = the entry
// of word w, offsets[c] = the number of set bits below cuts[c], which ascend. `words` is a multiple of
// THREAD_WORDS.
template <typename Position>
__global__ void number_bits(ScanState* state, const uint8* bitmap, int64 words, Entry* directory,
                            Position* unique, int64* unique_count, const int64* cuts, int64 cut_count,
                            int64* offsets) {
    const int64 tile = take_tile(state);
    uint32 word[THREAD_WORDS];
    const uint32 set = read_words(bitmap, words * int64(sizeof(uint32)), tile, word);
    uint32 total;
    const uint32 rank = block_exclusive_sum<THREADS>(set, total);
    const int64 before = tiles_before(state, tile, total);
    const bool is_last = (tile + 1) * TILE_WORDS >= words;
    if (threadIdx.x == 0 && is_last) *unique_count = before + total;

    const int64 first = tile * TILE_WORDS + threadIdx.x * THREAD_WORDS;
    if (first < words) {
        uint32 next = uint32(before) + rank;
        for (int k = 0; k < THREAD_WORDS; k += 2) {
            Pack<Entry, 2> pair;
            for (int side = 0; side < 2; ++side) {
                pair.lane[side] = {word[k + side], next};
                next += __popc(word[k + side]);
            }
            pack_at<Entry, 2>(directory, (first + k) / 2) = pair;
        }
    }
    for_each_bit<LISTED>(word, first_of_words(), rank, total, [&](uint32 bit_rank, uint32 bit) {
        unique[before + bit_rank] = Position(tile * BITMAP_TILE + bit);
    });

    const int64 start = tile * BITMAP_TILE;
    const int64 first_cut = lower_bound(cuts, cut_count, start);
    const int64 last_cut = is_last ? cut_count : lower_bound(cuts, cut_count, start + BITMAP_TILE);
    if (first_cut == last_cut) return;
    __syncthreads();  // the tile's entries are there
    for (int64 cut = first_cut + threadIdx.x; cut < last_cut; cut += THREADS)
        offsets[cut] = cuts[cut] / WORD_BITS < words ? bits_below(directory, cuts[cut]) : before + total;
}

// targets[i] = the output row; for a row that is not the first of its position (0 before), its complement.
template <typename Position>
__global__ void find_targets(const Entry* directory, const Position* positions, int64 count, int32* targets) {
    const int64 i = global_thread();
    if (i >= count) return;
    const int32 target = int32(bits_below(directory, max_of(positions[i], 0)));
    targets[i] = targets[i] ? target : ~target;
}

// sums[target] = the row, for the first row of each position.
template <typename T, int LANES>
__global__ void put_first(const T* values, const int32* targets, int64 count, int64 columns,
                          typename Number<T>::Sum* sums) {
    using Sum = typename Number<T>::Sum;
    const int64 packs = columns / LANES;
    const Cell cell = cell_of(global_thread(), packs);
    if (cell.row >= count) return;
    const int32 target = targets[cell.row];
    if (target < 0) return;
    pack_at<Sum, LANES>(sums, target * packs + cell.pack) =
        widen(pack_at<T, LANES>(values, cell.row * packs + cell.pack));
}

// sums[target] += the row, for all others.
template <typename T, int LANES>
__global__ void add_others(const T* values, const int32* targets, int64 count, int64 columns,
                           typename Number<T>::Sum* sums) {
    const int64 packs = columns / LANES;
    const Cell cell = cell_of(global_thread(), packs);
    if (cell.row >= count) return;
    const int32 target = ~targets[cell.row];
    if (target < 0) return;
    const auto row = widen(pack_at<T, LANES>(values, cell.row * packs + cell.pack));
    atomic_add(sums + target * columns + cell.pack * LANES, row);
}

// values = the first *count rows of sums, rounded.
template <typename T, int LANES>
__global__ void round_sums(const float* sums, const int64* count, int64 columns, T* values) {
    const int64 pack = global_thread();
    if (pack >= *count * (columns / LANES)) return;
    pack_at<T, LANES>(values, pack) = narrow<T, LANES>(pack_at<float, LANES>(sums, pack));
}
