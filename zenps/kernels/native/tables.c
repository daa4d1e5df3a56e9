/* Look-up of rows and positions in the tables of a layout. */
#include "native.h"

/* Entries are prefetched this many numbers ahead, for tables larger than the cache. */
#define AHEAD 32

int64_t zenps_look_up(const int32_t *table, int64_t bits, int64_t total, const Key *numbers, int64_t count, int64_t *found) {
    uint64_t within = ((uint64_t)1 << bits) - 1, end = (uint64_t)total;
    for (int64_t index = 0; index < count; ++index) {
        uint64_t number = (uint64_t)numbers[index];
        if (number >= end)
            return index;
        if (index + AHEAD < count && (uint64_t)numbers[index + AHEAD] < end)
            __builtin_prefetch(&table[(uint64_t)numbers[index + AHEAD] >> bits]);
        found[index] = (int64_t)((uint64_t)table[number >> bits] << bits | (number & within));
    }
    return count;
}
