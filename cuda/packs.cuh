// Packs of adjacent columns, into which rows of tables are divided: a thread works on one pack, so that a
// warp reads and writes whole sectors, and no kernel knows a row's width. zenps/kernels/gpu/packs.py chooses
// the pack.
#pragma once

#include "common.cuh"

struct Cell {
    int64 row, pack;
};

// The row of the index-th pack of a table, and the pack's index among the row's `packs`.
__device__ __forceinline__ Cell cell_of(int64 index, int64 packs) {
    // A 64-bit division takes several times the instructions of a 32-bit one.
    const int64 row = (index | packs) >> 32 ? index / packs : int64(uint32(index) / uint32(packs));
    return {row, index - row * packs};
}

template <typename T, int LANES>
__device__ __forceinline__ Pack<T, LANES>& pack_at(T* table, int64 index) {
    return reinterpret_cast<Pack<T, LANES>*>(table)[index];
}

template <typename T, int LANES>
__device__ __forceinline__ const Pack<T, LANES>& pack_at(const T* table, int64 index) {
    return reinterpret_cast<const Pack<T, LANES>*>(table)[index];
}

// By value: of a reference, nvcc loads each lane by itself.
template <typename T, int LANES>
__device__ __forceinline__ Pack<typename Number<T>::Sum, LANES> widen(const Pack<T, LANES> pack) {
    Pack<typename Number<T>::Sum, LANES> wide;
    for (int lane = 0; lane < LANES; ++lane) wide.lane[lane] = Number<T>::widen(pack.lane[lane]);
    return wide;
}

// Each sum, rounded once to the stored type.
template <typename T, int LANES>
__device__ __forceinline__ Pack<T, LANES> narrow(const Pack<typename Number<T>::Sum, LANES>& sums) {
    Pack<T, LANES> stored;
    for (int lane = 0; lane < LANES; ++lane) stored.lane[lane] = Number<T>::narrow(sums.lane[lane]);
    return stored;
}

template <typename Sum, int LANES>
__device__ __forceinline__ Pack<Sum, LANES> add(Pack<Sum, LANES> sums, const Pack<Sum, LANES>& others) {
    for (int lane = 0; lane < LANES; ++lane) sums.lane[lane] = add(sums.lane[lane], others.lane[lane]);
    return sums;
}

// Adds to WIDTH adjacent float32 sums, each by an atomic of its own or, from sm_90 on, by one for four of them.
template <int WIDTH>
__device__ __forceinline__ void add_adjacent(float* sums, const float* others) {
    for (int part = 0; part < WIDTH; ++part) atomicAdd(&sums[part], others[part]);
}

#if !defined(ZENPS_HOST) && __CUDA_ARCH__ >= 900
template <>
__device__ __forceinline__ void add_adjacent<4>(float* sums, const float* others) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums), "f"(others[0]),
                 "f"(others[1]), "f"(others[2]), "f"(others[3])
                 : "memory");
}
#endif

template <int LANES>
__device__ __forceinline__ void atomic_add(float* sums, const Pack<float, LANES>& others) {
    constexpr int WIDTH = LANES % 4 == 0 ? 4 : LANES;
    #pragma unroll
    for (int lane = 0; lane < LANES; lane += WIDTH) add_adjacent<WIDTH>(sums + lane, others.lane + lane);
}
