/* Ranks of keys, by a bitmap of their span or by radix sort: which place each row has among the sorted unique keys.
 *
 * The bitmap: set the bit of each key; count the bits before each word; the rank of a key is that count and the bits
 * below its own. That takes time for the span, too. Where the span is large against the rows, keys are sorted.
 */
#include "rank.h"

#include <string.h>

/* In a span of more keys for each row, to sort is faster: benchmarks/bench_kernels.py measures it. */
#define SPAN_PER_ROW 32

#define MAX_DIGIT_BITS 11

static int64_t rounded_up(int64_t bytes) {
    return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

static int bits_of(uint64_t number) {
    return number ? 64 - __builtin_clzll(number) : 0;
}

static uint64_t width_of(const Plan *plan) {
    return (uint64_t)plan->most - (uint64_t)plan->least;
}

static int64_t words_of(const Plan *plan) {
    return (int64_t)(width_of(plan) >> 6) + 1;
}

const uint32_t *zenps_ranks(const void *memory) {
    return memory;
}

static void *table_in(const Plan *plan, const void *memory) {
    return (char *)(uintptr_t)memory + rounded_up(plan->rows * (int64_t)sizeof(uint32_t));
}

static void choose(Plan *plan) {
    int64_t wanted = plan->method, rows = plan->rows;
    uint64_t width = width_of(plan);
    int has_bitmap = rows < MAX_ROWS && width < FIRST;
    int has_radix = rows < MAX_ROWS && bits_of(width) + bits_of((uint64_t)rows) <= 64;
    int is_dense = has_bitmap && (int64_t)width <= SPAN_PER_ROW * rows;
    if (wanted == BITMAP ? has_bitmap : is_dense && wanted != RADIX)
        plan->method = BITMAP;
    else
        plan->method = has_radix ? RADIX : NONE;
}

void zenps_measure(const Part *parts, Plan *plan) {
    const Loops *loops = zenps_loops();
    plan->rows = 0;
    plan->least = INT64_MAX;
    plan->most = INT64_MIN;
    plan->in_order = 1;
    for (int64_t part = 0; part < plan->parts; ++part) {
        loops->measure(parts[part].keys, parts[part].rows, plan);
        plan->rows += parts[part].rows;
    }
    if (!plan->rows)
        plan->least = plan->most = 0;
    choose(plan);
    int64_t bytes = plan->method == BITMAP ? words_of(plan) * (int64_t)sizeof(Word)
                                           : 2 * plan->rows * (int64_t)sizeof(uint64_t);
    plan->rank_bytes = rounded_up(plan->rows * (int64_t)sizeof(uint32_t)) + bytes;
}

/* ── bitmap ────────────────────────────────────────────────────────────────────────────────────────────────── */

static int rank_by_bitmap(const Part *parts, Plan *plan, uint32_t *ranks, Word *words) {
    const Loops *loops = zenps_loops();
    memset(words, 0, (size_t)words_of(plan) * sizeof *words);
    int64_t begin = 0;
    for (int64_t part = 0; part < plan->parts; ++part) {
        if (loops->mark(parts[part].keys, parts[part].rows, plan, words, ranks + begin))
            return -1;
        begin += parts[part].rows;
    }
    plan->unique = (int64_t)loops->count(words, words_of(plan));
    loops->look_up(words, ranks, plan->rows);
    return 0;
}

static void keys_of_bitmap(const Plan *plan, const Word *words, int64_t *keys) {
    int64_t number = words_of(plan);
    for (int64_t index = 0; index < number; ++index) {
        uint64_t first = (uint64_t)plan->least + ((uint64_t)index << 6);
        for (uint64_t bits = words[index].bits; bits; bits &= bits - 1)
            *keys++ = (int64_t)(first + (uint64_t)__builtin_ctzll(bits));
    }
}

/* ── radix sort ────────────────────────────────────────────────────────────────────────────────────────────── */

/* Offset and row in one word: the offset in the upper bits. */
static int pack(const Part *parts, const Plan *plan, int row_bits, uint64_t *packed) {
    uint64_t least = (uint64_t)plan->least, width = width_of(plan), row = 0;
    for (int64_t part = 0; part < plan->parts; ++part)
        for (int64_t index = 0; index < parts[part].rows; ++index, ++row) {
            uint64_t offset = (uint64_t)parts[part].keys[index] - least;
            if (offset > width)
                return -1;
            packed[row] = offset << row_bits | row;
        }
    return 0;
}

/* One pass: moves words to the places that `bits` from `shift` on give them, and keeps the order of equal ones. */
static void distribute(const uint64_t *from, uint64_t *to, int64_t rows, int shift, int bits) {
    uint32_t places[1 << MAX_DIGIT_BITS] = {0};
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int64_t row = 0; row < rows; ++row)
        ++places[from[row] >> shift & mask];
    uint32_t before = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
        uint32_t number = places[digit];
        places[digit] = before;
        before += number;
    }
    for (int64_t row = 0; row < rows; ++row)
        to[places[from[row] >> shift & mask]++] = from[row];
}

/* Leaves the unique offsets at the beginning of `packed`. */
static int rank_by_radix(const Part *parts, Plan *plan, uint32_t *ranks, uint64_t *packed) {
    int row_bits = bits_of((uint64_t)plan->rows), bits = bits_of(width_of(plan));
    int most = plan->rows < 4096 ? 8 : MAX_DIGIT_BITS;
    int passes = (bits + most - 1) / most;
    uint64_t *from = packed + (passes % 2 ? plan->rows : 0), *to = packed + (passes % 2 ? 0 : plan->rows);
    if (pack(parts, plan, row_bits, from))
        return -1;
    for (int pass = 0, done = 0; pass < passes; ++pass) {
        int digit = (bits - done + passes - pass - 1) / (passes - pass);
        distribute(from, to, plan->rows, row_bits + done, digit);
        done += digit;
        uint64_t *swapped = from;
        from = to;
        to = swapped;
    }
    uint64_t row_mask = ((uint64_t)1 << row_bits) - 1, last = 0;
    int64_t unique = 0;
    for (int64_t index = 0; index < plan->rows; ++index) {
        uint64_t offset = packed[index] >> row_bits, row = packed[index] & row_mask;
        int is_first = index == 0 || offset != last;
        last = offset;
        if (is_first)
            packed[unique++] = offset;
        ranks[row] = (uint32_t)(unique - 1) | (is_first ? FIRST : 0);
    }
    plan->unique = unique;
    return 0;
}

/* ── both ──────────────────────────────────────────────────────────────────────────────────────────────────── */

int zenps_rank(const Part *parts, Plan *plan, void *memory) {
    void *table = table_in(plan, memory);
    int failed = plan->method == BITMAP ? rank_by_bitmap(parts, plan, memory, table)
                                        : rank_by_radix(parts, plan, memory, table);
    if (!failed)
        plan->sum_bytes = zenps_sum_bytes(plan);
    return failed;
}

void zenps_keys(const Plan *plan, const void *memory, int64_t *keys) {
    void *table = table_in(plan, memory);
    if (plan->method == BITMAP) {
        keys_of_bitmap(plan, table, keys);
        return;
    }
    const uint64_t *offsets = table;
    for (int64_t index = 0; index < plan->unique; ++index)
        keys[index] = (int64_t)((uint64_t)plan->least + offsets[index]);
}
