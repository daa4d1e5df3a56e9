/* Sums and places of rows whose ranks are known, by several threads that share the ranks among them.
 *
 * Each row of the result is made by one thread, in the order of parts and rows: the number of threads changes no bit.
 */
#include "rank.h"

#include <pthread.h>
#include <string.h>

/* Sums that lie in the second cache while the rows of all parts are added to them. Blocks of the first cache's size take
 * a third longer for eight parts: of each, only some rows fall into a block, and none is fetched for the next. */
#ifndef BLOCK_BYTES
#define BLOCK_BYTES (512 * 1024)
#endif

/* Below so many bytes a thread costs more than it saves: 30 µs to start and to join. */
#ifndef MIN_THREAD_BYTES
#define MIN_THREAD_BYTES ((int64_t)1 << 20)
#endif

/* Each thread looks at the ranks of all rows: of shorter ones, two threads take longer than one. */
#ifndef MIN_ROW_BYTES
#define MIN_ROW_BYTES 128
#endif

#define MAX_THREADS 64

/* Results of so many bytes do not fit into the caches near a core, so rows are placed past them: in two thirds to three
 * quarters of the time, since the lines that they replace are not read. Below, the reader of the result would wait. */
#ifndef MIN_STREAMED_BYTES
#define MIN_STREAMED_BYTES ((int64_t)8 << 20)
#endif

static const int64_t SUMMED_BYTES[DTYPES] = {4, 4, 4, 8, 8, 1};
static const int64_t GIVEN_BYTES[DTYPES] = {2, 2, 4, 8, 8, 1};

/* A range of ranks, for one thread. */
typedef struct {
    const Part *parts;
    const Plan *plan;
    const uint32_t *ranks;
    int64_t low, high;
    int64_t *cursors; /* of each part, the first row that is not summed yet; rows are in order */
    void *sums;       /* in which 16-bit floats are summed */
    void *values;     /* of the result, that of rank 0 first */
} Task;

static int is_rounded(const Plan *plan) {
    return plan->dtype == FLOAT16 || plan->dtype == BFLOAT16;
}

/* How many rows are summed at a time: all of a range, where each may be anywhere in its part. */
static int64_t block_rows(const Plan *plan, int64_t rows) {
    int64_t row_bytes = plan->columns * SUMMED_BYTES[plan->dtype];
    int64_t most = row_bytes < BLOCK_BYTES ? BLOCK_BYTES / row_bytes : 1;
    return plan->in_order && most < rows ? most : rows;
}

static int64_t threads_of(const Plan *plan, int64_t row_bytes) {
    int64_t bytes = row_bytes < MIN_ROW_BYTES ? 0 : plan->rows * row_bytes;
    int64_t most = bytes / MIN_THREAD_BYTES < plan->threads ? bytes / MIN_THREAD_BYTES : plan->threads;
    most = most < MAX_THREADS ? most : MAX_THREADS;
    most = most < plan->unique ? most : plan->unique;
    return most > 1 ? most : 1;
}

static int64_t sum_threads(const Plan *plan) {
    return threads_of(plan, plan->columns * GIVEN_BYTES[plan->dtype]);
}

static int64_t low_of(const Plan *plan, int64_t thread, int64_t threads) {
    return plan->unique / threads * thread + (thread < plan->unique % threads ? thread : plan->unique % threads);
}

static int64_t cursor_bytes(const Plan *plan) {
    return plan->parts * (int64_t)sizeof(int64_t);
}

/* Of one thread. */
static int64_t wide_bytes(const Plan *plan, int64_t threads) {
    int64_t rows = block_rows(plan, plan->unique / threads + 1);
    return is_rounded(plan) ? rows * plan->columns * SUMMED_BYTES[plan->dtype] : 0;
}

static int64_t task_bytes(const Plan *plan, int64_t threads) {
    /* A line beside, so that threads do not share one. */
    return (cursor_bytes(plan) + wide_bytes(plan, threads)) / LINE_BYTES * LINE_BYTES + 2 * LINE_BYTES;
}

int64_t zenps_sum_bytes(const Plan *plan) {
    if (!plan->unique || !plan->columns || plan->dtype < 0)
        return 0;
    int64_t threads = sum_threads(plan);
    return threads * task_bytes(plan, threads);
}

/* ── one thread ────────────────────────────────────────────────────────────────────────────────────────────── */

/* The first row of a part whose rank is `low` at least. */
static int64_t first_from(const uint32_t *ranks, int64_t rows, int64_t low) {
    int64_t begin = 0, end = rows;
    while (begin < end) {
        int64_t middle = begin + (end - begin) / 2;
        if ((ranks[middle] & ~FIRST) < low)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

static void begin_in_order(const Task *task) {
    const uint32_t *ranks = task->ranks;
    for (int64_t part = 0; part < task->plan->parts; ++part) {
        task->cursors[part] = task->low ? first_from(ranks, task->parts[part].rows, task->low) : 0;
        ranks += task->parts[part].rows;
    }
}

static void sum_block(const Task *task, int64_t low, int64_t high, void *sums) {
    const Plan *plan = task->plan;
    const Loops *loops = zenps_loops();
    const uint32_t *ranks = task->ranks;
    for (int64_t part = 0; part < plan->parts; ++part) {
        const Part *of = &task->parts[part];
        int64_t begin = plan->in_order ? task->cursors[part] : 0;
        Stretch stretch = {
            ranks, of->values, begin, of->rows, (uint32_t)low, (uint32_t)high, (int)plan->in_order, plan->columns, sums, 0,
        };
        int64_t end = loops->sum[plan->dtype](&stretch);
        if (plan->in_order)
            task->cursors[part] = end;
        ranks += of->rows;
    }
}

static void *run_sum(void *argument) {
    const Task *task = argument;
    const Plan *plan = task->plan;
    const Loops *loops = zenps_loops();
    if (plan->in_order)
        begin_in_order(task);
    int64_t step = block_rows(plan, task->high - task->low);
    for (int64_t low = task->low; low < task->high; low += step) {
        int64_t high = low + step < task->high ? low + step : task->high;
        char *values = (char *)task->values + low * plan->columns * GIVEN_BYTES[plan->dtype];
        void *sums = is_rounded(plan) ? task->sums : values;
        sum_block(task, low, high, sums);
        if (is_rounded(plan) || plan->divisor != 1)
            loops->finish[plan->dtype](sums, values, (high - low) * plan->columns, plan->divisor);
    }
    return 0;
}

static int is_streamed(const Plan *plan, const void *placed) {
    int has_whole_lines = plan->columns % LINE_BYTES == 0 && (uintptr_t)placed % LINE_BYTES == 0;
    return has_whole_lines && plan->unique * plan->columns >= MIN_STREAMED_BYTES;
}

static void *run_place(void *argument) {
    const Task *task = argument;
    const uint32_t *ranks = task->ranks;
    for (int64_t part = 0; part < task->plan->parts; ++part) {
        const Part *of = &task->parts[part];
        Stretch stretch = {
            ranks, of->values, 0, of->rows, (uint32_t)task->low, (uint32_t)task->high, 0, task->plan->columns,
            (char *)task->values + task->low * task->plan->columns, is_streamed(task->plan, task->values),
        };
        zenps_loops()->place(&stretch);
        ranks += of->rows;
    }
    return 0;
}

/* ── all threads ───────────────────────────────────────────────────────────────────────────────────────────── */

static void run(void *(*work)(void *), Task *tasks, int64_t threads) {
    pthread_t started[MAX_THREADS];
    int is_started[MAX_THREADS] = {0};
    for (int64_t thread = 1; thread < threads; ++thread)
        is_started[thread] = !pthread_create(&started[thread], 0, work, &tasks[thread]);
    work(&tasks[0]);
    for (int64_t thread = 1; thread < threads; ++thread)
        if (is_started[thread])
            pthread_join(started[thread], 0);
        else
            work(&tasks[thread]); /* the system has no more threads */
}

void zenps_sum(const Part *parts, const Plan *plan, const void *ranked, void *memory, int64_t *keys, void *sums) {
    zenps_keys(plan, ranked, keys);
    if (!plan->unique || !plan->columns)
        return;
    Task tasks[MAX_THREADS];
    int64_t threads = sum_threads(plan);
    for (int64_t thread = 0; thread < threads; ++thread) {
        char *own = (char *)memory + thread * task_bytes(plan, threads);
        tasks[thread] = (Task){
            parts, plan, zenps_ranks(ranked), low_of(plan, thread, threads), low_of(plan, thread + 1, threads),
            (int64_t *)(void *)own, own + cursor_bytes(plan), sums,
        };
    }
    run(run_sum, tasks, threads);
}

void zenps_place(const Part *parts, const Plan *plan, const void *ranked, int64_t *keys, void *values) {
    zenps_keys(plan, ranked, keys);
    if (!plan->unique || !plan->columns)
        return;
    Task tasks[MAX_THREADS];
    int64_t threads = threads_of(plan, plan->columns);
    for (int64_t thread = 0; thread < threads; ++thread)
        tasks[thread] = (Task){
            parts, plan, zenps_ranks(ranked), low_of(plan, thread, threads), low_of(plan, thread + 1, threads),
            0, 0, values,
        };
    run(run_place, tasks, threads);
}
