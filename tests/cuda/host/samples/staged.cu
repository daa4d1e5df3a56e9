// run_stages of stages.cuh by itself.
#include "stages.cuh"

// totals[stage][tile] = 1 + the sum of the stage before, which its blocks wrote; takers[stage][tile] = the number of
// threads that did the tile. A thread in the middle of a block writes, and all read.
__global__ void add_stages(Stages* stages, int64 tiles, int64 stage_count, int64* totals, uint64* takers) {
    run_stages(stages, tiles, stage_count, [&](uint32 stage, int64 tile) {
        int64 sum = 1;
        for (int64 other = 0; stage && other < tiles; ++other) sum += totals[(stage - 1) * tiles + other];
        if (threadIdx.x == blockDim.x / 2) totals[stage * tiles + tile] = sum;
        atomicAdd(&takers[stage * tiles + tile], 1ull);
    });
}
