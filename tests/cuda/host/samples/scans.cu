// The parts of scan.cuh by themselves, each called over and over as its comment allows.
#include "scan.cuh"

constexpr int THREADS = 64;

// sums[t] = the numbers + round of the threads before thread t in its block, over `times` rounds; totals[t] =
// those of all its threads.
__global__ void sum_blocks(const int64* numbers, int64 times, int64* sums, int64* totals) {
    const int64 i = global_thread();
    for (int64 round = 0; round < times; ++round) {
        uint32 total;
        sums[i] += block_exclusive_sum<THREADS>(uint32(numbers[i] + round), total);
        totals[i] += total;
    }
}

// Each thread counts itself in for each tile that its block takes, until `tiles` are taken.
__global__ void take_tiles(ScanState* state, int64 tiles, uint64* takers) {
    for (int64 tile = take_tile(state); tile < tiles; tile = take_tile(state)) atomicAdd(&takers[tile], 1ull);
}

// For each tile and thread, the numbers of all tiles before it, by two scans that follow each other. `states`
// are two, of 1 + gridDim.x words; tile t has numbers[t].
__global__ void scan_tiles(uint64* states, const int64* numbers, int64* before) {
    const int64 tile = take_tile(reinterpret_cast<ScanState*>(states));
    const uint32 number = uint32(numbers[tile]);
    int64* mine = before + 2 * (tile * blockDim.x + threadIdx.x);
    mine[0] = tiles_before(reinterpret_cast<ScanState*>(states), tile, number);
    mine[1] = tiles_before(reinterpret_cast<ScanState*>(states + 1 + gridDim.x), tile, 2 * number);
}
