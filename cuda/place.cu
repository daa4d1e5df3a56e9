// Mapping between rows and positions, and the offsets of shard bounds in sorted positions.
//
// Deterministic. One thread per number: the work is arithmetic (about 60 instructions for π) between a
// coalesced load and a coalesced store.
#include "keyspace.cuh"

// positions[i] = the position of rows[i]; a row outside the tensor sets *outside and gets position 0.
template <typename Row, typename Position>
__global__ void place_rows(const __grid_constant__ Placement placement, const Row* rows, int64 count, Position* positions,
                           uint64* outside) {
    const int64 i = global_thread();
    if (i >= count) return;
    const int64 row = int64(rows[i]);
    const bool inside = row >= 0 && row < placement.rows;
    if (!inside) atomicExch(outside, 1ull);
    positions[i] = Position(inside ? position_of(placement, row) : 0);
}

// rows[i] = the row at positions[i]; a position that no row has sets *outside and gets row 0.
template <typename Position>
__global__ void unplace_rows(const __grid_constant__ Placement placement, const Position* positions, int64 count, int64* rows,
                             uint64* outside) {
    const int64 i = global_thread();
    if (i >= count) return;
    const int64 position = int64(positions[i]);
    const bool inside = position >= 0 && position < placement.granules << placement.granule_bits;
    const int64 row = inside ? row_at(placement, position) : placement.rows;
    const bool exists = row < placement.rows;
    if (!exists) atomicExch(outside, 1ull);
    rows[i] = exists ? row : 0;
}

// offsets[i] = the number of the *count sorted positions below cuts[i].
template <typename Position>
__global__ void find_cuts(const Position* positions, const int64* count, const int64* cuts, int64 cut_count,
                          int64* offsets) {
    const int64 i = global_thread();
    if (i >= cut_count) return;
    offsets[i] = lower_bound(positions, *count, cuts[i]);
}
