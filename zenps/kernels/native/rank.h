/* Ranks of keys, for what sums and places rows. */
#ifndef ZENPS_RANK_H
#define ZENPS_RANK_H

#include "loops_table.h"

/* The ranks of all rows, part after part, in memory that zenps_rank has filled. */
const uint32_t *zenps_ranks(const void *memory);

/* Writes the sorted unique keys. */
void zenps_keys(const Plan *plan, const void *memory, int64_t *keys);

/* The bytes that zenps_sum needs beside the ranks. */
int64_t zenps_sum_bytes(const Plan *plan);

#endif
