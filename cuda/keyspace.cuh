// Mapping between rows and positions, with the same numbers as zenps/partition/placing.py and keyspace.py.
//
// Row i is element i % granule of granule k = i / granule. π maps k to p = π(k). The range of slots that p
// lies in moves by some distance: place = p + distance. The row's position is place * granule + i % granule.
#pragma once

#include "common.cuh"

enum : int64 { IDENTITY = 0, FEISTEL = 1, TABLE = 2 };

// Shift of zenps/partition/placing.py: a map that moves whole ranges of values, the j-th of which ends before
// ends[j], by distances[j]. The range of a value is among those from firsts[value >> bits] up to the next bucket's.
struct Move {
    int64 bits;
    const int32* firsts;
    const int64* ends;
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

// Below, Word is uint32 where all granules fit, and int64 elsewhere: the arithmetic of 64 bits takes twice to four
// times the instructions.

template <typename Word>
__device__ __forceinline__ Halves split(const Placement& at, Word value) {
    const uint32 size = uint32(at.left_size);
    const bool is_small = sizeof(Word) == sizeof(uint32) || !(uint64(value) >> 32);
    const uint32 right = is_small ? uint32(value) / size : uint32(uint64(value) / size);
    return {uint32(value) - right * size, right};
}

template <typename Word>
__device__ __forceinline__ Word join(const Placement& at, Halves halves) {
    return Word(halves.right) * Word(at.left_size) + Word(halves.left);
}

// π, by a Feistel network; a result outside of [0, granules) is enciphered again until it is inside.
template <typename Word>
__device__ inline Word permute(const Placement& at, Word value) {
    do {
        Halves half = split(at, value);
        for (int round = 0; round < 4; round += 2) {
            add_hash(half.left, half.right, at.keys[round], at.left_size);
            add_hash(half.right, half.left, at.keys[round + 1], at.right_size);
        }
        value = join<Word>(at, half);
    } while (value >= Word(at.granules));
    return value;
}

// π⁻¹.
template <typename Word>
__device__ inline Word unpermute(const Placement& at, Word value) {
    do {
        Halves half = split(at, value);
        for (int round = 2; round >= 0; round -= 2) {
            subtract_hash(half.right, half.left, at.keys[round + 1], at.right_size);
            subtract_hash(half.left, half.right, at.keys[round], at.left_size);
        }
        value = join<Word>(at, half);
    } while (value >= Word(at.granules));
    return value;
}

template <typename Word>
__device__ __forceinline__ Word apply(const Move& move, Word value) {
    const int32* const firsts = move.firsts + (value >> move.bits);
    const int64 range = firsts[0] + upper_bound(move.ends + firsts[0], firsts[1] - firsts[0], int64(value));
    return value + Word(move.distances[range]);
}

template <typename Word>
__device__ __forceinline__ Word computed_place(const Placement& at, Word granule) {
    return apply(at.placing, at.kind == FEISTEL ? permute(at, granule) : granule);
}

template <typename Word>
__device__ __forceinline__ Word computed_granule(const Placement& at, Word place) {
    const Word permuted = apply(at.unplacing, place);
    return at.kind == FEISTEL ? unpermute(at, permuted) : permuted;
}

// Beyond this many granules their numbers take 64 bits: the domain of π has a few more.
constexpr int64 SMALL_GRANULES = 1ll << 31;

// The place of a granule in [0, granules).
__device__ inline int64 place_of(const Placement& at, int64 granule) {
    if (at.kind == TABLE) return at.places[granule];
    return at.granules <= SMALL_GRANULES ? computed_place(at, uint32(granule)) : computed_place(at, granule);
}

// The granule at a place of [0, granules).
__device__ inline int64 granule_in(const Placement& at, int64 place) {
    if (at.kind == TABLE) return at.granule_at[place];
    return at.granules <= SMALL_GRANULES ? computed_granule(at, uint32(place)) : computed_granule(at, place);
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
