// Compaction by hierarchical hashing: Zen's Algorithm 1 (OSDI'25 §3.2), without its loss of rows.
//
// Each server's positions, a partition, have two hash memories: a parallel one, in which a row tries the
// slots that a few hashes of its position give, and a serial one for rows that find all of these taken.
//
// Pipeline:
//   claim_rows       a slot for each position, and the number of each row among those of its slot
//   extract_keys     slots → positions, in one pass by look-back; the host waits for their number
//   radix_sort       → positions in order, as they are sent
//   number_groups    → where the rows of each slot begin if rows lie in order of position
//   order_rows       the order of rows, and the segments that sort_compact has of sorted positions
//   reduce_runs      of sort_compact: sums the rows of each position
//
// Differences from the paper, which leaves these to chance: A slot is claimed by compare-and-swap, not by
// writing and reading again, so no row is overwritten. Serial slots are found by linear probing, not handed
// out by a counter, which would give duplicates two. An empty slot holds a value that is no position, so
// position 0 is like any other. The partition is the layout's, not that of another hash, so it cannot
// disagree with the server. Overflows of a serial memory are counted; the caller starts again with more.
//
// A slot is never emptied, so all rows of a position probe the same taken slots and reach the same one.
//
// Not deterministic: the positions are always the same, but slots, counters and the order in which the rows of
// a position are added depend on the order of threads. The default, sort_compact, is measured against this.
//
// Lower bound: values are read once and their sums written once; the index adds 36 bytes a row and 44 a slot,
// with 2.2 slots for each expected row. No atomics on values, so hot rows do not wait for each other.
//
// Source: Zen, OSDI 2025, §3.2 (https://www.usenix.org/conference/osdi25/presentation/wang-zhuang).
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int32 NO_SLOT = -1;
constexpr int FULL_CHECK = 8;  // serial slots that a row probes between two reads of the number of taken ones

// A value that is no position: positions are below 2^62, or 2^31.
template <typename Key>
constexpr Key EMPTY = ~Key(0);

// In the order of zenps.kernels.gpu.hash_compact.Hashed.
enum Outcome : uint32 { FIRST_TRY, REHASHED, SERIAL, OVERFLOWED, NO_ROW };

// zenps.kernels.gpu.hash_compact.Hashed.told: a flag, the number of positions, and that of rows by outcome.
constexpr int COUNT = 1, COUNTED = 6;

struct Claim {
    int32 slot;
    Outcome outcome;
};

// murmur3's finaliser.
__device__ __forceinline__ uint32 mix(uint32 word) {
    word = (word ^ (word >> 16)) * 0x85ebca6bu;
    word = (word ^ (word >> 13)) * 0xc2b2ae35u;
    return word ^ (word >> 16);
}

// The number-th hash of a position, in [0, size).
template <typename Key>
__device__ __forceinline__ int64 hash_of(Key position, int64 number, int64 size) {
    uint32 hashed = mix(uint32(position) ^ uint32(number + 1) * 0x9e3779b9u);
    if (sizeof(Key) > sizeof(uint32)) hashed = mix(hashed ^ uint32(uint64(position) >> 32));
    return __umulhi(hashed, uint32(size));
}

// The slots of all partitions. Those of partition p begin at cuts[2 p], its serial ones at cuts[2 p + 1].
template <typename Key>
struct Table {
    Key* slots;
    const int64* cuts;     // 2 servers + 1
    const int64* bounds;   // servers + 1: the first position of each partition
    int64 servers;
    int64 hashes;
    uint32* serial_taken;  // for each partition: the number of taken serial slots

    // Finds the slot of a position, or claims one. Each thread works alone.
    __device__ Claim claim(Key position) const {
        const int64 partition = upper_bound(bounds + 1, servers - 1, int64(position));
        const int64* cut = cuts + 2 * partition;
        for (int64 number = 0; number < hashes; ++number) {
            const int64 slot = cut[0] + hash_of(position, number, cut[1] - cut[0]);
            const Key held = take(slot, position);
            if (held == EMPTY<Key> || held == position) return {int32(slot), number ? REHASHED : FIRST_TRY};
        }
        return claim_serial(position, cut[1], cut[2], serial_taken + partition);
    }

private:
    // Claims a slot if it is empty. Returns its value before: EMPTY if the slot is now the position's.
    __device__ Key take(int64 slot, Key position) const {
        // A load first: atomics to one slot run one at a time, so hot rows would wait for each other.
        const Key held = load_relaxed(slots + slot);
        return held == EMPTY<Key> ? atomicCAS(slots + slot, EMPTY<Key>, position) : held;
    }

    // Linear probing, from the slot of another hash on.
    __device__ Claim claim_serial(Key position, int64 begin, int64 end, uint32* taken) const {
        const int64 size = end - begin;
        int64 slot = begin + hash_of(position, hashes, size);
        for (int64 step = 0; step < size; ++step) {
            const Key held = take(slot, position);
            if (held == EMPTY<Key>) atomicAdd(taken, 1u);
            if (held == EMPTY<Key> || held == position) return {int32(slot), SERIAL};
            if (++slot == end) slot = begin;
            // Without this check, once all slots are taken, every row without one would probe all of them.
            if (step % FULL_CHECK == FULL_CHECK - 1 && load_relaxed(taken) == uint32(size)) break;
        }
        return {NO_SLOT, OVERFLOWED};
    }
};

// Adds the number of each outcome among a block's threads to the counters. A whole block takes part.
__device__ void add_outcomes(Outcome outcome, uint64* counters) {
    SHARED_ARRAY(uint32, totals, 4);
    if (threadIdx.x < 4) totals[threadIdx.x] = 0;
    __syncthreads();
    for (uint32 each = FIRST_TRY; each <= OVERFLOWED; ++each) {
        const uint32 alike = __ballot_sync(ALL_LANES, outcome == each);
        if (threadIdx.x % WARP == each && alike) atomicAdd(&totals[each], uint32(__popc(alike)));
    }
    __syncthreads();
    if (threadIdx.x < 4 && totals[threadIdx.x]) atomicAdd(&counters[threadIdx.x], uint64(totals[threadIdx.x]));
}

// Adds one to slot_rows[slot] for each thread with a slot, and returns the value before. A whole warp takes
// part: of the threads with one slot, one adds for all, because atomics to one word run one at a time.
__device__ __forceinline__ uint32 count_in_slot(uint32* slot_rows, int32 slot) {
    const uint32 lane = threadIdx.x % WARP, alike = __match_any_sync(ALL_LANES, slot);
    const uint32 first = uint32(__ffs(int(alike))) - 1;
    uint32 before = 0;
    if (lane == first && slot != NO_SLOT) before = atomicAdd(&slot_rows[slot], uint32(__popc(alike)));
    return __shfl_sync(ALL_LANES, before, first) + __popc(alike & ((1u << lane) - 1));
}

// row_slots[i] = the slot of positions[i], or NO_SLOT, and slot_rows[slot] the number of rows with it, of which
// row i is number numbers[i]; counters[outcome] += the number of rows with it. A negative position sets
// *outside, and counts as 0. One thread for each row.
template <typename Key>
__global__ void claim_rows(const Key* positions, int64 rows, Key* slots, const int64* cuts,
                           const int64* bounds, int64 servers, int64 hashes, uint32* serial_taken,
                           int32* row_slots, uint32* slot_rows, uint32* numbers, uint64* counters,
                           uint64* outside) {
    const Table<Key> table{slots, cuts, bounds, servers, hashes, serial_taken};
    const int64 row = global_thread();
    Claim claim = {NO_SLOT, NO_ROW};
    if (row < rows) {
        Key position = positions[row];
        if (position == EMPTY<Key>) {
            atomicExch(outside, 1ull);
            position = 0;
        }
        claim = table.claim(position);
        row_slots[row] = claim.slot;
    }
    const uint32 number = count_in_slot(slot_rows, claim.slot);
    if (row < rows) numbers[row] = number;
    add_outcomes(claim.outcome, counters);
}

// ---------------------------------------------------------------------------------------------------------
// From slots to sorted rows

constexpr int SLOT_ITEMS = 16;                            // slots of a thread, all in flight at once
constexpr int64 SLOT_TILE = SLOT_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.SLOT_TILE

// keys[i] = the key in the i-th claimed slot and key_slots[i] = the slot's number; counted[COUNT] = the number
// of claimed slots, and told[] = counted[], which may be memory of the host. A whole block takes part; each
// warp goes over WARP * SLOT_ITEMS slots in order.
template <typename Key>
__global__ void extract_keys(ScanState* state, const Key* slots, int64 slot_count, Key* keys,
                             int32* key_slots, int64* counted, int64* told) {
    const int64 tile = take_tile(state);
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int64 first = tile * SLOT_TILE + warp * (WARP * SLOT_ITEMS) + lane;
    Key held[SLOT_ITEMS];
    uint32 claimed[SLOT_ITEMS];  // a bit for each lane
    uint32 warp_claimed = 0;
    #pragma unroll
    for (int item = 0; item < SLOT_ITEMS; ++item) {
        const int64 slot = first + item * WARP;
        held[item] = slot < slot_count ? slots[slot] : EMPTY<Key>;
    }
    #pragma unroll
    for (int item = 0; item < SLOT_ITEMS; ++item) {
        claimed[item] = __ballot_sync(ALL_LANES, held[item] != EMPTY<Key>);
        warp_claimed += __popc(claimed[item]);
    }
    // Held by the last lane, the warp's sum counts for later warps alone.
    uint32 total;
    const uint32 warps_before = block_exclusive_sum<THREADS>(lane == WARP - 1 ? warp_claimed : 0, total);
    const int64 before = tiles_before(state, tile, total);
    if (threadIdx.x < COUNTED && (tile + 1) * SLOT_TILE >= slot_count) {
        if (threadIdx.x == COUNT) counted[COUNT] = before + total;
        told[threadIdx.x] = counted[threadIdx.x];
    }

    int64 next = before + warps_before;
    #pragma unroll
    for (int item = 0; item < SLOT_ITEMS; ++item) {
        const int64 i = next + __popc(claimed[item] & ((1u << lane) - 1));
        next += __popc(claimed[item]);
        if (held[item] == EMPTY<Key>) continue;
        keys[i] = held[item];
        key_slots[i] = int32(first + item * WARP);
    }
}

// The rows of a slot in order of position: where they begin, and the rank of the position.
using Group = Pack<uint32, 2>;

// groups[slot] = the group of each claimed slot, for `count` positions that `order` sorts: it has the keys'
// indices before. offsets[c] = the number of positions below cuts[c]. One thread for each key and each cut.
template <typename Key>
__global__ void number_groups(ScanState* state, const Key* positions, const int32* order,
                              const int32* key_slots, const uint32* slot_rows, int64 count, Group* groups,
                              const int64* cuts, int64 cut_count, int64* offsets) {
    const int64 tile = take_tile(state), rank = tile * THREADS + threadIdx.x;
    const int32 slot = rank < count ? key_slots[order[rank]] : NO_SLOT;
    uint32 total;
    const uint32 before = block_exclusive_sum<THREADS>(slot != NO_SLOT ? slot_rows[slot] : 0, total);
    const uint32 begin = uint32(tiles_before(state, tile, total)) + before;
    if (slot != NO_SLOT) groups[slot] = {begin, uint32(rank)};
    if (rank < cut_count) offsets[rank] = lower_bound(positions, count, cuts[rank]);
}

// order[i] = the i-th row in order of position, and segments[i] the rank of its position. Every row has a slot.
// One thread for each row.
__global__ void order_rows(const int32* row_slots, const uint32* numbers, const Group* groups, int64 rows,
                           int32* order, int32* segments) {
    const int64 row = global_thread();
    if (row >= rows) return;
    const Group group = groups[row_slots[row]];
    const int64 place = int64(group.lane[0]) + numbers[row];
    order[place] = int32(row);
    segments[place] = int32(group.lane[1]);
}
