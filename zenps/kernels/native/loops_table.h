/* Table of the loops over keys and rows, of which there is one for each instruction set. */
#ifndef ZENPS_LOOPS_TABLE_H
#define ZENPS_LOOPS_TABLE_H

#include "native.h"

#define LINE_BYTES 64

/* 64 keys: which of them there are, and how many there are before them. */
typedef struct {
    uint64_t bits;
    uint64_t before;
} Word;

/* Set in a rank if no row before has the same key. */
#define FIRST ((uint32_t)1 << 31)

/* The rows of one part that are summed or placed. */
typedef struct {
    const uint32_t *ranks;
    const void *values;
    int64_t begin, rows;
    uint32_t low, high; /* ranks from `low`, below `high` */
    int in_order;
    int64_t columns;
    void *sums; /* that of rank `low` first */
    int is_streamed; /* 1 if rows are placed past the caches: each is whole lines, and begins one */
} Stretch;

typedef struct {
    int64_t (*find)(const void *values, int64_t count, uint64_t least, int64_t *found, int64_t most);
    int64_t (*find_greatest)(const void *values, int64_t count, uint64_t least, int64_t most, int64_t *found, void *memory,
                             int64_t room);
    uint64_t (*sample)(const void *values, int64_t count, int64_t stride, int64_t rank, void *memory);
    void (*count_edges)(const void *values, int64_t count, const uint64_t *edges, int64_t number, int64_t *counts);
} MagnitudeLoops;

typedef struct {
    void (*measure)(const Key *keys, int64_t rows, Plan *plan);
    int (*mark)(const Key *keys, int64_t rows, const Plan *plan, Word *words, uint32_t *offsets);
    uint64_t (*count)(Word *words, int64_t number);
    void (*look_up)(const Word *words, uint32_t *ranks, int64_t rows);
    int64_t (*sum[DTYPES])(const Stretch *stretch);
    void (*finish[DTYPES])(void *sums, void *values, int64_t count, int64_t divisor);
    void (*place)(const Stretch *stretch);
    int64_t (*permute)(const Feistel *feistel, int is_inverse, const Key *numbers, int64_t count, int64_t *found);
    MagnitudeLoops magnitudes[2]; /* of float32, of float64 */
} Loops;

const Loops *zenps_loops(void);

#endif
