// Compaction by hierarchical hashing: Zen's Algorithm 1 (OSDI'25 §3.2), with no row lost.
//
// Each server's positions, a partition, have two memories of their own: a parallel one, in which a row tries
// the slots that a few hashes of its position name, and a serial one for rows that find all of them taken.
//
// Pipeline:
//   claim_rows       a slot for each position; of a dense tensor, for those of its non-zeros: claim_nonzeros
//   extract_keys     slots → positions, in one pass by look-back
//   torch.sort       → positions in order, as they are sent
//   rank_slots       where each slot's position is among them
//   add_rows         sums the rows of each position with atomics; of a dense tensor, gather_values
//
// What the paper leaves to chance is settled here. A slot is claimed by compare-and-swap, not by writing and
// reading again: no row is overwritten. Serial slots are found by linear probing, not handed out by a
// counter, which would give duplicates two. A slot is empty while it holds what no position is, so that
// position 0 is like any other. The partition is the layout's, not that of a hash of its own: it cannot
// disagree with the server. A serial memory that is full is counted, for the caller to start again with more.
//
// A slot never empties, so all rows of a position walk past the same taken slots to the same one.
//
// Not deterministic: the same positions come out, but slots, counters and the last bits of sums depend on who
// comes first. The default compactions, sort_compact and scan_compact, are measured against this one.
//
// Floor: values are read once and their sums written twice, as -0.0 first; the index adds 20 bytes a row and
// 16 a slot, of which there are 2.2 for each expected row. Beside the bytes count the atomics: one a value.
//
// Source: Zen, OSDI 2025, §3.2 (https://www.usenix.org/conference/osdi25/presentation/wang-zhuang).
#include "keyspace.cuh"
#include "packs.cuh"
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int32 NO_SLOT = -1;
constexpr int FULL_CHECK = 8;  // serial slots that a row looks at between two looks at how many are taken

// What no position is: they are below 2^62, or 2^31.
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

// All partitions' slots. Those of partition p lie from cuts[2 p] on, its serial ones from cuts[2 p + 1] on.
template <typename Key>
struct Table {
    Key* slots;
    const int64* cuts;     // 2 servers + 1
    const int64* bounds;   // servers + 1: where each partition's positions begin
    int64 servers;
    int64 hashes;
    uint32* serial_taken;  // of each partition: how many serial slots are

    // Finds the slot of a position, or makes one its own. A thread works alone.
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
    // Looks at a slot and takes it if it is empty. Returns what was there: EMPTY if it is now the position's.
    __device__ Key take(int64 slot, Key position) const {
        // A load first: of atomics to one slot only one runs at a time, and hot rows would wait in line.
        const Key held = load_relaxed(slots + slot);
        return held == EMPTY<Key> ? atomicCAS(slots + slot, EMPTY<Key>, position) : held;
    }

    // Linear probing from a last hash on.
    __device__ Claim claim_serial(Key position, int64 begin, int64 end, uint32* taken) const {
        const int64 size = end - begin;
        int64 slot = begin + hash_of(position, hashes, size);
        for (int64 step = 0; step < size; ++step) {
            const Key held = take(slot, position);
            if (held == EMPTY<Key>) atomicAdd(taken, 1u);
            if (held == EMPTY<Key> || held == position) return {int32(slot), SERIAL};
            if (++slot == end) slot = begin;
            // Once all are taken, every row that has none would walk past all of them, one after another.
            if (step % FULL_CHECK == FULL_CHECK - 1 && load_relaxed(taken) == uint32(size)) break;
        }
        return {NO_SLOT, OVERFLOWED};
    }
};

// How often each outcome was met by a thread, or in a block: 16 bits for each.
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

// row_slots[i] = the slot of positions[i], or NO_SLOT; counters[outcome] += how many rows met it. One thread
// for each row.
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
// A dense tensor

constexpr int DENSE_ITEMS = 32;                             // values of a thread, a bit of its mask each
constexpr int64 DENSE_TILE = DENSE_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.DENSE_TILE

// Claims a slot for the position of each row of `dense` that is neither 0.0 nor -0.0. Bits is as wide as a
// value. A block finds the non-zeros of its tile first: few would claim while their neighbours wait.
template <typename Bits, typename Key>
__global__ void claim_nonzeros(const Placement* placement, const Bits* dense, Key* slots, const int64* cuts,
                               const int64* bounds, int64 servers, int64 hashes, uint32* serial_taken,
                               uint64* counters) {
    SHARED_ARRAY(uint16, nonzeros, DENSE_TILE);
    const int64 first = int64(blockIdx.x) * DENSE_TILE;
    Bits bits[DENSE_ITEMS];
    #pragma unroll
    for (int item = 0; item < DENSE_ITEMS; ++item) {
        const int64 row = first + item * THREADS + threadIdx.x;
        bits[item] = row < placement->rows ? dense[row] : Bits(0);
    }
    uint32 mask = 0;
    #pragma unroll
    for (int item = 0; item < DENSE_ITEMS; ++item)
        mask |= uint32(Bits(bits[item] << 1) != 0) << item;  // no float compare: it may flush subnormals

    uint32 total, rank = block_exclusive_sum<THREADS>(__popc(mask), total);
    for (uint32 left = mask; left; left &= left - 1)
        nonzeros[rank++] = uint16((__ffs(int(left)) - 1) * THREADS + threadIdx.x);
    __syncthreads();

    const Table<Key> table{slots, cuts, bounds, servers, hashes, serial_taken};
    Tally tally = {};
    for (uint32 i = threadIdx.x; i < total; i += THREADS)
        tally.add(table.claim(Key(position_of(*placement, first + nonzeros[i]))).outcome);
    add_tallies(tally, counters);
}

// values[i] = the value at positions[i], for i below *count and `capacity`.
template <typename Bits, typename Key>
__global__ void gather_values(const Placement* placement, const Bits* dense, const Key* positions,
                              const int64* count, int64 capacity, Bits* values) {
    const int64 i = global_thread();
    if (i < min_of(*count, capacity)) values[i] = dense[row_at(*placement, int64(positions[i]))];
}

// ---------------------------------------------------------------------------------------------------------
// From slots to sorted rows

constexpr int SLOT_ITEMS = 16;                            // slots of a thread, all in flight at once
constexpr int64 SLOT_TILE = SLOT_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.SLOT_TILE

// keys[i] = what the i-th claimed slot holds and key_slots[i] = its number, for i below `capacity`; *count =
// how many there are. `key_slots` is null where nobody asks. A whole block takes part; each warp goes over
// WARP * SLOT_ITEMS slots in order.
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

// slot_ranks[slot] = where the slot's position came to lie: `order` are the keys' places before they were
// sorted. One thread for each key.
__global__ void rank_slots(const int64* order, const int32* key_slots, const int64* count, int64 capacity,
                           int32* slot_ranks) {
    const int64 rank = global_thread();
    if (rank < min_of(*count, capacity)) slot_ranks[key_slots[order[rank]]] = int32(rank);
}

constexpr int SUM_ITEMS = 4;                            // elements of a thread, all in flight at once
constexpr int64 SUM_TILE = SUM_ITEMS * int64(THREADS);  // zenps.kernels.gpu.hash_compact.SUM_TILE

// Adds each row to the sums of its position, which hold neutral() at first, unless there was no room for all
// positions. Neighbouring threads add neighbouring columns: L2 takes the atomics of a sector together.
template <typename T>
__global__ void add_rows(const T* values, const int32* row_slots, const int32* slot_ranks, int64 rows,
                         int64 columns, const int64* count, int64 capacity, float* sums) {
    if (*count > capacity) return;
    const int64 first = int64(blockIdx.x) * SUM_TILE + threadIdx.x, elements = rows * columns;
    int32 slot[SUM_ITEMS], rank[SUM_ITEMS];
    int64 column[SUM_ITEMS];
    float value[SUM_ITEMS];
    for (int item = 0; item < SUM_ITEMS; ++item) {
        const int64 element = first + item * THREADS;
        slot[item] = NO_SLOT;
        if (element >= elements) continue;
        const Cell cell = cell_of(element, columns);
        column[item] = cell.pack;
        slot[item] = row_slots[cell.row];
        value[item] = Number<T>::widen(values[element]);
    }
    for (int item = 0; item < SUM_ITEMS; ++item)
        if (slot[item] != NO_SLOT) rank[item] = slot_ranks[slot[item]];
    for (int item = 0; item < SUM_ITEMS; ++item)
        if (slot[item] != NO_SLOT) atomicAdd(&sums[rank[item] * columns + column[item]], value[item]);
}
