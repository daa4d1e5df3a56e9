// Runs a CUDA grid on one CPU thread: each CUDA thread is a fiber, and a seeded scheduler picks who runs.
//
// A fiber only says what it waits for and switches back; the scheduler decides everything else. Several
// blocks are resident at once and start in random order, so that a look-back really waits, and one that
// waits for a block which has not started never ends, as may happen on a GPU.
//
// Under ThreadSanitizer this file is compiled without it, and each fiber is a thread to it. Switches order
// nothing, so that races show whatever the schedule was; barriers, and the launch's begin and end, do.
// Fibers call nothing that the sanitizer intercepts (memset, malloc): it would take that for the kernel's.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "cuda_host.h"
#include "table.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __asan_poison_memory_region(const volatile void* address, size_t size);
void __asan_unpoison_memory_region(const volatile void* address, size_t size);
}

namespace {

#ifdef ZENPS_THREAD_SANITIZER
constexpr bool TSAN = true;
#else
constexpr bool TSAN = false;
#endif
#ifdef ZENPS_ADDRESS_SANITIZER
constexpr bool ASAN = true;
#else
constexpr bool ASAN = false;
#endif

constexpr size_t STACK_BYTES = 1 << 16;  // a sanitizer reports from a fiber, and needs most of it
constexpr size_t SHARED_BYTES = 48 << 10;
constexpr size_t GAP_BYTES = 64;  // after each shared array, to be found untouched
constexpr size_t MAX_ARRAYS = 32;
constexpr unsigned char POISON = 0xcd;
constexpr unsigned WARP = 32;
constexpr size_t MAX_FIBERS = 1280;  // ThreadSanitizer keeps a megabyte for each
constexpr long MAX_PAUSES = 3'000'000;  // in a row, while no thread passes a barrier or exits

// ---------------------------------------------------------------------------------------------------------
// Switching stacks

#ifdef __x86_64__

struct Context {
    void* stack_pointer;
};

extern "C" void zenps_switch(void** from, void* to);
asm(R"(
    .text
    .local zenps_switch
    .type zenps_switch, @function
zenps_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size zenps_switch, . - zenps_switch
)");

void prepare(Context& context, char* stack, void (*entry)()) {
    // A function begins with the stack eight bytes off a multiple of 16, as its caller's `call` leaves it.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    context.stack_pointer = top - 6;
}

void jump(Context& from, Context& to) { zenps_switch(&from.stack_pointer, to.stack_pointer); }

#else

}  // namespace
#include <ucontext.h>
namespace {

using Context = ucontext_t;

void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, entry, 0);
}

void jump(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

// ---------------------------------------------------------------------------------------------------------
// State

enum class State { READY, PAUSED, AT_BARRIER, IN_COLLECTIVE, EXITED, TRAPPED };

struct Block;

struct Fiber {
    char* stack;
    void* tsan;  // what ThreadSanitizer takes for a thread
};

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

struct Warp {
    unsigned waiting = 0;  // lanes in a collective
    unsigned exited = 0;   // or beyond the block's end
    char fences[4] = {};   // of __syncwarp, in turn
    unsigned fenced = 0;
};

struct Array {
    const void* declaration;
    size_t begin, end;
};

// Made anew for each block: an address that had a past would hide races, or invent some.
struct Block {
    unsigned index;
    std::vector<Lane*> lanes;
    unsigned arrived = 0, exited = 0;
    HostBarrier barrier;  // that they have arrived at
    char begin = 0;
    char fences[2] = {};  // of block barriers, in turn: who leaves late must not acquire the next one's
    unsigned barriers = 0;
    Warp warps[1024 / WARP];
    Array arrays[MAX_ARRAYS];
    unsigned array_count = 0;
    size_t shared_bytes = 0, arena_bytes = 0;
    alignas(64) char arena[SHARED_BYTES + MAX_ARRAYS * GAP_BYTES];
};

struct Launch {
    const HostKernel* kernel;
    void* const* words;
    unsigned grid, block;
    uint64_t random;
    Context scheduler;
    void* scheduler_fiber = nullptr;
    std::vector<Lane*> ready, paused;
    std::vector<std::unique_ptr<Block>> resident, retired;
    long pauses = 0;
    bool failed = false;
};

// Kept between launches: ThreadSanitizer takes half a millisecond to make one.
struct Fibers {
    std::vector<Fiber> rested, tired;  // before this launch, in this launch
    size_t made = 0;
};

Launch* launch;
Fibers fibers;
Lane* current;
char launch_end;
char message[1024];

unsigned random_below(unsigned limit) {
    // xorshift64*; the upper half has the better bits.
    launch->random ^= launch->random >> 12;
    launch->random ^= launch->random << 25;
    launch->random ^= launch->random >> 27;
    return unsigned((launch->random * 0x2545f4914f6cdd1dull >> 32) * limit >> 32);
}

const char* name_of(HostCollective kind) {
    constexpr const char* NAMES[] = {"__syncwarp",      "__ballot_sync",   "__any_sync",
                                     "__all_sync",      "a 32-bit shuffle", "a 64-bit shuffle",
                                     "a 32-bit __match_any_sync", "a 64-bit __match_any_sync"};
    return NAMES[int(kind)];
}

Warp& warp_of(const Lane& lane) { return lane.block->warps[lane.thread / WARP]; }

Lane* peer_of(const Lane& lane, unsigned number) { return lane.block->lanes[lane.thread / WARP * WARP + number]; }

// Scheduler only.
[[gnu::format(printf, 2, 3)]] void fail(const Lane* lane, const char* format, ...) {
    if (launch->failed) return;
    launch->failed = true;
    int length = 0;
    if (lane) length = std::snprintf(message, sizeof message, "block %u, thread %u: ", lane->block->index, lane->thread);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message + length, sizeof message - length, format, arguments);
    va_end(arguments);
}

// ---------------------------------------------------------------------------------------------------------
// On a fiber

void wait_as(State state) {
    current->state = state;
    if constexpr (TSAN) __tsan_switch_to_fiber(launch->scheduler_fiber, 1);
    jump(current->context, launch->scheduler);
}

[[noreturn]] void trap(const char* reason) {
    current->trap = reason;
    wait_as(State::TRAPPED);
    std::abort();
}

void enter() {
    if constexpr (TSAN) __tsan_acquire(&current->block->begin);
    launch->kernel->call(launch->words);
    if constexpr (TSAN) __tsan_release(&launch_end);
    wait_as(State::EXITED);
    std::abort();
}

char* warp_fence(const Lane& lane) {
    Warp& warp = warp_of(lane);
    for (unsigned others = warp.waiting & lane.mask; others; others &= others - 1) {
        const Lane& peer = *peer_of(lane, __ffs(int(others)) - 1);
        if (peer.mask == lane.mask) return peer.fence;
    }
    return &warp.fences[warp.fenced++ % 4];
}

}  // namespace

HostIndex host_thread() { return {current->thread}; }
HostIndex host_block() { return {current->block->index}; }
HostIndex host_block_size() { return {launch->block}; }
HostIndex host_grid_size() { return {launch->grid}; }

unsigned host_barrier(HostBarrier kind, bool predicate) {
    Lane& self = *current;
    self.barrier = kind;
    self.word = predicate;
    self.fence = &self.block->fences[self.block->barriers % 2];
    if constexpr (TSAN) __tsan_release(self.fence);
    wait_as(State::AT_BARRIER);
    if constexpr (TSAN) __tsan_acquire(self.fence);
    return unsigned(self.result);
}

HostWord host_collective(HostCollective kind, unsigned mask, HostWord word, unsigned source) {
    Lane& self = *current;
    self.collective = kind;
    self.mask = mask;
    self.word = word;
    self.source = source;
    const bool fenced = TSAN && kind == HostCollective::SYNCWARP;
    if (fenced) {
        self.fence = warp_fence(self);
        __tsan_release(self.fence);
    }
    wait_as(State::IN_COLLECTIVE);
    if (fenced) __tsan_acquire(self.fence);
    return self.result;
}

void host_preempt() {
    if (random_below(4) == 0) wait_as(State::READY);
}

void host_yield() { wait_as(State::PAUSED); }

void* host_shared_at(const void* declaration, HostWord bytes) {
    Block& block = *current->block;
    for (unsigned i = 0; i < block.array_count; ++i)
        if (block.arrays[i].declaration == declaration) return block.arena + block.arrays[i].begin;
    if (block.array_count == MAX_ARRAYS) trap("more shared arrays than the runtime keeps");
    block.shared_bytes = (block.shared_bytes + 15) / 16 * 16 + bytes;
    if (block.shared_bytes > SHARED_BYTES) trap("more than 48 KiB of shared memory");
    const size_t begin = block.arena_bytes, end = begin + bytes;
    block.arena_bytes = (end + GAP_BYTES + 15) / 16 * 16;
    block.arrays[block.array_count++] = {declaration, begin, end};
    if constexpr (ASAN) __asan_poison_memory_region(block.arena + (end + 7) / 8 * 8, GAP_BYTES);
    return block.arena + begin;
}

void host_trap() { trap("__trap()"); }

// ---------------------------------------------------------------------------------------------------------
// The scheduler

namespace {

void wake(Lane& lane) {
    lane.state = State::READY;
    launch->ready.push_back(&lane);
}

Fiber take_fiber() {
    // One that ran before in this launch is ordered after what it met there, which hides races.
    std::vector<Fiber>& from = fibers.rested.empty() && (!TSAN || fibers.made >= MAX_FIBERS) ? fibers.tired : fibers.rested;
    if (!from.empty()) {
        const Fiber fiber = from.back();
        from.pop_back();
        return fiber;
    }
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    ++fibers.made;
    return {static_cast<char*>(stack), TSAN ? __tsan_create_fiber(0) : nullptr};
}

// One that was left in the middle of a kernel.
void discard(const Fiber& fiber) {
    if constexpr (TSAN) __tsan_destroy_fiber(fiber.tsan);
    if constexpr (ASAN) __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
    munmap(fiber.stack, STACK_BYTES);
    --fibers.made;
}

void start_block(unsigned index) {
    auto block = std::make_unique<Block>();
    block->index = index;
    std::memset(block->arena, POISON, sizeof block->arena);
    for (unsigned thread = 0; thread < launch->block; ++thread) {
        Lane* lane = new Lane();
        lane->block = block.get();
        lane->thread = thread;
        lane->fiber = take_fiber();
        if constexpr (TSAN) {
            char name[48];
            std::snprintf(name, sizeof name, "block %u thread %u", index, thread);
            __tsan_set_fiber_name(lane->fiber.tsan, name);
        }
        prepare(lane->context, lane->fiber.stack, enter);
        block->lanes.push_back(lane);
        wake(*lane);
    }
    if (launch->block % WARP) block->warps[launch->block / WARP].exited = ~0u << launch->block % WARP;
    if constexpr (TSAN) __tsan_release(&block->begin);
    launch->resident.push_back(std::move(block));
}

void end_block(Block* block) {
    for (unsigned i = 0; i < block->array_count; ++i) {
        const char* gap = block->arena + block->arrays[i].end;
        if constexpr (ASAN) __asan_unpoison_memory_region(gap, GAP_BYTES);
        const auto touched = [](char byte) { return static_cast<unsigned char>(byte) != POISON; };
        if (std::any_of(gap, gap + GAP_BYTES, touched))
            fail(block->lanes[0], "a shared array of %zu bytes was written beyond its end",
                 block->arrays[i].end - block->arrays[i].begin);
    }
    for (Lane* lane : block->lanes) {
        fibers.tired.push_back(lane->fiber);
        delete lane;
    }
    const auto is_it = [block](const auto& other) { return other.get() == block; };
    const auto place = std::find_if(launch->resident.begin(), launch->resident.end(), is_it);
    // To ThreadSanitizer, freeing it before the launch ends would race with its own threads.
    if (TSAN) launch->retired.push_back(std::move(*place));
    launch->resident.erase(place);
}

void settle_barrier(Lane& lane) {
    Block& block = *lane.block;
    if (block.exited) return fail(&lane, "waits at a barrier of a block of which %u threads have exited", block.exited);
    if (block.arrived == 0) block.barrier = lane.barrier;
    if (lane.barrier != block.barrier) return fail(&lane, "waits at another kind of barrier than others of the block");
    if (++block.arrived < launch->block) return;
    unsigned count = 0;
    for (const Lane* other : block.lanes) count += unsigned(other->word);
    const unsigned result = lane.barrier == HostBarrier::OR    ? count > 0
                            : lane.barrier == HostBarrier::AND ? count == launch->block
                                                               : count;
    block.arrived = 0;
    ++block.barriers;
    launch->pauses = 0;
    for (Lane* other : block.lanes) {
        other->result = result;
        wake(*other);
    }
}

HostWord collective_result(const Lane& lane) {
    if (lane.collective == HostCollective::SHUFFLE32 || lane.collective == HostCollective::SHUFFLE64) {
        // What a lane outside the mask holds is undefined.
        return lane.mask >> lane.source & 1 ? peer_of(lane, lane.source)->word : 0xcdcdcdcdcdcdcdcdull;
    }
    const bool is_match = lane.collective == HostCollective::MATCH32 || lane.collective == HostCollective::MATCH64;
    HostWord found = 0;
    for (unsigned others = lane.mask; others; others &= others - 1) {
        const unsigned number = unsigned(__ffs(int(others))) - 1;
        const HostWord word = peer_of(lane, number)->word;
        if (is_match ? word == lane.word : word != 0) found |= 1ull << number;
    }
    return found;
}

void settle_collective(Lane& lane) {
    Warp& warp = warp_of(lane);
    const unsigned self = 1u << lane.thread % WARP;
    const char* name = name_of(lane.collective);
    if (!(lane.mask & self)) return fail(&lane, "calls %s with mask %#x, which leaves itself out", name, lane.mask);
    if (lane.mask & warp.exited)
        return fail(&lane, "calls %s with mask %#x, of which %#x have exited or never were", name, lane.mask,
                    lane.mask & warp.exited);
    warp.waiting |= self;
    if (lane.mask & ~warp.waiting) return;
    Lane* peers[WARP];
    unsigned count = 0;
    for (unsigned others = lane.mask; others; others &= others - 1) {
        Lane* peer = peer_of(lane, unsigned(__ffs(int(others))) - 1);
        if (peer->mask != lane.mask) return;  // it waits for others first
        if (peer->collective != lane.collective)
            return fail(&lane, "calls %s with mask %#x, but thread %u calls %s", name, lane.mask, peer->thread,
                        name_of(peer->collective));
        peers[count++] = peer;
    }
    for (unsigned i = 0; i < count; ++i) peers[i]->result = collective_result(*peers[i]);
    for (unsigned i = 0; i < count; ++i) wake(*peers[i]);
    warp.waiting &= ~lane.mask;
}

void settle_exit(Lane& lane) {
    Block& block = *lane.block;
    Warp& warp = warp_of(lane);
    const unsigned self = 1u << lane.thread % WARP;
    launch->pauses = 0;
    warp.exited |= self;
    ++block.exited;
    if (block.arrived) return fail(&lane, "exits while %u threads wait at a barrier of the block", block.arrived);
    for (unsigned others = warp.waiting; others; others &= others - 1) {
        const Lane& peer = *peer_of(lane, unsigned(__ffs(int(others))) - 1);
        if (peer.mask & self)
            return fail(&peer, "calls %s with mask %#x, of which %#x have exited or never were",
                        name_of(peer.collective), peer.mask, self);
    }
    if (block.exited == launch->block) end_block(&block);
}

void settle(Lane& lane) {
    switch (lane.state) {
        case State::READY: return wake(lane);
        case State::PAUSED:
            if (++launch->pauses > MAX_PAUSES) return fail(&lane, "waits in a loop for what never comes");
            return launch->paused.push_back(&lane);
        case State::AT_BARRIER: return settle_barrier(lane);
        case State::IN_COLLECTIVE: return settle_collective(lane);
        case State::EXITED: return settle_exit(lane);
        case State::TRAPPED: return fail(&lane, "%s", lane.trap);
    }
}

void fail_deadlocked() {
    for (const auto& block : launch->resident)
        for (const Lane* lane : block->lanes)
            if (lane->state == State::IN_COLLECTIVE)
                return fail(lane, "deadlock: waits in %s with mask %#x for lanes that never come",
                            name_of(lane->collective), lane->mask);
    fail(launch->resident[0]->lanes[0], "deadlock at a barrier of the block");
}

Lane* pick() {
    // Who waits in a loop mostly waits for somebody else.
    auto& from = launch->ready.empty() || (!launch->paused.empty() && random_below(8) == 0) ? launch->paused : launch->ready;
    if (from.empty()) return nullptr;
    std::swap(from[random_below(unsigned(from.size()))], from.back());
    Lane* lane = from.back();
    from.pop_back();
    return lane;
}

void run_grid(unsigned resident) {
    std::vector<unsigned> waiting(launch->grid);
    std::iota(waiting.begin(), waiting.end(), 0u);
    while (!launch->failed) {
        while (launch->resident.size() < resident && !waiting.empty()) {
            std::swap(waiting[random_below(unsigned(waiting.size()))], waiting.back());
            start_block(waiting.back());
            waiting.pop_back();
        }
        if (launch->resident.empty()) return;
        Lane* lane = pick();
        if (!lane) return fail_deadlocked();
        current = lane;
        if constexpr (TSAN) __tsan_switch_to_fiber(lane->fiber.tsan, 1);
        jump(launch->scheduler, lane->context);
        settle(*lane);
    }
}

}  // namespace

// Runs a kernel to its end. Returns why it was aborted, or null. One launch at a time.
extern "C" const char* zenps_launch(const HostKernel* kernel, void* const* words, unsigned grid, unsigned block,
                                    unsigned resident, uint64_t seed) {
    Launch now;
    now.kernel = kernel;
    now.words = words;
    now.grid = grid;
    now.block = block;
    now.random = seed * 2 + 1;
    launch = &now;
    for (int i = 0; i < 8; ++i) random_below(1);  // neighbouring seeds part
    if constexpr (TSAN) now.scheduler_fiber = __tsan_get_current_fiber();
    run_grid(resident);
    if constexpr (TSAN) __tsan_acquire(&launch_end);
    for (const auto& block : now.resident)
        for (Lane* lane : block->lanes) {
            discard(lane->fiber);
            delete lane;
        }
    fibers.rested.insert(fibers.rested.end(), fibers.tired.begin(), fibers.tired.end());
    fibers.tired.clear();
    return now.failed ? message : nullptr;
}
