/* Magnitudes of dense floats: which are great, and how many, for sparsifiers. */
#include "loops_table.h"

int64_t zenps_find(int64_t dtype, const void *values, int64_t count, int64_t least, int64_t *found, int64_t most) {
    return zenps_loops()->magnitudes[dtype == FLOAT64].find(values, count, (uint64_t)least, found, most);
}

int64_t zenps_find_greatest(int64_t dtype, const void *values, int64_t count, int64_t least, int64_t most, int64_t *found,
                            void *memory, int64_t room) {
    const MagnitudeLoops *loops = &zenps_loops()->magnitudes[dtype == FLOAT64];
    return loops->find_greatest(values, count, (uint64_t)least, most, found, memory, room);
}

int64_t zenps_sample(int64_t dtype, const void *values, int64_t count, int64_t stride, int64_t rank, void *memory) {
    return (int64_t)zenps_loops()->magnitudes[dtype == FLOAT64].sample(values, count, stride, rank, memory);
}

void zenps_count_edges(int64_t dtype, const void *values, int64_t count, const uint64_t *edges, int64_t number,
                       int64_t *counts) {
    for (int64_t edge = 0; edge <= number; ++edge)
        counts[edge] = 0;
    zenps_loops()->magnitudes[dtype == FLOAT64].count_edges(values, count, edges, number, counts);
    for (int64_t edge = number - 1; edge > 0; --edge)
        counts[edge] += counts[edge + 1];
}
