// The subset of CUDA C++ that the kernels of cuda/ use, for g++: included before everything else (-include).
//
// Calls that involve other threads go to runtime.cpp, which runs each CUDA thread as a fiber. Kernels may use
// nothing else: no bare __shared__, second dimension or __activemask. Atomics are relaxed, as on a GPU; only
// __syncthreads and __syncwarp order memory, so ThreadSanitizer finds code that relies on more.
#pragma once

#define ZENPS_HOST 1
#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using HostWord = unsigned long long;

// ---------------------------------------------------------------------------------------------------------
// runtime.cpp

struct HostIndex {
    unsigned x;
};

enum class HostBarrier { PLAIN, COUNT, OR, AND };
enum class HostCollective { SYNCWARP, BALLOT, ANY, ALL, SHUFFLE32, SHUFFLE64, MATCH32, MATCH64 };

// Constant as far as a compiler can see: what a fiber has read stays true for it.
[[gnu::const]] HostIndex host_thread();
[[gnu::const]] HostIndex host_block();
[[gnu::const]] HostIndex host_block_size();
[[gnu::const]] HostIndex host_grid_size();

unsigned host_barrier(HostBarrier kind, bool predicate);
HostWord host_collective(HostCollective kind, unsigned mask, HostWord word, unsigned source);
void host_preempt();  // now and then lets another thread run
void host_yield();    // lets another thread run: what a loop that waits for one has to call
void* host_shared_at(const void* declaration, HostWord bytes);
[[noreturn]] void host_trap();

// Every thread of a block gets one array for each declaration; in a template, for each specialisation.
#define host_shared(bytes) \
    ({                                        \
        static const char declaration = 0;    \
        host_shared_at(&declaration, bytes);  \
    })

#define threadIdx host_thread()
#define blockIdx host_block()
#define blockDim host_block_size()
#define gridDim host_grid_size()

// ---------------------------------------------------------------------------------------------------------
// Barriers and fences

inline void __syncthreads() { host_barrier(HostBarrier::PLAIN, false); }
inline int __syncthreads_count(int predicate) { return int(host_barrier(HostBarrier::COUNT, predicate)); }
inline int __syncthreads_or(int predicate) { return int(host_barrier(HostBarrier::OR, predicate)); }
inline int __syncthreads_and(int predicate) { return int(host_barrier(HostBarrier::AND, predicate)); }
inline void __syncwarp(unsigned mask = ~0u) { host_collective(HostCollective::SYNCWARP, mask, 0, 0); }

// Orders nothing for ThreadSanitizer, which knows no fences: what relies on one is reported.
inline void __threadfence() { asm volatile("" ::: "memory"); }
[[noreturn]] inline void __trap() { host_trap(); }

// ---------------------------------------------------------------------------------------------------------
// Warp collectives

template <typename T>
HostWord host_word(T value) {
    static_assert(__is_trivially_copyable(T) && (sizeof(T) == 4 || sizeof(T) == 8), "4 or 8 bytes");
    HostWord word = 0;
    __builtin_memcpy(&word, &value, sizeof value);
    return word;
}

template <typename T>
T host_shuffle(unsigned mask, T value, unsigned source) {
    const auto kind = sizeof(T) == 4 ? HostCollective::SHUFFLE32 : HostCollective::SHUFFLE64;
    const HostWord word = host_collective(kind, mask, host_word(value), source);
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

// A source outside the caller's group of `width` lanes is the caller itself.
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    const unsigned group = threadIdx.x % 32 & ~unsigned(width - 1);
    return host_shuffle(mask, value, group | (unsigned(lane) & unsigned(width - 1)));
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned self = threadIdx.x % 32, place = self & unsigned(width - 1);
    return host_shuffle(mask, value, distance <= place ? self - distance : self);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned self = threadIdx.x % 32, place = self & unsigned(width - 1);
    return host_shuffle(mask, value, distance < unsigned(width) - place ? self + distance : self);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, int width = 32) {
    const unsigned self = threadIdx.x % 32, source = self ^ unsigned(flipped);
    return host_shuffle(mask, value, source <= (self | unsigned(width - 1)) ? source : self);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return unsigned(host_collective(HostCollective::BALLOT, mask, predicate != 0, 0));
}

inline int __any_sync(unsigned mask, int predicate) {
    return host_collective(HostCollective::ANY, mask, predicate != 0, 0) != 0;
}

inline int __all_sync(unsigned mask, int predicate) {
    return host_collective(HostCollective::ALL, mask, predicate != 0, 0) == mask;
}

template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
    const auto kind = sizeof(T) == 4 ? HostCollective::MATCH32 : HostCollective::MATCH64;
    return unsigned(host_collective(kind, mask, host_word(value), 0));
}

// ---------------------------------------------------------------------------------------------------------
// Atomics, on the types that CUDA has them for

template <typename T>
struct HostExactly {
    using Type = T;
};

template <typename T, typename... Allowed>
constexpr bool HOST_ONE_OF = (__is_same(T, Allowed) || ...);

template <typename T>
constexpr bool HOST_WORD = HOST_ONE_OF<T, int, unsigned, unsigned long long>;

template <typename T>
constexpr bool HOST_ORDERED = HOST_WORD<T> || HOST_ONE_OF<T, long long>;

// The value before; `change` makes the next one of it.
template <typename T, typename Change>
T host_update(T* address, Change change) {
    host_preempt();
    T before, after;
    __atomic_load(address, &before, __ATOMIC_RELAXED);
    do {
        after = change(before);
    } while (!__atomic_compare_exchange(address, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

template <typename T>
T atomicAdd(T* address, typename HostExactly<T>::Type value) {
    static_assert(HOST_WORD<T> || HOST_ONE_OF<T, float, double>, "no atomicAdd of this type");
    return host_update(address, [=](T before) { return T(before + value); });
}

template <typename T>
T atomicExch(T* address, typename HostExactly<T>::Type value) {
    static_assert(HOST_WORD<T> || HOST_ONE_OF<T, float>, "no atomicExch of this type");
    return host_update(address, [=](T) { return value; });
}

template <typename T>
T atomicCAS(T* address, typename HostExactly<T>::Type expected, typename HostExactly<T>::Type value) {
    static_assert(HOST_WORD<T> || HOST_ONE_OF<T, unsigned short>, "no atomicCAS of this type");
    host_preempt();
    __atomic_compare_exchange(address, &expected, &value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return expected;
}

#define HOST_ATOMIC(name, condition, result)                             \
    template <typename T>                                                \
    T name(T* address, typename HostExactly<T>::Type value) {            \
        static_assert(condition, "no " #name " of this type");           \
        return host_update(address, [=](T before) { return T(result); }); \
    }
HOST_ATOMIC(atomicMin, HOST_ORDERED<T>, value < before ? value : before)
HOST_ATOMIC(atomicMax, HOST_ORDERED<T>, value > before ? value : before)
HOST_ATOMIC(atomicAnd, HOST_WORD<T>, before & value)
HOST_ATOMIC(atomicOr, HOST_WORD<T>, before | value)
HOST_ATOMIC(atomicXor, HOST_WORD<T>, before ^ value)

// ---------------------------------------------------------------------------------------------------------
// Bits and loads

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(HostWord value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline int __clzll(long long value) { return value ? __builtin_clzll(HostWord(value)) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(HostWord(a) * b >> 32); }
inline HostWord __umul64hi(HostWord a, HostWord b) {
    __extension__ using Wide = unsigned __int128;
    return HostWord(Wide(a) * b >> 64);
}
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline float __uint_as_float(unsigned value) { return __builtin_bit_cast(float, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline float __int_as_float(int value) { return __builtin_bit_cast(float, value); }
inline long long __double_as_longlong(double value) { return __builtin_bit_cast(long long, value); }
inline double __longlong_as_double(long long value) { return __builtin_bit_cast(double, value); }

template <typename T>
T __ldg(const T* address) {
    return *address;
}
