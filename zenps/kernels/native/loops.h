/* The loops over keys and rows: included once for each instruction set, with TARGET and NAMED defined. */

/* Rows ahead whose places are fetched into the cache. */
#define AHEAD 12

/* Bytes of a row that are fetched; the processor fetches what follows by itself. */
#define FETCHED_BYTES 256

/* ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────── */

TARGET static void NAMED(measure)(const Key *keys, int64_t rows, Plan *plan) {
    int64_t least = plan->least, most = plan->most;
    int in_order = 1;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t key = keys[row];
        least = key < least ? key : least;
        most = key > most ? key : most;
    }
    for (int64_t row = 1; row < rows; ++row)
        in_order &= keys[row] > keys[row - 1];
    plan->least = least;
    plan->most = most;
    plan->in_order &= in_order;
}

/* Sets the bit of each key, and leaves its offset, and whether it is the first with this key. */
TARGET static int NAMED(mark)(const Key *keys, int64_t rows, const Plan *plan, Word *words, uint32_t *offsets) {
    uint64_t least = (uint64_t)plan->least, width = (uint64_t)plan->most - least;
    for (int64_t row = 0; row < rows; ++row) {
        uint64_t offset = (uint64_t)keys[row] - least;
        if (offset > width)
            return -1;
        Word *word = &words[offset >> 6];
        uint64_t bits = word->bits, bit = (uint64_t)1 << (offset & 63);
        word->bits = bits | bit;
        offsets[row] = (uint32_t)offset | (bits & bit ? 0 : FIRST);
    }
    return 0;
}

/* Counts the bits before each word; returns how many there are. */
TARGET static uint64_t NAMED(count)(Word *words, int64_t number) {
    uint64_t before = 0;
    for (int64_t index = 0; index < number; ++index) {
        words[index].before = before;
        before += (uint64_t)__builtin_popcountll(words[index].bits);
    }
    return before;
}

/* Replaces offsets by ranks. */
TARGET static void NAMED(look_up)(const Word *words, uint32_t *ranks, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
        uint32_t offset = ranks[row] & ~FIRST;
        const Word *word = &words[offset >> 6];
        uint64_t below = word->bits & (((uint64_t)1 << (offset & 63)) - 1);
        ranks[row] = (ranks[row] & FIRST) | (uint32_t)(word->before + (uint64_t)__builtin_popcountll(below));
    }
}

/* ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Adds the rows of a part, from `begin` on, whose ranks lie in a range. Returns the first row of a greater rank, if
 * ranks are in order. */
#define SUM(DTYPE, GIVEN, SUMMED, WIDEN)                                                                           \
    TARGET INLINE int64_t NAMED(sum_columns_##DTYPE)(const Stretch *s, int64_t columns) {                          \
        const GIVEN *values = s->values;                                                                           \
        SUMMED *sums = s->sums;                                                                                    \
        const uint32_t *ranks = s->ranks;                                                                          \
        uint32_t low = s->low, count = s->high - s->low;                                                           \
        int64_t fetched = columns * (int64_t)sizeof(SUMMED);                                                       \
        fetched = fetched < FETCHED_BYTES ? fetched : FETCHED_BYTES;                                               \
        for (int64_t row = s->begin; row < s->rows; ++row) {                                                       \
            uint32_t rank = (ranks[row] & ~FIRST) - low;                                                           \
            if (rank >= count) {                                                                                   \
                if (s->in_order)                                                                                   \
                    return row;                                                                                    \
                continue;                                                                                          \
            }                                                                                                      \
            if (row + AHEAD < s->rows) {                                                                           \
                uint32_t next = (ranks[row + AHEAD] & ~FIRST) - low;                                               \
                if (next < count)                                                                                  \
                    fetch((const char *)(sums + (int64_t)next * columns), fetched);                                \
            }                                                                                                      \
            SUMMED *sum = sums + (int64_t)rank * columns;                                                          \
            const GIVEN *value = values + row * columns;                                                           \
            if (ranks[row] & FIRST)                                                                                \
                for (int64_t column = 0; column < columns; ++column)                                               \
                    sum[column] = WIDEN(value[column]);                                                            \
            else                                                                                                   \
                for (int64_t column = 0; column < columns; ++column)                                               \
                    sum[column] = (SUMMED)(sum[column] + WIDEN(value[column]));                                    \
        }                                                                                                          \
        return s->rows;                                                                                            \
    }                                                                                                              \
    TARGET static int64_t NAMED(sum_##DTYPE)(const Stretch *s) {                                                   \
        switch (s->columns) {                                                                                      \
        case 1:                                                                                                    \
            return NAMED(sum_columns_##DTYPE)(s, 1);                                                               \
        default:                                                                                                   \
            return NAMED(sum_columns_##DTYPE)(s, s->columns);                                                      \
        }                                                                                                          \
    }

SUM(float16, Half, float, from_half)
SUM(bfloat16, Half, float, from_brain)
SUM(float32, Single, Single, )
SUM(float64, Double, Double, )
SUM(int64, Unsigned, Unsigned, )
SUM(uint8, uint8_t, uint8_t, )
#undef SUM

/* Divides sums, and rounds them to the dtype of the values. */
#define FINISH(DTYPE, SUMMED, TAKEN, NARROW)                                                                       \
    TARGET static void NAMED(finish_##DTYPE)(const void *given, void *taken, int64_t number, int64_t divisor) {    \
        const SUMMED *sums = given;                                                                                \
        TAKEN *values = taken;                                                                                     \
        SUMMED by = (SUMMED)divisor;                                                                               \
        if (divisor == 1)                                                                                          \
            for (int64_t index = 0; index < number; ++index)                                                       \
                values[index] = NARROW(sums[index]);                                                               \
        else                                                                                                       \
            for (int64_t index = 0; index < number; ++index)                                                       \
                values[index] = NARROW(sums[index] / by);                                                          \
    }

FINISH(float16, float, Half, to_half)
FINISH(bfloat16, float, Half, to_brain)
FINISH(float32, Single, Single, )
FINISH(float64, Double, Double, )
#undef FINISH

/* Copies the rows of a part whose ranks lie in a range. */
TARGET INLINE void NAMED(place_bytes)(const Stretch *s, int64_t bytes) {
    const char *values = s->values;
    char *placed = s->sums;
    uint32_t low = s->low, count = s->high - s->low;
    int64_t fetched = bytes < FETCHED_BYTES ? bytes : FETCHED_BYTES;
    for (int64_t row = 0; row < s->rows; ++row) {
        uint32_t rank = (s->ranks[row] & ~FIRST) - low;
        if (rank >= count)
            continue;
        if (row + AHEAD < s->rows) {
            uint32_t next = (s->ranks[row + AHEAD] & ~FIRST) - low;
            if (next < count)
                fetch(placed + (int64_t)next * bytes, fetched);
        }
        memcpy(placed + (int64_t)rank * bytes, values + row * bytes, (size_t)bytes);
    }
}

TARGET static void NAMED(place)(const Stretch *s) {
    switch (s->columns) {
    case 1:
        NAMED(place_bytes)(s, 1);
        break;
    case 2:
        NAMED(place_bytes)(s, 2);
        break;
    case 4:
        NAMED(place_bytes)(s, 4);
        break;
    case 8:
        NAMED(place_bytes)(s, 8);
        break;
    default:
        NAMED(place_bytes)(s, s->columns);
    }
}

static const Loops NAMED(loops) = {
    .measure = NAMED(measure),
    .mark = NAMED(mark),
    .count = NAMED(count),
    .look_up = NAMED(look_up),
    .sum = {NAMED(sum_float16), NAMED(sum_bfloat16), NAMED(sum_float32), NAMED(sum_float64), NAMED(sum_int64),
            NAMED(sum_uint8)},
    .finish = {NAMED(finish_float16), NAMED(finish_bfloat16), NAMED(finish_float32), NAMED(finish_float64)},
    .place = NAMED(place),
};
