/* Instruction sets: the loops of loops.h for each, and the choice between them when the library is first used. */
#include "loops_table.h"

#include "floats.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAS_STREAM
#endif

typedef uint16_t __attribute__((aligned(1), may_alias)) Half;
typedef float __attribute__((aligned(1), may_alias)) Single;
typedef double __attribute__((aligned(1), may_alias)) Double;
typedef uint32_t __attribute__((aligned(1), may_alias)) SingleBits;
typedef uint64_t __attribute__((aligned(1), may_alias)) Unsigned; /* int64: its sums wrap around; or a double's bits */

/* Bytes that are added at a time. Where registers are narrower, the compiler uses several. */
#define VECTOR_BYTES 32

/* Columns of 16-bit floats that are made float32 at a time. */
#define WIDE_COLUMNS 64

/* Elements whose magnitudes are compared at a time; marks have a bit for each. */
#define BLOCK 32

/* Bytes ahead of these elements that are fetched: a fifth less time where a hundredth of them is found. */
#define FETCHED_AHEAD 2048

/* Of a magnitude, for its rank: the exponent and more of a float32, the exponent of a float64. */
#define DIGIT_BITS 11

/* Ranges of magnitudes in the table of edges. */
#define CELLS 1024

#define INLINE static inline __attribute__((always_inline))

/* Places are fetched so far ahead: about as many lines as a core waits for at a time. */
#define AHEAD_BYTES (20 * LINE_BYTES)
#define MIN_AHEAD 4
#define MAX_AHEAD 64

INLINE int64_t rows_ahead(int64_t row_bytes) {
    if (row_bytes * MAX_AHEAD <= AHEAD_BYTES)
        return MAX_AHEAD;
    int64_t rows = AHEAD_BYTES / row_bytes;
    return rows > MIN_AHEAD ? rows : MIN_AHEAD;
}

INLINE void fetch(const char *place, int64_t bytes) {
    for (int64_t offset = 0; offset < bytes; offset += LINE_BYTES)
        __builtin_prefetch(place + offset, 1);
}

#define TARGET
#define NAMED(name) base_##name
#include "loops.h"
#undef TARGET
#undef NAMED

/* Not target_clones: they need ifunc, which musl lacks, and which ThreadSanitizer does not survive. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(BASE_LOOPS_ONLY)
#define HAS_F16C
#define TARGET __attribute__((target("avx2,f16c,popcnt,bmi,bmi2")))
#define NAMED(name) avx2_##name
#include "loops.h"

/* __builtin_cpu_supports knows f16c from GCC 11 and clang 18 on; older ones refuse to compile it. */
static int has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

static const Loops *supported(void) {
    int has_all = __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("popcnt") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    return has_all ? &avx2_loops : &base_loops;
}

/* Chosen once: on a virtual machine, the hypervisor handles each CPUID, which takes microseconds. */
const Loops *zenps_loops(void) {
    static const Loops *chosen;
    const Loops *loops = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!loops) {
        loops = supported();
        __atomic_store_n(&chosen, loops, __ATOMIC_RELAXED);
    }
    return loops;
}
#else
const Loops *zenps_loops(void) {
    return &base_loops;
}
#endif
