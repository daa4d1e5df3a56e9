// Stages of one launch: a barrier of the whole grid between them, without a cooperative launch.
//
// A counter hands out tiles: first all those of the first stage, then those of the second, and so on. Before a block
// begins a tile, it waits until all tiles of the stage before are done. It waits only for tiles that were taken
// earlier, by blocks that run: no number of blocks has to be resident, and no two have to run at once.
//
// A grid has as many blocks as a stage has tiles, and each goes on from stage to stage. With a block for each tile of
// each stage instead, those that wait take the place of those that work: an H200 puts blocks that start together on
// the same multiprocessors, and sorted 330,000 positions on 40 of them, in twice the time.
#pragma once

#include "scan.cuh"

// Zeroed memory, two words.
struct Stages {
    uint64 tickets;
    uint32 done;  // tiles of all stages
    uint32 unused;
};

// Calls do_tile(stage, tile) for each of `tiles` in each stage, once in the whole grid; what the stages before have
// written can be read there. A whole block takes part.
template <typename DoTile>
__device__ __forceinline__ void run_stages(Stages* stages, int64 tile_count, int64 stage_count, DoTile do_tile) {
    const uint32 tiles = uint32(tile_count);
    uint32 stage = 0, tiles_done = 0;  // of this block, in this stage
    while (true) {
        const uint32 ticket = uint32(take_ticket(&stages->tickets));  // its barriers: the block's tile is done
        if (ticket / tiles != stage) {
            // Once a stage, not for each tile: to publish, a thread waits until all that is written has arrived.
            if (threadIdx.x == 0 && tiles_done) add_acq_rel(&stages->done, tiles_done);
            stage = ticket / tiles, tiles_done = 0;
            if (stage >= stage_count) return;
            if (threadIdx.x == 0)
                while (load_acquire(&stages->done) < stage * tiles) spin_pause();
            __syncthreads();
        }
        do_tile(stage, int64(ticket - stage * tiles));
        ++tiles_done;
    }
}
