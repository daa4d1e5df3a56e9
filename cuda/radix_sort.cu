// Radix sort of positions alone; sort_compact.cu finds the runs of equal ones as well, by the same launch.
#include "radix_sort.cuh"

template <typename Position>
__global__ void radix_sort(Stages* stages, const __grid_constant__ RadixSort<Position> sort) {
    run_stages(stages, sort.tiles, 1 + sort.passes, [&](uint32 stage, int64 tile) { sort_tile(sort, stage, tile); });
}
