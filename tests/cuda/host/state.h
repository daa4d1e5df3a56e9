// State that the scheduler and the CUDA threads share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_host.h"
#include "fibers.h"
#include "table.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace host {

constexpr unsigned WARP = 32;
constexpr std::size_t SHARED_BYTES = 48 << 10;
constexpr std::size_t GAP_BYTES = 64;  // after each shared array, to be found untouched
constexpr std::size_t MAX_ARRAYS = 32;
constexpr unsigned char POISON = 0xcd;

enum class State { READY, PAUSED, AT_BARRIER, IN_COLLECTIVE, EXITED, TRAPPED };

struct Block;

// A CUDA thread.
struct Lane {
    Context context;
    Fiber fiber;
    Block* block;
    unsigned thread;
    State state;
    const char* trap;
    // What it waits for, and what it gets.
    HostBarrier barrier;
    HostCollective collective;
    unsigned mask, source;
    HostWord word, result;
    char* fence;
};

// Fences are addresses for ThreadSanitizer. Barriers take them in turn: who leaves one late must not acquire
// what others released for the next.
struct Warp {
    unsigned waiting = 0;  // lanes in a collective
    unsigned exited = 0;   // or beyond the block's end
    char fences[4] = {};
    unsigned fenced = 0;
};

struct Array {
    const void* declaration;
    std::size_t begin, end;
};

// Allocated for each block: ThreadSanitizer's history of a reused address would hide races, or invent some.
struct Block {
    unsigned index;
    std::vector<Lane*> lanes;
    Warp warps[1024 / WARP];
    unsigned arrived = 0, exited = 0;
    HostBarrier barrier;  // that they have arrived at
    unsigned barriers = 0;
    char fences[2] = {};
    char begin = 0;
    Array arrays[MAX_ARRAYS];
    unsigned array_count = 0;
    std::size_t shared_bytes = 0, arena_bytes = 0;
    alignas(64) char arena[SHARED_BYTES + MAX_ARRAYS * GAP_BYTES];
};

struct Launch {
    const HostKernel* kernel;
    void* const* words;
    unsigned grid, block;
    std::uint64_t random;
    Context scheduler;
    void* scheduler_fiber = nullptr;
    std::vector<Lane*> ready, paused;
    std::vector<std::unique_ptr<Block>> resident, retired;
    long pauses = 0;
    bool failed = false;
};

inline Launch* launch;
inline Lane* current;
inline char launch_end;

inline unsigned random_below(unsigned limit) {
    // xorshift64*; the upper half has the better bits.
    launch->random ^= launch->random >> 12;
    launch->random ^= launch->random << 25;
    launch->random ^= launch->random >> 27;
    return unsigned((launch->random * 0x2545f4914f6cdd1dull >> 32) * limit >> 32);
}

inline Warp& warp_of(const Lane& lane) { return lane.block->warps[lane.thread / WARP]; }

// The lanes of `mask` in the warp of `lane`; a range.
class Peers {
public:
    Peers(const Lane& lane, unsigned mask) {
        for (; mask; mask &= mask - 1)
            peers[count++] = lane.block->lanes[lane.thread / WARP * WARP + unsigned(__ffs(int(mask))) - 1];
    }
    Lane* const* begin() const { return peers; }
    Lane* const* end() const { return peers + count; }

private:
    Lane* peers[WARP];
    unsigned count = 0;
};

void run_kernel();  // where each fiber begins

}  // namespace host
