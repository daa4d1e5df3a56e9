/* The loops over keys and rows: included once for each instruction set, with TARGET and NAMED defined. */

/* Keys that are compared before the loop looks if it may end. */
#define RUN 512

/* Bytes of a row that are fetched; the processor fetches what follows by itself. */
#define FETCHED_BYTES 512

/* ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Whether keys increase strictly, up to a run of them that does not. */
TARGET static int NAMED(increases)(const Key *keys, int64_t rows) {
    int increases = 1;
    for (int64_t begin = 1; begin < rows && increases; begin += RUN) {
        int64_t end = begin + RUN < rows ? begin + RUN : rows;
        for (int64_t row = begin; row < end; ++row)
            increases &= keys[row] > keys[row - 1];
    }
    return increases;
}

TARGET static void NAMED(measure)(const Key *keys, int64_t rows, Plan *plan) {
    int64_t least = plan->least, most = plan->most;
    int is_in_order = NAMED(increases)(keys, rows);
    if (rows && is_in_order) {
        least = keys[0] < least ? keys[0] : least;
        most = keys[rows - 1] > most ? keys[rows - 1] : most;
    } else {
        for (int64_t row = 0; row < rows; ++row) {
            int64_t key = keys[row];
            least = key < least ? key : least;
            most = key > most ? key : most;
        }
    }
    plan->least = least;
    plan->most = most;
    plan->in_order &= is_in_order;
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

#define WIDE
#define GIVEN Half
#define NUMBER Single
#define BITS uint32_t
#define NEUTRAL 0x80000000

TARGET INLINE void NAMED(widen_float16)(const Half *halves, Single *floats, int64_t count) {
    int64_t index = 0;
#ifdef HAS_F16C
    for (; index + 8 <= count; index += 8)
        _mm256_storeu_ps((float *)floats + index, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(halves + index))));
#endif
    for (; index < count; ++index)
        floats[index] = from_half(halves[index]);
}

TARGET INLINE void NAMED(narrow_float16)(const Single *floats, Half *halves, int64_t count) {
    int64_t index = 0;
#ifdef HAS_F16C
    for (; index + 8 <= count; index += 8)
        _mm_storeu_si128((void *)(halves + index), _mm256_cvtps_ph(_mm256_loadu_ps((const float *)floats + index), 0));
#endif
    for (; index < count; ++index)
        halves[index] = to_half(floats[index]);
}

#define FOR_DTYPE(name) NAMED(name##_float16)
#include "sum.h"
#undef FOR_DTYPE

TARGET INLINE void NAMED(widen_bfloat16)(const Half *halves, Single *floats, int64_t count) {
    for (int64_t index = 0; index < count; ++index)
        floats[index] = from_brain(halves[index]);
}

TARGET INLINE void NAMED(narrow_bfloat16)(const Single *floats, Half *halves, int64_t count) {
    for (int64_t index = 0; index < count; ++index)
        halves[index] = to_brain(floats[index]);
}

#define FOR_DTYPE(name) NAMED(name##_bfloat16)
#include "sum.h"
#undef FOR_DTYPE
#undef WIDE
#undef GIVEN

#define GIVEN Single
#define FOR_DTYPE(name) NAMED(name##_float32)
#include "sum.h"
#undef FOR_DTYPE
#undef GIVEN
#undef NUMBER
#undef BITS
#undef NEUTRAL

#define GIVEN Double
#define NUMBER Double
#define BITS uint64_t
#define NEUTRAL ((uint64_t)1 << 63)
#define FOR_DTYPE(name) NAMED(name##_float64)
#include "sum.h"
#undef FOR_DTYPE
#undef GIVEN
#undef NUMBER
#undef NEUTRAL

/* Sums of int64 wrap around. */
#define GIVEN Unsigned
#define NUMBER Unsigned
#define NEUTRAL 0
#define FOR_DTYPE(name) NAMED(name##_int64)
#include "sum.h"
#undef FOR_DTYPE
#undef GIVEN
#undef NUMBER
#undef BITS

#define GIVEN uint8_t
#define NUMBER uint8_t
#define BITS uint8_t
#define FOR_DTYPE(name) NAMED(name##_uint8)
#include "sum.h"
#undef FOR_DTYPE
#undef GIVEN
#undef NUMBER
#undef BITS
#undef NEUTRAL

/* Copies the rows of a part whose ranks lie in a range. */
TARGET INLINE void NAMED(place_bytes)(const Stretch *s, int64_t bytes) {
    const char *values = s->values;
    char *placed = s->sums;
    uint32_t low = s->low, count = s->high - s->low;
    int64_t ahead = rows_ahead(bytes);
    int64_t fetched = bytes < FETCHED_BYTES ? bytes : FETCHED_BYTES;
    for (int64_t row = 0; row < s->rows; ++row) {
        uint32_t rank = (s->ranks[row] & ~FIRST) - low;
        if (rank >= count)
            continue;
        if (row + ahead < s->rows) {
            uint32_t next = (s->ranks[row + ahead] & ~FIRST) - low;
            if (next < count)
                fetch(placed + (int64_t)next * bytes, fetched);
        }
        memcpy(placed + (int64_t)rank * bytes, values + row * bytes, (size_t)bytes);
    }
}

/* Copies rows without reading the lines that they replace. */
TARGET static void NAMED(stream)(const Stretch *s) {
#ifdef HAS_STREAM
    const char *values = s->values;
    char *placed = s->sums;
    int64_t bytes = s->columns;
    uint32_t low = s->low, count = s->high - s->low;
    for (int64_t row = 0; row < s->rows; ++row) {
        uint32_t rank = (s->ranks[row] & ~FIRST) - low;
        if (rank >= count)
            continue;
        const __m128i *from = (const void *)(values + row * bytes);
        __m128i *to = (void *)(placed + (int64_t)rank * bytes);
        for (int64_t index = 0; index < bytes / 16; ++index)
            _mm_stream_si128(to + index, _mm_loadu_si128(from + index));
    }
    _mm_sfence();
#else
    NAMED(place_bytes)(s, s->columns);
#endif
}

TARGET static void NAMED(place)(const Stretch *s) {
    if (s->is_streamed) {
        NAMED(stream)(s);
        return;
    }
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

/* ── magnitudes ────────────────────────────────────────────────────────────────────────────────────────────── */

#define GIVEN SingleBits
#define BITS uint32_t
#define INFINITE 0x7f800000u
#define VECTOR_OF(number) _mm256_set1_epi32((int)(number))
#define VECTOR_GREATER _mm256_cmpgt_epi32
#define VECTOR_MARKS(marked) _mm256_movemask_ps(_mm256_castsi256_ps(marked))
#define FOR_DTYPE(name) NAMED(name##_magnitudes32)
#include "magnitudes.h"
#undef FOR_DTYPE
#undef VECTOR_MARKS
#undef VECTOR_GREATER
#undef VECTOR_OF
#undef INFINITE
#undef BITS
#undef GIVEN

#define GIVEN Unsigned
#define BITS uint64_t
#define INFINITE 0x7ff0000000000000u
#define VECTOR_OF(number) _mm256_set1_epi64x((long long)(number))
#define VECTOR_GREATER _mm256_cmpgt_epi64
#define VECTOR_MARKS(marked) _mm256_movemask_pd(_mm256_castsi256_pd(marked))
#define FOR_DTYPE(name) NAMED(name##_magnitudes64)
#include "magnitudes.h"
#undef FOR_DTYPE
#undef VECTOR_MARKS
#undef VECTOR_GREATER
#undef VECTOR_OF
#undef INFINITE
#undef BITS
#undef GIVEN

/* ── positions ─────────────────────────────────────────────────────────────────────────────────────────────── */

#include "feistel.h"

#define MAGNITUDES(dtype)                                                                                                  \
    { NAMED(find_##dtype), NAMED(find_greatest_##dtype), NAMED(sample_##dtype), NAMED(count_edges_##dtype) }

static const Loops NAMED(loops) = {
    .measure = NAMED(measure),
    .mark = NAMED(mark),
    .count = NAMED(count),
    .look_up = NAMED(look_up),
    .sum = {NAMED(sum_float16), NAMED(sum_bfloat16), NAMED(sum_float32), NAMED(sum_float64), NAMED(sum_int64),
            NAMED(sum_uint8)},
    .finish = {NAMED(finish_float16), NAMED(finish_bfloat16), NAMED(finish_float32), NAMED(finish_float64),
               NAMED(finish_int64), NAMED(finish_uint8)},
    .place = NAMED(place),
    .permute = NAMED(permute),
    .magnitudes = {MAGNITUDES(magnitudes32), MAGNITUDES(magnitudes64)},
};
#undef MAGNITUDES
