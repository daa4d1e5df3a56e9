// Compaction by hierarchical hashing: Zen's Algorithm 1 (OSDI'25 §3.2), without its loss of rows.
//
// Each server's positions, a partition, have two hash memories: a parallel one, in which a row tries the
// slots that a few hashes of its position give, and a serial one for rows that find all of these taken.
//
// Pipeline:
//   claim_rows       a slot for each position
//   extract_keys     slots → positions, in one pass by look-back
//   torch.sort       → positions in order, as they are sent
//   rank_slots       the rank of each slot's position among them
//   clear_sums       one row of -0.0 for each position
//   add_rows         sums the rows of each position with atomics
//
// Differences from the paper, which leaves these to chance: A slot is claimed by compare-and-swap, not by
// writing and reading again, so no row is overwritten. Serial slots are found by linear probing, not handed
// out by a counter, which would give duplicates two. An empty slot holds a value that is no position, so
// position 0 is like any other. The partition is the layout's, not that of another hash, so it cannot
// disagree with the server. Overflows of a serial memory are counted; the caller starts again with more.
//
// A slot is never emptied, so all rows of a position probe the same taken slots and reach the same one.
//
// Not deterministic: the positions are always the same, but slots, counters and the last bits of sums depend
// on the order of threads. The default, sort_compact, is measured against this.
//
// Lower bound: values are read once and their sums written twice, as -0.0 first; the index adds 20 bytes a
// row and 16 a slot, with 2.2 slots for each expected row. The atomics add to that: one for each value.
//
// Source: Zen, OSDI 2025, §3.2 (https://www.usenix.org/conference/osdi25/presentation/wang-zhuang).
#include "packs.cuh"
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int32 NO_SLOT = -1;
constexpr int FULL_CHECK = 8;  // serial slots that a row probes between two reads of the number of taken ones

// A value that is no position: positions are below 2^62, or 2^31.
template <typename Key>
constexpr Key EMPTY = ~Key(0);

enum Outcome : uint32 { FIRST_TRY, REHASHED, SERIAL, OVERFLOWED };  // zenps.kernels.gpu.hash_compact.Hashed

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

// Counts of each outcome, in a thread or in a block: 16 bits for each.
struct Tally {
    uint32 halves[2];

    __device__ void add(Outcome outcome) { halves[outcome / 2] += outcome % 2 ? 1u << 16 : 1u; }
};

// Adds a block's tallies, fewer than 2^16 in all, to the counters. A whole block takes part.
__device__ void add_tallies(const Tally& tally, uint64* counters) {
    Tally block;
    for (int half = 0; half < 2; ++half)
        block_exclusive_sum<THREADS>(tally.halves[half], block.halves[half]);
    if (threadIdx.x >= 4) return;
    const uint32 number = block.halves[threadIdx.x / 2] >> threadIdx.x % 2 * 16 & 0xffffu;
    if (number) atomicAdd(&counters[threadIdx.x], uint64(number));
}

// row_slots[i] = the slot of positions[i], or NO_SLOT; counters[outcome] += the number of rows with it. One
// thread for each row.
template <typename Key>
__global__ void claim_rows(const Key* positions, int64 rows, Key* slots, const int64* cuts,
                           const int64* bounds, int64 servers, int64 hashes, uint32* serial_taken,
                           int32* row_slots, uint64* counters) {
    const Table<Key> table{slots, cuts, bounds, servers, hashes, serial_taken};
    const int64 row = global_thread();
    Tally tally = {};
    if (row < rows) {
        const Claim claim = table.claim(positions[row]);
        row_slots[row] = claim.slot;
        tally.add(claim.outcome);
    }
    add_tallies(tally, counters);
}

// ---------------------------------------------------------------------------------------------------------
// From slots to sorted rows

constexpr int SLOT_ITEMS = 16;                            // slots of a thread, all in flight at once
constexpr int64 SLOT_TILE = SLOT_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.SLOT_TILE

// keys[i] = the key in the i-th claimed slot and key_slots[i] = the slot's number, for i below `capacity`;
// *count = the number of claimed slots. `key_slots` may be null. A whole block takes part; each warp goes
// over WARP * SLOT_ITEMS slots in order.
template <typename Key>
__global__ void extract_keys(ScanState* state, const Key* slots, int64 slot_count, int64 capacity, Key* keys,
                             int32* key_slots, int64* count) {
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
    if (threadIdx.x == 0 && (tile + 1) * SLOT_TILE >= slot_count) *count = before + total;

    int64 next = before + warps_before;
    #pragma unroll
    for (int item = 0; item < SLOT_ITEMS; ++item) {
        const int64 i = next + __popc(claimed[item] & ((1u << lane) - 1));
        next += __popc(claimed[item]);
        if (held[item] == EMPTY<Key> || i >= capacity) continue;
        keys[i] = held[item];
        if (key_slots) key_slots[i] = int32(first + item * WARP);
    }
}

// slot_ranks[slot] = the rank of the slot's position: `order` has the keys' indices before they were sorted.
// One thread for each key.
__global__ void rank_slots(const int64* order, const int32* key_slots, const int64* count, int64 capacity,
                           int32* slot_ranks) {
    const int64 rank = global_thread();
    if (rank < min_of(*count, capacity)) slot_ranks[key_slots[order[rank]]] = int32(rank);
}

constexpr int SUM_ITEMS = 4;                            // packs of a thread, all in flight at once
constexpr int64 SUM_TILE = SUM_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.SUM_TILE

// The first min(*count, capacity) rows of sums become neutral(). Each thread goes over packs of 16 bytes.
__global__ void clear_sums(const int64* count, int64 capacity, int64 columns, float* sums) {
    const int64 elements = min_of(*count, capacity) * columns, threads = int64(gridDim.x) * THREADS;
    constexpr float ZERO = -0.0f;
    for (int64 pack = global_thread(); pack < elements / 4; pack += threads)
        pack_at<float, 4>(sums, pack) = {ZERO, ZERO, ZERO, ZERO};
    const int64 rest = elements / 4 * 4 + global_thread();
    if (rest < elements) sums[rest] = ZERO;
}

// Adds each row to the sums of its position, which are neutral() at first; does nothing if the positions
// exceed `capacity`.
template <typename T, int LANES>
__global__ void add_rows(const T* values, const int32* row_slots, const int32* slot_ranks, int64 rows,
                         int64 columns, const int64* count, int64 capacity, float* sums) {
    if (*count > capacity) return;
    const int64 first = int64(blockIdx.x) * SUM_TILE + threadIdx.x, packs = columns / LANES;
    int64 place[SUM_ITEMS];  // in `sums`, in packs
    Pack<T, LANES> pack[SUM_ITEMS];
    #pragma unroll
    for (int item = 0; item < SUM_ITEMS; ++item) {
        const int64 index = first + item * THREADS;
        const Cell cell = cell_of(index, packs);
        place[item] = -1;
        if (cell.row >= rows) continue;
        pack[item] = pack_at<T, LANES>(values, index);
        const int32 slot = row_slots[cell.row];
        if (slot != NO_SLOT) place[item] = slot_ranks[slot] * packs + cell.pack;
    }
    #pragma unroll
    for (int item = 0; item < SUM_ITEMS; ++item)
        if (place[item] >= 0) atomic_add(sums + place[item] * LANES, widen(pack[item]));
}

// values = the first min(*count, capacity) rows of sums, rounded.
template <typename T, int LANES>
__global__ void round_rows(const float* sums, const int64* count, int64 capacity, int64 columns, T* values) {
    const int64 pack = global_thread();
    if (pack >= min_of(*count, capacity) * (columns / LANES)) return;
    pack_at<T, LANES>(values, pack) = narrow<T, LANES>(pack_at<float, LANES>(sums, pack));
}
