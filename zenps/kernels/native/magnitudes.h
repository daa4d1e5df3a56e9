/* The loops over magnitudes of floats: included once for each instruction set and dtype.
 *
 * GIVEN is an element's bits at any address, BITS the same as a number. Without their signs, bits are ordered as
 * magnitudes are, and NaN is above infinity: so no comparison is one of floats, and none depends on whether the thread
 * flushes denormals to zero.
 */

#define SIGN ((BITS)1 << (8 * sizeof(BITS) - 1))

INLINE BITS FOR_DTYPE(magnitude_of)(GIVEN element) {
    return element & (BITS)~SIGN;
}

/* Which of the next `count` elements, a BLOCK at most, have at least `least`. */
TARGET INLINE uint32_t FOR_DTYPE(mark_few)(const GIVEN *elements, int64_t count, BITS least) {
    uint32_t marks = 0;
    for (int64_t index = 0; index < count; ++index)
        marks |= (uint32_t)(FOR_DTYPE(magnitude_of)(elements[index]) >= least) << index;
    return marks;
}

/* The same of a whole BLOCK. In most there is none. */
TARGET INLINE uint32_t FOR_DTYPE(mark_block)(const GIVEN *elements, BITS least) {
    /* The hardware prefetcher does this, too, but not while the core recovers from a mispredicted branch. */
    for (size_t offset = 0; offset < BLOCK * sizeof *elements; offset += LINE_BYTES)
        __builtin_prefetch((const char *)elements + FETCHED_AHEAD + offset);
#ifdef HAS_F16C
    enum { LANES = 32 / sizeof(BITS), VECTORS = BLOCK / LANES };
    __m256i marked[VECTORS], any = _mm256_setzero_si256();
    for (int vector = 0; vector < VECTORS; ++vector) {
        __m256i loaded = _mm256_loadu_si256((const void *)(elements + vector * LANES));
        /* Of signed numbers: what is compared has no sign, and `least` - 1 may be -1. */
        marked[vector] = VECTOR_GREATER(_mm256_and_si256(loaded, VECTOR_OF(~SIGN)), VECTOR_OF(least - 1));
        any = _mm256_or_si256(any, marked[vector]);
    }
    if (_mm256_testz_si256(any, any))
        return 0;
    uint32_t marks = 0;
    for (int vector = 0; vector < VECTORS; ++vector)
        marks |= (uint32_t)VECTOR_MARKS(marked[vector]) << vector * LANES;
    return marks;
#else
    int any = 0;
    for (int64_t index = 0; index < BLOCK; ++index)
        any |= FOR_DTYPE(magnitude_of)(elements[index]) >= least;
    return any ? FOR_DTYPE(mark_few)(elements, BLOCK, least) : 0;
#endif
}

TARGET INLINE uint32_t FOR_DTYPE(mark_next)(const GIVEN *elements, int64_t count, BITS least) {
    return count < BLOCK ? FOR_DTYPE(mark_few)(elements, count, least) : FOR_DTYPE(mark_block)(elements, least);
}

TARGET static int64_t FOR_DTYPE(find)(const void *values, int64_t count, uint64_t least, int64_t *found, int64_t most) {
    const GIVEN *elements = values;
    int64_t number = 0;
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        uint32_t marks = FOR_DTYPE(mark_next)(elements + begin, count - begin, (BITS)least);
        for (; marks && number < most; marks &= marks - 1)
            found[number++] = begin + __builtin_ctz(marks);
        number += __builtin_popcount(marks);
    }
    return number;
}

/* Returns the magnitude that `*rank` others precede in descending order, and leaves the rank among those that equal it.
 * Digit by digit: only those that have the digits so far are kept. */
TARGET static BITS FOR_DTYPE(at_rank)(BITS *magnitudes, int64_t count, int64_t *rank) {
    for (int bits = 8 * (int)sizeof(BITS) - 1; bits > 0 && count > 1; bits -= DIGIT_BITS) {
        int shift = bits > DIGIT_BITS ? bits - DIGIT_BITS : 0;
        int64_t numbers[1 << DIGIT_BITS] = {0}, digit = (1 << DIGIT_BITS) - 1, kept = 0;
        for (int64_t index = 0; index < count; ++index)
            ++numbers[magnitudes[index] >> shift & ((1 << DIGIT_BITS) - 1)];
        for (; digit > 0 && *rank >= numbers[digit]; --digit)
            *rank -= numbers[digit];
        for (int64_t index = 0; index < count; ++index) {
            BITS magnitude = magnitudes[index];
            magnitudes[kept] = magnitude;
            kept += (int64_t)(magnitude >> shift & ((1 << DIGIT_BITS) - 1)) == digit;
        }
        count = kept;
    }
    return magnitudes[0];
}

TARGET static uint64_t FOR_DTYPE(sample)(const void *values, int64_t count, int64_t stride, int64_t rank, void *memory) {
    const GIVEN *elements = values;
    BITS *magnitudes = memory;
    int64_t sampled = 0;
    for (int64_t index = 0; index < count; index += stride) {
        BITS magnitude = FOR_DTYPE(magnitude_of)(elements[index]);
        magnitudes[sampled++] = magnitude < INFINITE ? magnitude : INFINITE;
    }
    return FOR_DTYPE(at_rank)(magnitudes, sampled, &rank);
}

/* Keeps the `most` greatest of what was found, in their order; of equal ones the first. Returns what is to be exceeded
 * from then on. */
TARGET static BITS FOR_DTYPE(keep_greatest)(int64_t *found, BITS *magnitudes, BITS *copy, int64_t count, int64_t most) {
    int64_t equal = most - 1, kept = 0;
    memcpy(copy, magnitudes, (size_t)count * sizeof *copy);
    BITS last = FOR_DTYPE(at_rank)(copy, count, &equal);
    for (int64_t index = 0; index < count; ++index) {
        BITS magnitude = magnitudes[index];
        int64_t is_equal = magnitude == last;
        found[kept] = found[index];
        magnitudes[kept] = magnitude;
        kept += magnitude > last || (is_equal && equal >= 0);
        equal -= is_equal;
    }
    return last;
}

TARGET static int64_t FOR_DTYPE(find_greatest)(const void *values, int64_t count, uint64_t given_least, int64_t most,
                                               int64_t *found, void *memory, int64_t room) {
    const GIVEN *elements = values;
    BITS *magnitudes = memory, *copy = magnitudes + room, least = (BITS)given_least;
    int64_t number = 0;
    /* Once as many infinite ones are kept as wanted, none can be greater. */
    for (int64_t begin = 0; begin < count && least <= INFINITE; begin += BLOCK) {
        uint32_t marks = FOR_DTYPE(mark_next)(elements + begin, count - begin, least);
        if (marks && number + BLOCK > room) {
            least = FOR_DTYPE(keep_greatest)(found, magnitudes, copy, number, most) + 1;
            number = most;
        }
        for (; marks; marks &= marks - 1) {
            int64_t index = begin + __builtin_ctz(marks);
            BITS magnitude = FOR_DTYPE(magnitude_of)(elements[index]);
            found[number] = index;
            magnitudes[number++] = magnitude < INFINITE ? magnitude : INFINITE;
        }
    }
    if (number > most) {
        FOR_DTYPE(keep_greatest)(found, magnitudes, copy, number, most);
        number = most;
    }
    return number;
}

/* Counts elements by the number of edges that they reach. A table of CELLS equal ranges, from the first edge to the last,
 * leaves few edges to compare with: one at most where edges grow by a factor, as a controller's do. */
TARGET static void FOR_DTYPE(count_edges)(const void *values, int64_t count, const uint64_t *edges, int64_t number,
                                          int64_t *counts) {
    const GIVEN *elements = values;
    int32_t reached[CELLS + 1];
    BITS least = (BITS)edges[0], width = (BITS)edges[number - 1] - least;
    int shift = 0;
    while (width >> shift >= CELLS)
        ++shift;
    BITS cells = (width >> shift) + 1;
    int32_t before = 0;
    for (BITS cell = 0; cell <= cells; ++cell) {
        while (before < number && (BITS)((BITS)edges[before] - least) >> shift < cell)
            ++before;
        reached[cell] = before;
    }
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        uint32_t marks = FOR_DTYPE(mark_next)(elements + begin, count - begin, least);
        for (; marks; marks &= marks - 1) {
            BITS magnitude = FOR_DTYPE(magnitude_of)(elements[begin + __builtin_ctz(marks)]);
            /* Another thread may have changed the element since it was marked. A magnitude below the first edge wraps
               around, and counts as above all edges. */
            BITS cell = (BITS)(magnitude - least) >> shift;
            int32_t edge = reached[cell < cells ? cell : cells];
            while (edge < number && edges[edge] <= magnitude)
                ++edge;
            ++counts[edge];
        }
    }
}

#undef SIGN
