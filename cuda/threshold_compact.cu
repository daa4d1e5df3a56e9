// Selection by magnitude from a dense gradient and its residual: accumulation and stream compaction in one pass.
//
// residual += gradient; the elements of a range whose magnitude reaches a bound are appended to the output, in
// order of index; they may leave the residual at once. The bound may lie on the device, where it was found, so
// that the host need not wait for it.
//
// Pipeline of a tile of TILE elements:
//   load, add, store              all of a thread's PACKS at once
//   mark                          a bit for each element that is selected
//   count                         prefix sums in the warps and the block
//   look back                     the first warp, while the others list
//   list, write                   set bits in shared memory, in order; their indices and values, coalesced
//
// Magnitudes are compared as integers, as in zenps/kernels/native/magnitudes.c: NaN is above all others.
//
// Lower bound: gradient and residual are read once and the residual is written once, 12 bytes of a float32
// element, beside the output. A block has 32 KB in flight.
#include "bitmap.cuh"

constexpr int PACKS = 4;  // of a thread
constexpr int LANES = 4;  // of a pack; zenps.kernels.gpu.threshold_compact.LANES
constexpr int RESIDENT = 4;  // blocks of a multiprocessor; zenps.kernels.gpu.threshold_compact.RESIDENT
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

// indices[i], values[i] = the i-th selected element of `residual` + `gradient`, for i below `capacity`; *count =
// the number of them. Where there is no `gradient`, the residual alone. Selected are the elements from `start`
// up to, not including, `stop`, with a magnitude of at least *least, or of `least_bits` if there is no `least`.
// If `takes` is not 0, those that are written leave 0 in the residual. Both inputs are aligned to packs. Any
// number of blocks take tiles until none is left.
template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
threshold_compact(ScanState* state, const T* gradient, float* residual, int64 size, int64 start, int64 stop,
                  const float* least, int64 least_bits, int64 takes, int64 capacity, int64* indices, float* values,
                  int64* count) {
    SHARED_ARRAY(uint32, marks, THREADS * PACKS / sizeof(uint32));
    SHARED_ARRAY(int64, shared_before, 1);
    const uint32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const uint32 given = least ? __float_as_uint(*least) : uint32(least_bits);
    const uint32 bound = given <= INFINITE ? given : 0u;  // neither a negative number nor NaN bounds anything
    const int64 tiles = ceil_div(size, TILE);
    uint8* const of_warp = reinterpret_cast<uint8*>(marks) + warp * (WARP * PACKS);

    for (int64 tile = take_tile(state); tile < tiles; tile = take_tile(state)) {
        const int64 first = tile * TILE + int64(warp * (WARP * PACKS) + lane) * LANES;
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
                const int64 begin = first + pack * (WARP * LANES);
                sums[pack] = add(sums[pack], widen(added[pack]));
                if (begin + LANES <= size) *reinterpret_cast<Sums*>(residual + begin) = sums[pack];
                else
                    for (int at = 0; at < LANES && begin + at < size; ++at) residual[begin + at] = sums[pack].lane[at];
            }
        }

        // A nibble for each pack; then each lane gets those of adjacent elements.
        #pragma unroll
        for (int pack = 0; pack < PACKS; ++pack) {
            uint32 set = 0;
            #pragma unroll
            for (int at = 0; at < LANES; ++at) {
                const int64 index = first + pack * (WARP * LANES) + at;
                if (magnitude(sums[pack].lane[at]) >= bound && index >= start && index < stop) set |= 1u << at;
            }
            of_warp[pack * WARP + lane] = uint8(set);
        }
        __syncwarp();
        uint32 words[1] = {join_nibbles(reinterpret_cast<const uint32*>(of_warp)[lane])};
        uint32 total;
        const uint32 rank = block_exclusive_sum<THREADS>(__popc(words[0]), total);
        if (threadIdx.x < WARP) {
            const int64 before = int64(look_back(state, tile, total));
            if (threadIdx.x == 0) {
                *shared_before = before;
                if (tile == tiles - 1) *count = before + total;
            }
        }
        // Behind its barrier, a thread sees the residual that others of the block have stored.
        for_each_bit<TILE>(words, threadIdx.x * (PACKS * LANES), rank, total, [&](uint32 bit_rank, uint32 bit) {
            const int64 i = *shared_before + bit_rank, index = tile * TILE + bit;
            if (i >= capacity) return;
            indices[i] = index;
            values[i] = residual[index];
            if (takes) residual[index] = 0.0f;
        });
    }
}
