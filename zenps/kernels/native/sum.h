/* Sums of rows: included once for each dtype and instruction set.
 *
 * Defined are GIVEN and NUMBER, the types of values and of sums; BITS, an unsigned type of NUMBER's size; NEUTRAL, the
 * bits of the number that changes no sum; and WIDE where GIVEN is narrower than NUMBER.
 */

/* -0.0, not 0.0, is neutral among floats: 0.0 would turn a sum of -0.0 into 0.0. */
TARGET INLINE void FOR_DTYPE(add_numbers)(NUMBER *sum, const NUMBER *row, int64_t columns, uint64_t kept) {
    typedef NUMBER Vector __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
    typedef BITS Mask __attribute__((vector_size(VECTOR_BYTES), aligned(1), may_alias));
    enum { LANES = VECTOR_BYTES / sizeof(NUMBER) };
    /* Where a row is the first of its key, the sum is taken for neutral. A branch would be mispredicted. */
    Mask mask = (Mask){0} + (BITS)kept, neutral = ~mask & (BITS)NEUTRAL;
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES) {
        Mask bits = (*(const Mask *)(sum + column) & mask) | neutral;
        *(Vector *)(sum + column) = (Vector)bits + *(const Vector *)(row + column);
    }
    for (; column < columns; ++column) {
        BITS bits;
        NUMBER number;
        memcpy(&bits, &sum[column], sizeof bits);
        bits = (BITS)((bits & kept) | (NEUTRAL & ~kept));
        memcpy(&number, &bits, sizeof number);
        sum[column] = (NUMBER)(number + row[column]);
    }
}

TARGET INLINE void FOR_DTYPE(add_row)(NUMBER *sum, const GIVEN *row, int64_t columns, uint64_t kept) {
#ifdef WIDE
    NUMBER wide[WIDE_COLUMNS];
    for (int64_t begin = 0; begin < columns; begin += WIDE_COLUMNS) {
        int64_t count = columns - begin < WIDE_COLUMNS ? columns - begin : WIDE_COLUMNS;
        FOR_DTYPE(widen)(row + begin, wide, count);
        FOR_DTYPE(add_numbers)(sum + begin, wide, count, kept);
    }
#else
    FOR_DTYPE(add_numbers)(sum, row, columns, kept);
#endif
}

TARGET INLINE int64_t FOR_DTYPE(sum_columns)(const Stretch *s, int64_t columns) {
    const GIVEN *values = s->values;
    NUMBER *sums = s->sums;
    const uint32_t *ranks = s->ranks;
    uint32_t low = s->low, count = s->high - s->low;
    int64_t row_bytes = columns * (int64_t)sizeof(NUMBER);
    int64_t ahead = rows_ahead(row_bytes);
    int64_t fetched = row_bytes < FETCHED_BYTES ? row_bytes : FETCHED_BYTES;
    for (int64_t row = s->begin; row < s->rows; ++row) {
        uint32_t rank = (ranks[row] & ~FIRST) - low;
        if (rank >= count) {
            if (s->in_order)
                return row;
            continue;
        }
        if (row + ahead < s->rows) {
            uint32_t next = (ranks[row + ahead] & ~FIRST) - low;
            if (next < count)
                fetch((const char *)(sums + (int64_t)next * columns), fetched);
        }
        uint64_t kept = (uint64_t)(ranks[row] >> 31) - 1;
        FOR_DTYPE(add_row)(sums + (int64_t)rank * columns, values + row * columns, columns, kept);
    }
    return s->rows;
}

/* Adds the rows of a part, from `begin` on, whose ranks lie in a range. Returns the first row beyond, if ranks are in
 * order. */
TARGET static int64_t FOR_DTYPE(sum)(const Stretch *s) {
    switch (s->columns) {
    case 1:
        return FOR_DTYPE(sum_columns)(s, 1);
    case 2:
        return FOR_DTYPE(sum_columns)(s, 2);
    default:
        return FOR_DTYPE(sum_columns)(s, s->columns);
    }
}

/* Divides sums, and rounds them to the dtype of the values. */
TARGET static void FOR_DTYPE(finish)(void *given, void *taken, int64_t count, int64_t divisor) {
    NUMBER *sums = given, by = (NUMBER)divisor;
    if (divisor != 1)
        for (int64_t index = 0; index < count; ++index)
            sums[index] = (NUMBER)(sums[index] / by);
#ifdef WIDE
    FOR_DTYPE(narrow)(sums, taken, count);
#else
    (void)taken; /* sums are summed in their place */
#endif
}
