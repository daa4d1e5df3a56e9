// Scheduler of a CUDA grid on one CPU thread: each CUDA thread is a fiber, and a seed draws the next to run.
//
// A fiber only records what it waits for and switches back; the scheduler decides everything. Several blocks
// are resident at once and start in random order, so that a look-back really waits, and one that waits for a
// block which has not started never ends, as may happen on a GPU.
//
// Runtime and scheduler are compiled without ThreadSanitizer, and each fiber is a thread to it. Switches
// order nothing, so that races show whatever the schedule was; barriers, and a launch's begin and end, do.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "state.h"

namespace host {
namespace {

constexpr long MAX_PAUSES = 3'000'000;  // in a row, while no thread passes a barrier or exits

Fibers fibers;
char message[1024];

[[gnu::format(printf, 2, 3)]] void fail(const Lane& lane, const char* format, ...) {
    if (launch->failed) return;
    launch->failed = true;
    const int length =
        std::snprintf(message, sizeof message, "block %u, thread %u: ", lane.block->index, lane.thread);
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message + length, sizeof message - std::size_t(length), format, arguments);
    va_end(arguments);
}

const char* name_of(HostCollective kind) {
    constexpr const char* NAMES[] = {
        "__syncwarp",
        "__ballot_sync",
        "__any_sync",
        "__all_sync",
        "a 32-bit shuffle",
        "a 64-bit shuffle",
        "a 32-bit __match_any_sync",
        "a 64-bit __match_any_sync",
    };
    return NAMES[int(kind)];
}

void wake(Lane& lane) {
    lane.state = State::READY;
    launch->ready.push_back(&lane);
}

// ---------------------------------------------------------------------------------------------------------
// Blocks

void start_block(unsigned index) {
    auto block = std::make_unique<Block>();
    block->index = index;
    std::memset(block->arena, POISON, sizeof block->arena);
    for (unsigned thread = 0; thread < launch->block; ++thread) {
        Lane* lane = new Lane();
        lane->block = block.get();
        lane->thread = thread;
        lane->fiber = fibers.take();
        if constexpr (TSAN) {
            char name[48];
            std::snprintf(name, sizeof name, "block %u thread %u", index, thread);
            __tsan_set_fiber_name(lane->fiber.tsan, name);
        }
        prepare(lane->context, lane->fiber.stack, run_kernel);
        block->lanes.push_back(lane);
        wake(*lane);
    }
    if (launch->block % WARP) block->warps[launch->block / WARP].exited = ~0u << launch->block % WARP;
    release(&block->begin);
    launch->resident.push_back(std::move(block));
}

void end_block(Block* block) {
    for (unsigned i = 0; i < block->array_count; ++i) {
        const char* gap = block->arena + block->arrays[i].end;
        const auto touched = [](char byte) { return static_cast<unsigned char>(byte) != POISON; };
        if (std::any_of(gap, gap + GAP_BYTES, touched))
            fail(*block->lanes[0], "a shared array of %zu bytes was written beyond its end",
                 block->arrays[i].end - block->arrays[i].begin);
    }
    for (Lane* lane : block->lanes) {
        fibers.give_back(lane->fiber);
        delete lane;
    }
    const auto is_it = [block](const auto& other) { return other.get() == block; };
    const auto place = std::find_if(launch->resident.begin(), launch->resident.end(), is_it);
    // To ThreadSanitizer, freeing it before the launch ends would race with its own threads.
    if (TSAN) launch->retired.push_back(std::move(*place));
    launch->resident.erase(place);
}

// ---------------------------------------------------------------------------------------------------------
// What a thread stopped for

void settle_barrier(Lane& lane) {
    Block& block = *lane.block;
    if (block.exited)
        return fail(lane, "waits at a barrier of a block of which %u threads have exited", block.exited);
    if (block.arrived == 0) block.barrier = lane.barrier;
    if (lane.barrier != block.barrier)
        return fail(lane, "waits at another kind of barrier than others of the block");
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
    const HostCollective kind = lane.collective;
    if (kind == HostCollective::SHUFFLE32 || kind == HostCollective::SHUFFLE64) {
        for (const Lane* peer : Peers(lane, lane.mask & (1u << lane.source))) return peer->word;
        return 0xcdcdcdcdcdcdcdcdull;  // what a lane outside the mask holds is undefined
    }
    const bool is_match = kind == HostCollective::MATCH32 || kind == HostCollective::MATCH64;
    HostWord found = 0;
    for (const Lane* peer : Peers(lane, lane.mask))
        if (is_match ? peer->word == lane.word : peer->word != 0) found |= 1ull << peer->thread % WARP;
    return found;
}

void fail_exited(const Lane& lane, unsigned exited) {
    fail(lane, "calls %s with mask %#x, of which %#x have exited or never were", name_of(lane.collective),
         lane.mask, exited);
}

void settle_collective(Lane& lane) {
    Warp& warp = warp_of(lane);
    const unsigned self = 1u << lane.thread % WARP;
    const char* name = name_of(lane.collective);
    if (!(lane.mask & self))
        return fail(lane, "calls %s with mask %#x, which leaves itself out", name, lane.mask);
    if (lane.mask & warp.exited) return fail_exited(lane, lane.mask & warp.exited);
    warp.waiting |= self;
    if (lane.mask & ~warp.waiting) return;

    const Peers peers(lane, lane.mask);
    for (const Lane* peer : peers) {
        if (peer->mask != lane.mask) return;  // it waits for others first
        if (peer->collective != lane.collective)
            return fail(lane, "calls %s with mask %#x, but thread %u calls %s", name, lane.mask, peer->thread,
                        name_of(peer->collective));
    }
    for (Lane* peer : peers) peer->result = collective_result(*peer);
    for (Lane* peer : peers) wake(*peer);
    warp.waiting &= ~lane.mask;
}

void settle_exit(Lane& lane) {
    Block& block = *lane.block;
    Warp& warp = warp_of(lane);
    const unsigned self = 1u << lane.thread % WARP;
    launch->pauses = 0;
    warp.exited |= self;
    ++block.exited;
    if (block.arrived)
        return fail(lane, "exits while %u threads wait at a barrier of the block", block.arrived);
    for (const Lane* peer : Peers(lane, warp.waiting))
        if (peer->mask & self) return fail_exited(*peer, self);
    if (block.exited == launch->block) end_block(&block);
}

void settle(Lane& lane) {
    switch (lane.state) {
        case State::READY: return wake(lane);
        case State::PAUSED:
            if (++launch->pauses > MAX_PAUSES) return fail(lane, "waits in a loop for what never comes");
            return launch->paused.push_back(&lane);
        case State::AT_BARRIER: return settle_barrier(lane);
        case State::IN_COLLECTIVE: return settle_collective(lane);
        case State::EXITED: return settle_exit(lane);
        case State::TRAPPED: return fail(lane, "%s", lane.trap);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The grid

Lane* pick() {
    // A thread that waits in a loop mostly waits for another thread.
    const bool patient = !launch->ready.empty() && (launch->paused.empty() || random_below(8) != 0);
    auto& from = patient ? launch->ready : launch->paused;
    if (from.empty()) return nullptr;
    std::swap(from[random_below(unsigned(from.size()))], from.back());
    Lane* lane = from.back();
    from.pop_back();
    return lane;
}

void fail_deadlocked() {
    for (const auto& block : launch->resident)
        for (const Lane* lane : block->lanes)
            if (lane->state == State::IN_COLLECTIVE)
                return fail(*lane, "deadlock: waits in %s with mask %#x for lanes that never come",
                            name_of(lane->collective), lane->mask);
    fail(*launch->resident[0]->lanes[0], "deadlock at a barrier of the block");
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
}  // namespace host

// Runs a kernel to its end. Returns why it was aborted, or null. One launch at a time.
extern "C" const char* zenps_launch(const HostKernel* kernel, void* const* words, unsigned grid,
                                    unsigned block, unsigned resident, std::uint64_t seed) {
    using namespace host;
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
    acquire(&launch_end);
    for (const auto& left : now.resident)
        for (Lane* lane : left->lanes) {
            fibers.discard(lane->fiber);
            delete lane;
        }
    fibers.rest();
    return now.failed ? message : nullptr;
}
