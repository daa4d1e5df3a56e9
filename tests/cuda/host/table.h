// The kernels of one source, listed for launches by number, as cuModuleGetFunction and cuLaunchKernel have
// them on a GPU. The stub that build.py writes includes the source and lists kernel_of<…>() of each.
#pragma once

#include <type_traits>
#include <utility>

struct HostKernel {
    void (*call)(void* const* words);  // one for each parameter
    const char* parameters;            // of each: i for an integer, 1 to 8 for a pointer to so many bytes,
                                       // p for any other pointer, A to Z for a struct of 1 to 26 words
};

template <typename T>
struct HostParameter {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0 && sizeof(T) <= 26 * 8, "whole words");
    static constexpr char KIND = char('A' - 1 + sizeof(T) / 8);
    static const T& of(void* word) { return *static_cast<const T*>(word); }
};

template <>
struct HostParameter<long long> {
    static constexpr char KIND = 'i';
    static long long of(void* word) { return reinterpret_cast<long long>(word); }
};

template <typename T>
struct HostParameter<T*> {
    static constexpr char KIND = sizeof(T) <= 8 ? char('0' + sizeof(T)) : 'p';
    static T* of(void* word) { return static_cast<T*>(word); }
};

template <auto KERNEL>
struct HostCall;

template <typename... Parameters, void (*KERNEL)(Parameters...)>
struct HostCall<KERNEL> {
    static constexpr char KINDS[] = {HostParameter<Parameters>::KIND..., 0};

    template <std::size_t... I>
    static void unpack(void* const* words, std::index_sequence<I...>) {
        KERNEL(HostParameter<Parameters>::of(words[I])...);
    }
    static void call(void* const* words) { unpack(words, std::index_sequence_for<Parameters...>()); }
};

template <auto KERNEL>
constexpr HostKernel kernel_of() {
    return {HostCall<KERNEL>::call, HostCall<KERNEL>::KINDS};
}
