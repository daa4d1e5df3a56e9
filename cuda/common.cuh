// Common types and helpers of all kernels: number types, packs of lanes, atomics, shared arrays.
//
// Three compilers build each source: NVRTC (which has no standard headers, so none are included), nvcc, and
// g++ with tests/cuda/host, which runs the same kernels on the CPU and defines ZENPS_HOST.
//
// Conventions of all kernels: grids and blocks have one dimension; each parameter is a pointer, an int64 or a
// struct of such words, so that a launch is a list of words; shared memory is static and declared by SHARED_ARRAY.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

constexpr int WARP = 32;
constexpr uint32 ALL_LANES = 0xffffffffu;

// ---------------------------------------------------------------------------------------------------------
// Differences between a GPU and the host

#ifdef ZENPS_HOST

#define SHARED_ARRAY(type, name, count) type* const name = static_cast<type*>(host_shared(sizeof(type) * (count)))

__device__ inline void spin_pause() { host_yield(); }

template <typename Word>
__device__ inline Word load_relaxed(const Word* address) {
    host_preempt();
    return __atomic_load_n(address, __ATOMIC_RELAXED);
}

template <typename Word>
__device__ inline void store_relaxed(Word* address, Word value) {
    host_preempt();
    __atomic_store_n(address, value, __ATOMIC_RELAXED);
}

__device__ inline uint32 load_acquire(const uint32* address) {
    host_preempt();
    return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

__device__ inline uint32 add_acq_rel(uint32* address, uint32 value) {
    host_preempt();
    return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}

__device__ inline float half_to_float(uint16 bits) {
    _Float16 half;
    __builtin_memcpy(&half, &bits, sizeof half);
    return half;
}

__device__ inline uint16 float_to_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    uint16 bits;
    __builtin_memcpy(&bits, &half, sizeof bits);
    return bits;
}

__device__ inline float add(float a, float b) { return a + b; }

#else

#define SHARED_ARRAY(type, name, count) __shared__ type name[count]

__device__ __forceinline__ void spin_pause() { asm volatile("nanosleep.u32 20;"); }

// Relaxed, not plain: the compiler may neither tear them nor keep them in a register, and L2 serves them,
// where other multiprocessors' writes are visible.
__device__ __forceinline__ uint32 load_relaxed(const uint32* address) {
    uint32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint64 load_relaxed(const uint64* address) {
    uint64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ __forceinline__ void store_relaxed(uint32* address, uint32 value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64* address, uint64 value) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Orders memory: what others had written before they added what is read here is seen from now on.
__device__ __forceinline__ uint32 load_acquire(const uint32* address) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

// Orders memory: what this thread, or before a barrier its block, has written is seen by who adds next.
__device__ __forceinline__ uint32 add_acq_rel(uint32* address, uint32 value) {
    uint32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ float half_to_float(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ uint16 float_to_half(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// CuPy compiles with -ftz=true, with which a + b flushes subnormals to zero; the CPU does not flush them.
__device__ __forceinline__ float add(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

#endif

// ---------------------------------------------------------------------------------------------------------
// Numbers: the types in which gradients are stored, and those in which they are summed (ACCUMULATE in
// zenps/kernels/base.py)

struct float16 {
    uint16 bits;
};

struct bfloat16 {
    uint16 bits;
};

template <typename T>
struct Number {
    using Sum = T;
    __device__ static Sum widen(T value) { return value; }
    __device__ static T narrow(Sum value) { return value; }
};

template <>
struct Number<float16> {
    using Sum = float;
    __device__ static float widen(float16 value) { return half_to_float(value.bits); }
    __device__ static float16 narrow(float value) { return {float_to_half(value)}; }
};

template <>
struct Number<bfloat16> {
    using Sum = float;
    __device__ static float widen(bfloat16 value) { return __uint_as_float(uint32(value.bits) << 16); }
    // To nearest, ties to even, by carrying into the kept half; sm_75 has no instruction for it.
    __device__ static bfloat16 narrow(float value) {
        if (value != value) return {0x7fc0};
        const uint32 bits = __float_as_uint(value);
        return {uint16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
    }
};

__device__ __forceinline__ double add(double a, double b) { return a + b; }

// Unsigned, so that it wraps as torch does: the overflow of signed numbers is undefined.
__device__ __forceinline__ int64 add(int64 a, int64 b) { return int64(uint64(a) + uint64(b)); }

// The neutral element of addition: -0.0, because 0.0 would turn -0.0 into 0.0.
template <typename Sum>
__device__ inline Sum neutral() {
    return -Sum(0);
}

// ---------------------------------------------------------------------------------------------------------
// LANES adjacent values that are loaded and stored at once

template <typename T, int LANES>
struct alignas(sizeof(T) * LANES) Pack {
    T lane[LANES];
};

// ---------------------------------------------------------------------------------------------------------
// Arithmetic

__device__ __forceinline__ int64 min_of(int64 a, int64 b) { return a < b ? a : b; }

__device__ __forceinline__ int64 max_of(int64 a, int64 b) { return a > b ? a : b; }

__device__ __forceinline__ int64 ceil_div(int64 a, int64 b) { return (a + b - 1) / b; }

// The index of this thread in the grid.
__device__ __forceinline__ int64 global_thread() { return int64(blockIdx.x) * blockDim.x + threadIdx.x; }

// The number of threads of the grid.
__device__ __forceinline__ int64 grid_threads() { return int64(gridDim.x) * blockDim.x; }

// The first of `count` ascending values, fewer than 2^31, that is greater than `value`. All threads halve the same
// number, so that a warp does not diverge.
template <typename T>
__device__ inline int64 upper_bound(const T* ascending, int64 count, int64 value) {
    uint32 low = 0, left = uint32(count);
    for (; left > 1; left -= left / 2)
        if (int64(ascending[low + left / 2 - 1]) <= value) low += left / 2;
    return left && int64(ascending[low]) <= value ? low + 1 : low;
}

// The first of `count` ascending values that is not less than `value`.
template <typename T>
__device__ inline int64 lower_bound(const T* ascending, int64 count, int64 value) {
    return upper_bound(ascending, count, value - 1);
}
