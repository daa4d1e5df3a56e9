// Mapping from rows to positions.
//
// Deterministic. The work is arithmetic, about 180 instructions a number, between a coalesced load and a coalesced
// store; each thread does several numbers, for which it reads the layout once.
#include "keyspace.cuh"

// positions[i] = the position of rows[i], -1 for a row outside the tensor; cleared[i] = 0, for the kernels that
// come next. Any number of threads.
template <typename Row, typename Position>
__global__ void place_rows(const __grid_constant__ Placement placement, const Row* rows, int64 count,
                           Position* positions, int64* cleared, int64 words) {
    for (int64 i = global_thread(); i < words; i += grid_threads()) cleared[i] = 0;
    for (int64 i = global_thread(); i < count; i += grid_threads()) {
        const int64 row = int64(rows[i]);
        const bool inside = row >= 0 && row < placement.rows;
        positions[i] = Position(inside ? position_of(placement, row) : -1);
    }
}
