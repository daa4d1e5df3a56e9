/* Positions of rows: the permutation of an index space, and the moves of its slots. */
#include "loops_table.h"

int64_t zenps_permute(const Feistel *feistel, int64_t is_inverse, const Key *numbers, int64_t count, int64_t *found) {
    return zenps_loops()->permute(feistel, is_inverse != 0, numbers, count, found);
}

int64_t zenps_shift(const Shift *shift, const Key *numbers, int64_t count, int64_t *found) {
    for (int64_t index = 0; index < count; ++index) {
        int64_t number = numbers[index];
        uint64_t bucket = (uint64_t)number >> shift->bits;
        if (bucket >= (uint64_t)shift->buckets)
            return index;
        int64_t range = shift->firsts[bucket];
        while (shift->ends[range] <= number) /* the last range never ends */
            ++range;
        found[index] = number + shift->distances[range];
    }
    return count;
}
