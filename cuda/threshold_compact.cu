// Selection by magnitude from a dense gradient and its residual: accumulation and stream compaction.
//
// residual += gradient; the elements of a range whose magnitude reaches a bound are appended to the output, in
// order of index; they may leave the residual at once. The bound may lie on the device, where it was found, so
// that the host need not wait for it.
//
// Pipeline:
//   mark_elements   load, add, store; and a bitmap, with a bit for each element that is selected
//   list_marked     prefix sums of the bitmap by look-back; the selected elements' indices and values
//
// One kernel for both, which read each element once and the bitmap never, took 1.8 times the floor on an H200:
// its blocks waited for each other's counts with nothing in flight. Here the pass over all elements has neither
// barriers nor waits, and the bitmap is 1/96 of its bytes.
//
// Magnitudes are compared as integers, as in zenps/kernels/native/magnitudes.c: NaN is above all others.
//
// Lower bound: gradient and residual are read once and the residual is written once, 12 bytes of a float32
// element, beside the output.
#include "bitmap.cuh"

constexpr int PACKS = 4;  // of a thread, all in flight at once
constexpr int LANES = 4;  // of a pack; zenps.kernels.gpu.threshold_compact.LANES
constexpr int WARP_ELEMENTS = WARP * PACKS * LANES;
constexpr int TILE = THREADS * PACKS * LANES;  // zenps.kernels.gpu.threshold_compact.TILE

constexpr uint32 INFINITE = 0x7f800000u;

using Sums = Pack<float, LANES>;

__device__ __forceinline__ uint32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// The elements of a pack, of which the last one may have fewer than LANES; missing ones are `absent`.
template <typename T>
__device__ __forceinline__ Pack<T, LANES> load_pack(const T* from, int64 first, int64 size, T absent) {
    if (first + LANES <= size) return *reinterpret_cast<const Pack<T, LANES>*>(from + first);
    Pack<T, LANES> pack;
    #pragma unroll
    for (int lane = 0; lane < LANES; ++lane) pack.lane[lane] = first + lane < size ? from[first + lane] : absent;
    return pack;
}

// residual += gradient, if there is one. A bit of `marks` is set for each element from `start` up to, not
// including, `stop`, whose magnitude is at least *least, or `least_bits` if there is no `least`. Both inputs are
// aligned to packs; `marks` has room for whole tiles. Each warp works alone.
template <typename T>
__global__ void mark_elements(const T* gradient, float* residual, int64 size, int64 start, int64 stop,
                              const float* least, int64 least_bits, uint16* marks) {
    SHARED_ARRAY(uint32, nibbles, THREADS * PACKS / sizeof(uint32));
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32 given = least ? __float_as_uint(*least) : uint32(least_bits);
    const uint32 bound = given <= INFINITE ? given : 0u;  // neither a negative number nor NaN bounds anything
    const int64 begin = int64(blockIdx.x) * TILE + warp * WARP_ELEMENTS, first = begin + lane * LANES;
    Sums sums[PACKS];
    #pragma unroll
    for (int pack = 0; pack < PACKS; ++pack)
        sums[pack] = load_pack(residual, first + pack * (WARP * LANES), size, 0.0f);
    if (gradient) {
        Pack<T, LANES> added[PACKS];
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack)
            added[pack] = load_pack(gradient, first + pack * (WARP * LANES), size, T{});
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            const int64 at = first + pack * (WARP * LANES);
            sums[pack] = add(sums[pack], widen(added[pack]));
            if (at + LANES <= size) *reinterpret_cast<Sums*>(residual + at) = sums[pack];
            else
                for (int k = 0; k < LANES && at + k < size; ++k) residual[at + k] = sums[pack].lane[k];
        }
    }

    // A nibble for each pack; then each lane gets those of adjacent elements.
    uint8* const of_warp = reinterpret_cast<uint8*>(nibbles) + warp * (WARP * PACKS);
    #pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
        uint32 set = 0;
        #pragma unroll
        for (int k = 0; k < LANES; ++k) {
            const int64 index = first + pack * (WARP * LANES) + k;
            if (magnitude(sums[pack].lane[k]) >= bound && index >= start && index < stop) set |= 1u << k;
        }
        of_warp[pack * WARP + lane] = uint8(set);
    }
    __syncwarp();
    const uint32 adjacent = reinterpret_cast<const uint32*>(of_warp)[lane];
    marks[begin / (PACKS * LANES) + lane] = uint16(join_nibbles(adjacent));
}

// indices[i], values[i] = the i-th marked element of the residual, for i below `capacity`; *count = the number of
// them. If `takes` is not 0, those that are written leave 0 in the residual.
__global__ void list_marked(ScanState* state, const uint8* marks, float* residual, int64 size, int64 takes,
                            int64 capacity, int64* indices, float* values, int64* count) {
    for_each_position(state, marks, size, [&](int64 marked) { *count = marked; }, [&](int64 i, int64 index) {
        if (i >= capacity) return;
        indices[i] = index;
        values[i] = residual[index];
        if (takes) residual[index] = 0.0f;
    });
}
