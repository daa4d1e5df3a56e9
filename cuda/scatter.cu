// Scatter and gather of rows as opaque words: the same for every dtype, bits unchanged.
//
// Deterministic for distinct targets. Each row is read once and written once; each thread has four words of
// 16 bytes in flight.
#include "packs.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int ITEMS = 4;      // zenps.kernels.gpu.scatter.ITEMS

// out[targets[i]] = values[i], for rows of `words` words. A target outside [0, out_rows) sets *outside, and
// its row is not written.
template <typename Word>
__global__ void put_rows(const Word* values, const int64* targets, int64 count, int64 words, int64 out_rows,
                         Word* out, uint64* outside) {
    const int64 first = int64(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x;
    int64 place[ITEMS];  // in `out`, in words
    Word word[ITEMS];
    bool all_inside = true;
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        const Cell cell = cell_of(i, words);
        const bool given = cell.row < count;
        if (given) word[item] = values[i];
        const int64 target = given ? targets[cell.row] : 0;
        const bool inside = target >= 0 && target < out_rows;
        place[item] = given && inside ? target * words + cell.pack : -1;
        all_inside &= inside || !given;
    }
    for (int item = 0; item < ITEMS; ++item)
        if (place[item] >= 0) out[place[item]] = word[item];
    if (!all_inside) atomicExch(outside, 1ull);
}

// out[i] = values[order[i]], for rows of `words` words.
template <typename Word>
__global__ void gather_rows(const Word* values, const int64* order, int64 count, int64 words, Word* out) {
    const int64 first = int64(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x;
    Word word[ITEMS];
    for (int item = 0; item < ITEMS; ++item) {
        const Cell cell = cell_of(first + item * THREADS, words);
        if (cell.row < count) word[item] = values[order[cell.row] * words + cell.pack];
    }
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        if (i < count * words) out[i] = word[item];
    }
}
