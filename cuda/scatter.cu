// Gather of rows as opaque words: the same for every dtype, bits unchanged.
//
// Deterministic. Each row is read once and written once; each thread has four words of 16 bytes in flight.
#include "packs.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int ITEMS = 4;      // zenps.kernels.gpu.scatter.ITEMS

// out[i] = values[order[i]], for rows of `words` words.
template <typename Word, typename Index>
__global__ void gather_rows(const Word* values, const Index* order, int64 count, int64 words, Word* out) {
    const int64 first = int64(blockIdx.x) * (THREADS * ITEMS) + threadIdx.x;
    Word word[ITEMS];
    for (int item = 0; item < ITEMS; ++item) {
        const Cell cell = cell_of(first + item * THREADS, words);
        if (cell.row < count) word[item] = values[int64(order[cell.row]) * words + cell.pack];
    }
    for (int item = 0; item < ITEMS; ++item) {
        const int64 i = first + item * THREADS;
        if (i < count * words) out[i] = word[item];
    }
}
