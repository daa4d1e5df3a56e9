// Runtime calls of cuda_host.h: a CUDA thread records what it waits for and switches to the scheduler.
//
// All of this runs on a fiber, so under ThreadSanitizer it calls no function that the sanitizer intercepts
// (memset, malloc): the sanitizer would take it for the kernel's.
#include "state.h"

namespace host {
namespace {

void wait_as(State state) {
    current->state = state;
    // 1: the switch orders nothing.
    if constexpr (TSAN) __tsan_switch_to_fiber(launch->scheduler_fiber, 1);
    jump(current->context, launch->scheduler);
}

[[noreturn]] void trap(const char* reason) {
    current->trap = reason;
    wait_as(State::TRAPPED);
    std::abort();
}

// Of the __syncwarp that peers wait in already, or a fresh one.
char* warp_fence(const Lane& lane) {
    Warp& warp = warp_of(lane);
    for (const Lane* peer : Peers(lane, lane.mask & warp.waiting))
        if (peer->mask == lane.mask) return peer->fence;
    return &warp.fences[warp.fenced++ % 4];
}

}  // namespace

void run_kernel() {
    acquire(&current->block->begin);
    launch->kernel->call(launch->words);
    release(&launch_end);
    wait_as(State::EXITED);
    std::abort();
}

}  // namespace host

using namespace host;

HostIndex host_thread() { return {current->thread}; }
HostIndex host_block() { return {current->block->index}; }
HostIndex host_block_size() { return {launch->block}; }
HostIndex host_grid_size() { return {launch->grid}; }

unsigned host_barrier(HostBarrier kind, bool predicate) {
    Lane& self = *current;
    self.barrier = kind;
    self.word = predicate;
    self.fence = &self.block->fences[self.block->barriers % 2];
    release(self.fence);
    wait_as(State::AT_BARRIER);
    acquire(self.fence);
    return unsigned(self.result);
}

// Of these __syncwarp alone orders memory.
HostWord host_collective(HostCollective kind, unsigned mask, HostWord word, unsigned source) {
    Lane& self = *current;
    self.collective = kind;
    self.mask = mask;
    self.word = word;
    self.source = source;
    self.fence = kind == HostCollective::SYNCWARP ? warp_fence(self) : nullptr;
    if (self.fence) release(self.fence);
    wait_as(State::IN_COLLECTIVE);
    if (self.fence) acquire(self.fence);
    return self.result;
}

void host_preempt() {
    if (random_below(4) == 0) wait_as(State::READY);
}

void host_yield() { wait_as(State::PAUSED); }

void host_trap() { trap("__trap()"); }

void* host_shared_at(const void* declaration, HostWord bytes) {
    Block& block = *current->block;
    for (unsigned i = 0; i < block.array_count; ++i)
        if (block.arrays[i].declaration == declaration) return block.arena + block.arrays[i].begin;
    if (block.array_count == MAX_ARRAYS) trap("more shared arrays than the runtime keeps");
    block.shared_bytes = (block.shared_bytes + 15) / 16 * 16 + bytes;
    if (block.shared_bytes > SHARED_BYTES) trap("more than 48 KiB of shared memory");
    const std::size_t begin = block.arena_bytes, end = begin + bytes;
    block.arena_bytes = (end + GAP_BYTES + 15) / 16 * 16;
    block.arrays[block.array_count++] = {declaration, begin, end};
    if constexpr (ASAN) __asan_poison_memory_region(block.arena + (end + 7) / 8 * 8, GAP_BYTES);
    return block.arena + begin;
}
