// Mapping between rows and positions, with the same numbers as zenps/partition/layout.py and keyspace.py.
//
// Row i is element i % granule of granule k = i / granule. π maps k to p = π(k). The range of slots that p
// lies in moves by some distance: place = p + distance. The row's position is place * granule + i % granule.
#pragma once

#include "common.cuh"

enum : int64 { IDENTITY = 0, FEISTEL = 1, TABLE = 2 };

// A map that moves whole ranges of slots: the one from starts[j] on moves by distances[j].
struct Move {
    int64 stretches;
    const int64* starts;
    const int64* distances;
};

// The device layout: the words that zenps/partition/device_layout.py makes. Kernels get it by value, declared
// __grid_constant__: then functions that take it by reference read it in constant memory, not in a copy.
struct Placement {
    int64 rows;          // of the tensor
    int64 granule_bits;  // log2 of the rows of a granule
    int64 granules;      // ceil(rows / granule)
    int64 kind;
    int64 left_size, right_size;  // the two halves of the Feistel network
    int64 keys[4];
    Move placing, unplacing;      // from π's order to server-major order, and back
    const int32* places;          // TABLE: the place of each granule,
    const int32* granule_at;      // and the granule in each place
};

// murmur3's finaliser as in _hash() of zenps/partition/keyspace.py, reduced to [0, size).
__device__ __forceinline__ uint32 keyed_hash(uint32 half, int64 key, int64 size) {
    uint32 hashed = (half ^ uint32(key)) * 0x85ebca6bu;
    hashed = (hashed ^ (hashed >> 13)) * 0xc2b2ae35u;
    return __umulhi(hashed, uint32(size));
}

// half = (half + hash(other)) mod size. Halves are below 2^31, so that sums fit.
__device__ __forceinline__ void add_hash(uint32& half, uint32 other, int64 key, int64 size) {
    half += keyed_hash(other, key, size);
    if (half >= uint32(size)) half -= uint32(size);
}

__device__ __forceinline__ void subtract_hash(uint32& half, uint32 other, int64 key, int64 size) {
    const uint32 hashed = keyed_hash(other, key, size);
    half = half >= hashed ? half - hashed : half + uint32(size) - hashed;
}

struct Halves {
    uint32 left, right;
};

__device__ __forceinline__ Halves split(const Placement& at, uint64 value) {
    const uint32 size = uint32(at.left_size);
    // A 64-bit division takes several times the instructions of a 32-bit one.
    const uint32 right = value >> 32 ? uint32(value / size) : uint32(value) / size;
    return {uint32(value - uint64(right) * size), right};
}

__device__ __forceinline__ int64 join(const Placement& at, Halves halves) {
    return int64(halves.right) * at.left_size + halves.left;
}

// π, by a Feistel network; a result outside of [0, size) is enciphered again until it is inside.
__device__ inline int64 permute(const Placement& at, int64 value) {
    do {
        Halves half = split(at, uint64(value));
        for (int round = 0; round < 4; round += 2) {
            add_hash(half.left, half.right, at.keys[round], at.left_size);
            add_hash(half.right, half.left, at.keys[round + 1], at.right_size);
        }
        value = join(at, half);
    } while (value >= at.granules);
    return value;
}

// π⁻¹.
__device__ inline int64 unpermute(const Placement& at, int64 value) {
    do {
        Halves half = split(at, uint64(value));
        for (int round = 2; round >= 0; round -= 2) {
            subtract_hash(half.right, half.left, at.keys[round + 1], at.right_size);
            subtract_hash(half.left, half.right, at.keys[round], at.left_size);
        }
        value = join(at, half);
    } while (value >= at.granules);
    return value;
}

__device__ __forceinline__ int64 apply(const Move& move, int64 value) {
    return value + move.distances[upper_bound(move.starts, move.stretches, value) - 1];
}

// The place of a granule in [0, granules).
__device__ inline int64 place_of(const Placement& at, int64 granule) {
    if (at.kind == TABLE) return at.places[granule];
    const int64 permuted = at.kind == FEISTEL ? permute(at, granule) : granule;
    return apply(at.placing, permuted);
}

// The granule at a place of [0, granules).
__device__ inline int64 granule_in(const Placement& at, int64 place) {
    if (at.kind == TABLE) return at.granule_at[place];
    const int64 permuted = apply(at.unplacing, place);
    return at.kind == FEISTEL ? unpermute(at, permuted) : permuted;
}

// The position of a row in [0, rows).
__device__ __forceinline__ int64 position_of(const Placement& at, int64 row) {
    const int64 place = place_of(at, row >> at.granule_bits);
    return (place << at.granule_bits) | (row & ((1ll << at.granule_bits) - 1));
}

// The row at a position; in the last granule it may lie beyond the tensor's last row.
__device__ __forceinline__ int64 row_at(const Placement& at, int64 position) {
    const int64 granule = granule_in(at, position >> at.granule_bits);
    return (granule << at.granule_bits) | (position & ((1ll << at.granule_bits) - 1));
}
