// Fibers: stacks that one CPU thread switches between, with the annotations that sanitizers need.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_set_fiber_name(void* fiber, const char* name);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __asan_poison_memory_region(const volatile void* address, std::size_t size);
void __asan_unpoison_memory_region(const volatile void* address, std::size_t size);
}

namespace host {

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

constexpr std::size_t STACK_BYTES = 1 << 16;  // a sanitizer reports from a fiber, and needs most of it
constexpr std::size_t MAX_FIBERS = 1280;      // ThreadSanitizer keeps a megabyte for each

// Order for ThreadSanitizer: who acquires an address comes after those who released it.
inline void acquire(void* address) {
    if constexpr (TSAN) __tsan_acquire(address);
}

inline void release(void* address) {
    if constexpr (TSAN) __tsan_release(address);
}

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

inline void prepare(Context& context, char* stack, void (*entry)()) {
    // A function begins with the stack eight bytes off a multiple of 16, as its caller's `call` leaves it.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    context.stack_pointer = top - 6;
}

inline void jump(Context& from, Context& to) { zenps_switch(&from.stack_pointer, to.stack_pointer); }

#else

using Context = ucontext_t;

inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context, entry, 0);
}

inline void jump(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

// ---------------------------------------------------------------------------------------------------------
// Their supply

struct Fiber {
    char* stack;
    void* tsan;  // what ThreadSanitizer takes for a thread
};

// Kept between launches: ThreadSanitizer takes half a millisecond to make one.
class Fibers {
public:
    Fiber take() {
        // To ThreadSanitizer, a reused fiber is ordered after all that it did earlier in this launch: that
        // hides races, so it is the last choice.
        if (!rested.empty()) return pop(rested);
        if (!tired.empty() && (!TSAN || made >= MAX_FIBERS)) return pop(tired);
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) std::abort();
        ++made;
        return {static_cast<char*>(stack), TSAN ? __tsan_create_fiber(0) : nullptr};
    }

    void give_back(const Fiber& fiber) { tired.push_back(fiber); }

    // Of one that is left in the middle of a kernel.
    void discard(const Fiber& fiber) {
        if constexpr (TSAN) __tsan_destroy_fiber(fiber.tsan);
        if constexpr (ASAN) __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);
        munmap(fiber.stack, STACK_BYTES);
        --made;
    }

    // The launch has ended.
    void rest() {
        rested.insert(rested.end(), tired.begin(), tired.end());
        tired.clear();
    }

private:
    static Fiber pop(std::vector<Fiber>& from) {
        const Fiber fiber = from.back();
        from.pop_back();
        return fiber;
    }

    std::vector<Fiber> rested, tired;  // that ran before this launch, and in it
    std::size_t made = 0;
};

}  // namespace host
