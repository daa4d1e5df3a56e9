// Small kernels that try the host runtime, right ones and wrong ones.
#include "scan.cuh"

// Turns each block's stretch of blockDim.x numbers around, `times` times. Wrong without its barriers.
template <bool FIRST_BARRIER, bool SECOND_BARRIER>
__global__ void turn_around(int64* numbers, int64 times) {
    SHARED_ARRAY(int64, stretch, 1024);
    int64& mine = numbers[global_thread()];
    for (int64 turn = 0; turn < times; ++turn) {
        stretch[threadIdx.x] = mine;
        if (FIRST_BARRIER) __syncthreads();
        mine = stretch[blockDim.x - 1 - threadIdx.x];
        if (SECOND_BARRIER) __syncthreads();
    }
}

// Five words for each thread: its value from lane 3, from 2 lanes below, from 2 lanes above, from the lane
// beside it, and from lane 3 of its group of 8.
template <typename T>
__global__ void shuffle(T* out) {
    const T value = T(global_thread() * 1000003);
    T* mine = out + global_thread() * 5;
    mine[0] = __shfl_sync(ALL_LANES, value, 3);
    mine[1] = __shfl_up_sync(ALL_LANES, value, 2);
    mine[2] = __shfl_down_sync(ALL_LANES, value, 2);
    mine[3] = __shfl_xor_sync(ALL_LANES, value, 1);
    mine[4] = __shfl_sync(ALL_LANES, value, 3, 8);
}

// Six words for each thread: the ballot, any and all of "my number is odd", the lanes with its number, and
// how many threads of the block have an odd one, or whether one has.
__global__ void vote(const int64* numbers, int64* out) {
    const int64 number = numbers[global_thread()];
    int64* mine = out + global_thread() * 6;
    mine[0] = __ballot_sync(ALL_LANES, number & 1);
    mine[1] = __any_sync(ALL_LANES, number & 1);
    mine[2] = __all_sync(ALL_LANES, number & 1);
    mine[3] = __match_any_sync(ALL_LANES, number);
    mine[4] = __syncthreads_count(number & 1);
    mine[5] = __syncthreads_or(number & 1) + 2 * __syncthreads_and(number & 1);
}

// The halves of a warp go their own ways.
__global__ void part(int64* out) {
    const bool low = threadIdx.x % WARP < 16;
    const uint32 mask = low ? 0xffffu : 0xffff0000u;
    int64 value = threadIdx.x;
    for (int turn = 0; turn < (low ? 1 : 4); ++turn) {
        value += __shfl_xor_sync(mask, value, 8);
        __syncwarp(mask);
    }
    out[global_thread()] = value;
}

template <typename T>
__global__ void count(T* counter, T* greatest, T* bits) {
    atomicAdd(counter, T(1));
    atomicMax(greatest, T(global_thread()));
    atomicOr(bits, T(1) << (global_thread() % 31));
}

template <typename T>
__global__ void sum(T* total) {
    atomicAdd(total, T(0.5));
}

// Each thread claims the first free slot; the sum of the claimed ones tells whether two claimed the same.
template <bool ATOMIC>
__global__ void claim(uint64* slots, int64 size) {
    const uint64 self = uint64(global_thread()) + 1;
    for (int64 slot = 0; slot < size; ++slot) {
        if (ATOMIC) {
            if (atomicCAS(&slots[slot], 0ull, self) == 0) return;
        } else if (load_relaxed(&slots[slot]) == 0) {
            slots[slot] = self;
            return;
        }
    }
}

// before[t] = t * (t + 1) / 2 for the t-th tile. By ticket, or by the block's index: then a block may wait
// for one that never runs.
template <bool TICKET>
__global__ void look_back_chain(ScanState* state, int64* before) {
    const int64 tile = TICKET ? take_tile(state) : blockIdx.x;
    const int64 sum = tiles_before(state, tile, uint32(tile + 1));
    if (threadIdx.x == 0) before[tile] = sum;
}

// Writes `past` words beyond its tensor.
__global__ void overrun(int64* numbers, int64 size, int64 past) {
    const int64 i = global_thread();
    if (i < size + past) numbers[i] = i;
}

__global__ void misalign(const uint8* bytes, uint32* out) {
    *out = *reinterpret_cast<const uint32*>(bytes + 1);
}

enum : int {
    DIFFERENT_COLLECTIVES,
    EXITED_LANE,
    MISSING_LANE,
    LEAVES_ITSELF_OUT,
    EXITED_THREAD,
    DIFFERENT_BARRIERS,
    DEADLOCK,
    BARRIER_DEADLOCK,
    ENDLESS_LOOP,
    SHARED_TOO_LARGE,
    SHARED_OVERRUN,
    TRAP,
};

template <int FAULT>
__global__ void misbehave(int64* out) {
    const uint32 lane = threadIdx.x;
    if constexpr (FAULT == DIFFERENT_COLLECTIVES) {
        if (lane < 8) __syncwarp();
        else out[lane] = __ballot_sync(ALL_LANES, 1);
    } else if constexpr (FAULT == EXITED_LANE) {
        if (lane != 5) __syncwarp();
    } else if constexpr (FAULT == MISSING_LANE) {
        __syncwarp();
    } else if constexpr (FAULT == LEAVES_ITSELF_OUT) {
        __syncwarp(0xffff);
    } else if constexpr (FAULT == EXITED_THREAD) {
        if (lane != 5) __syncthreads();
    } else if constexpr (FAULT == DIFFERENT_BARRIERS) {
        if (lane < 8) __syncthreads();
        else out[lane] = __syncthreads_or(1);
    } else if constexpr (FAULT == DEADLOCK) {
        __syncwarp(lane == 0 ? 0x3u : lane == 1 ? 0x6u : ALL_LANES);
    } else if constexpr (FAULT == BARRIER_DEADLOCK) {
        if (lane == 0) __syncthreads();
        else __syncwarp();
    } else if constexpr (FAULT == ENDLESS_LOOP) {
        while (load_relaxed(reinterpret_cast<uint64*>(out)) != 1) spin_pause();
    } else if constexpr (FAULT == SHARED_TOO_LARGE) {
        SHARED_ARRAY(int64, first, 6000);
        SHARED_ARRAY(int64, second, 200);
        out[lane] = first[lane] + second[lane];
    } else if constexpr (FAULT == SHARED_OVERRUN) {
        SHARED_ARRAY(int64, array, 4);
        if (lane < 5) array[lane] = lane;
    } else if constexpr (FAULT == TRAP) {
        if (lane == 5) __trap();
    }
}
