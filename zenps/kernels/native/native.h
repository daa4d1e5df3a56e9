/* Interface of the compiled CPU kernels, for zenps/kernels/native/library.py: pointers and int64 only.
 *
 * A caller measures the keys, gives memory, ranks them, gives memory again, and sums or places the rows. Keys are
 * read once to measure and once to rank, and may change in between, where others write to the same memory: ranking
 * refuses what was not measured, and all that follows reads the ranks, in the caller's memory: nobody else may write
 * there in between.
 */
#ifndef ZENPS_NATIVE_H
#define ZENPS_NATIVE_H

#include <stdint.h>

/* Of all that this file declares. Raise it with each change, and VERSION in library.py: an older library may remain
 * beside newer Python files. */
#define ZENPS_VERSION 2

int64_t zenps_version(void);

/* Received values may have any address. */
typedef int64_t __attribute__((aligned(1), may_alias)) Key;

typedef struct {
    const Key *keys;
    const void *values; /* rows × columns */
    int64_t rows;
} Part;

enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64, INT64, UINT8, DTYPES };

/* How keys are ranked. */
enum { AUTOMATIC, BITMAP, RADIX, NONE };

typedef struct {
    int64_t parts;    /* given, as are all down to the method */
    int64_t dtype;    /* of the values that are summed */
    int64_t columns;  /* of the values that are summed; of those that are placed, the bytes of a row */
    int64_t divisor;
    int64_t threads;  /* at most */
    int64_t method;   /* AUTOMATIC, or BITMAP or RADIX where they can be; then the one that was chosen */
    int64_t rows;     /* of all parts */
    int64_t least;    /* key */
    int64_t most;     /* key */
    int64_t in_order; /* 1 if the keys of each part increase strictly */
    int64_t rank_bytes; /* of the memory for ranks */
    int64_t unique;   /* number of different keys */
    int64_t sum_bytes; /* of the memory for sums */
} Plan;

/* Rows of all parts: ranks have 31 bits. */
#define MAX_ROWS ((int64_t)1 << 31)

/* Fills in the plan from `rows` to `rank_bytes`. */
void zenps_measure(const Part *parts, Plan *plan);

/* Ranks keys: fills in `unique` and `sum_bytes`. Returns 0, or -1 if keys are not those that were measured.
 * `memory` has `rank_bytes`, at a multiple of 64. */
int zenps_rank(const Part *parts, Plan *plan, void *memory);

/* Sums rows: `unique` sorted keys and sums; `memory` has `sum_bytes`, at a multiple of 64. */
void zenps_sum(const Part *parts, const Plan *plan, const void *ranked, void *memory, int64_t *keys, void *sums);

/* Places rows of keys that are all different, in order of their keys. */
void zenps_place(const Part *parts, const Plan *plan, const void *ranked, int64_t *keys, void *values);

/* Writes the numbers of the bits that are set. Returns how many there are, or -1 if there are more than `most`. */
int64_t zenps_set_bits(const unsigned char *bitmap, int64_t bytes, int64_t *numbers, int64_t most);

/* The inverse: clears the bitmap and sets these bits. Returns 0, or -1 if a number lies outside it. */
int zenps_mark_bits(const Key *numbers, int64_t count, unsigned char *bitmap, int64_t bytes);

/* Looks up the granule of each number in a table, and keeps the number's last `bits` bits, its place in the granule.
 * Returns how many numbers were looked up: all, or those before the first that lies outside [0, total). */
int64_t zenps_look_up(const int32_t *table, int64_t bits, int64_t total, const Key *numbers, int64_t count, int64_t *found);

#define FEISTEL_ROUNDS 4

/* `Feistel` of zenps/partition/keyspace.py. */
typedef struct {
    int64_t size;
    int64_t left_size, right_size; /* at most 2^31 */
    int64_t keys[FEISTEL_ROUNDS];
} Feistel;

/* Permutes numbers, or does the inverse. Returns `count`, or less if one lies outside [0, size). */
int64_t zenps_permute(const Feistel *feistel, int64_t is_inverse, const Key *numbers, int64_t count, int64_t *found);

/* `Shift` of zenps/partition/placing.py. */
typedef struct {
    const uint16_t *firsts;
    int64_t buckets; /* of `firsts` */
    int64_t bits;
    const int64_t *ends;
    const int64_t *distances;
} Shift;

/* Moves numbers. Returns `count`, or less if one lies in no bucket. */
int64_t zenps_shift(const Shift *shift, const Key *numbers, int64_t count, int64_t *found);

/* Magnitudes of `count` elements, FLOAT32 or FLOAT64. `least` is the bits of a magnitude: an element reaches it if it is
 * as great, or NaN. */

/* Writes the numbers of the first `most` elements that reach `least`. Returns how many reach it. */
int64_t zenps_find(int64_t dtype, const void *values, int64_t count, int64_t least, int64_t *found, int64_t most);

/* Writes the numbers of the elements that reach `least`, or of the `most` greatest of them, and returns how many. NaN
 * and infinity are equal; of equal ones the first are taken. `found` has room for `room` numbers, `memory` for twice as
 * many elements; `room` is greater than `most` by 32 at least, and more of it saves time. `most` is at least 1. */
int64_t zenps_find_greatest(int64_t dtype, const void *values, int64_t count, int64_t least, int64_t most, int64_t *found,
                            void *memory, int64_t room);

/* The bits of the magnitude, infinity for NaN, that `rank` others precede in descending order, among every `stride`-th
 * element. `memory` has room for these, which are more than `rank`. */
int64_t zenps_sample(int64_t dtype, const void *values, int64_t count, int64_t stride, int64_t rank, void *memory);

/* Counts the elements that reach each of `number` edges, ascending bits of magnitudes, 1 or more: that of edge i in
 * `counts[i + 1]`. `counts` has `number` + 1. */
void zenps_count_edges(int64_t dtype, const void *values, int64_t count, const uint64_t *edges, int64_t number,
                       int64_t *counts);

#endif
