// Prefix sums: of a warp, of a block, and over all tiles of a grid in one pass.
//
// The scan over tiles is the decoupled look-back of Merrill and Garland, "Single-pass Parallel Prefix Scan
// with Decoupled Look-back", NVIDIA NVR-2016-002: a tile publishes its own total, then adds up the totals of
// the tiles before it back to one whose prefix is complete, and publishes its own prefix. A counter hands
// out the tiles, so a tile waits only for tiles that already run.
#pragma once

#include "common.cuh"

// The sum of the lanes before this one, valid in the first LANES. All 32 lanes take part.
template <int LANES = WARP>
__device__ inline uint32 warp_exclusive_sum(uint32 value) {
    const uint32 lane = threadIdx.x % WARP;
    uint32 sum = value;
    #pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
        const uint32 other = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= uint32(distance)) sum += other;
    }
    return sum - value;
}

// The sum of the threads before this one, and in `total` the sum of all. A whole block of THREADS takes part;
// both are valid in every thread. Another call may reuse the shared memory at once.
template <int THREADS>
__device__ inline uint32 block_exclusive_sum(uint32 value, uint32& total) {
    static_assert(THREADS % WARP == 0 && THREADS <= WARP * WARP, "whole warps, and one lane for each");
    constexpr int WARPS = THREADS / WARP;
    SHARED_ARRAY(uint32, warp_sums, WARPS);
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32 before = warp_exclusive_sum(value);
    if (lane == WARP - 1) warp_sums[warp] = before + value;
    __syncthreads();
    const uint32 warp_sum = lane < WARPS ? warp_sums[lane] : 0;
    const uint32 warps_before = warp_exclusive_sum<WARPS>(warp_sum);
    total = __shfl_sync(ALL_LANES, warps_before + warp_sum, WARPS - 1);
    __syncthreads();
    return __shfl_sync(ALL_LANES, warps_before, warp) + before;
}

// ---------------------------------------------------------------------------------------------------------
// Over tiles

// The zeroed memory from scan_state() of zenps/kernels/gpu/launcher.py: the counter that hands out tiles,
// then a status word for each. A word holds both flag and sum, so no other memory has to be ordered with it.
struct ScanState {
    uint64 tickets;
    uint64 status[1];
};

constexpr uint64 TOTAL_READY = 1ull << 62;   // the tile's own sum
constexpr uint64 PREFIX_READY = 2ull << 62;  // the sum of the tile and all before it
constexpr uint64 SUM_MASK = TOTAL_READY - 1;

// The next number that no block has taken; valid in every thread of the block.
__device__ inline int64 take_ticket(uint64* tickets) {
    SHARED_ARRAY(int64, ticket, 1);
    if (threadIdx.x == 0) *ticket = int64(atomicAdd(tickets, 1ull));
    __syncthreads();
    const int64 taken = *ticket;
    __syncthreads();
    return taken;
}

__device__ inline int64 take_tile(ScanState* state) { return take_ticket(&state->tickets); }

// The sum over all tiles before `tile`. Called by the first warp of the block, all lanes; valid in each.
__device__ inline uint64 look_back(ScanState* state, int64 tile, uint64 total) {
    const uint32 lane = threadIdx.x % WARP;
    if (tile == 0) {
        if (lane == 0) store_relaxed(&state->status[0], PREFIX_READY | total);
        return 0;
    }
    if (lane == 0) store_relaxed(&state->status[tile], TOTAL_READY | total);
    uint64 before = 0;
    for (int64 newest = tile - 1;; newest -= WARP) {
        const int64 predecessor = newest - lane;
        uint64 word = PREFIX_READY;  // before the first tile the prefix is 0
        while (true) {
            if (predecessor >= 0) word = load_relaxed(&state->status[predecessor]);
            if (__all_sync(ALL_LANES, word >= TOTAL_READY)) break;
            spin_pause();
        }
        // Lanes beyond the nearest complete prefix would count tiles twice.
        const uint32 complete = __ballot_sync(ALL_LANES, word >= PREFIX_READY);
        const uint32 nearest = complete ? uint32(__ffs(int(complete))) - 1 : WARP - 1;
        uint64 sum = lane <= nearest ? word & SUM_MASK : 0;
        for (int distance = WARP / 2; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        before += sum;
        if (complete) break;
    }
    if (lane == 0) store_relaxed(&state->status[tile], PREFIX_READY | (before + total));
    return before;
}

// The same for a whole block: valid in every thread.
__device__ inline int64 tiles_before(ScanState* state, int64 tile, uint32 total) {
    SHARED_ARRAY(int64, shared_before, 1);
    if (threadIdx.x < WARP) {
        const uint64 before = look_back(state, tile, total);
        if (threadIdx.x == 0) *shared_before = int64(before);
    }
    __syncthreads();
    const int64 before = *shared_before;
    __syncthreads();
    return before;
}
