// Bitmaps of positions: bit p % 8 of byte p / 8 is set if position p is present (zenps/codecs/bitmap.py).
//
// Bitmaps are read in tiles of BITMAP_TILE positions, eight words a thread, in one pass with look-back. Set
// bits are listed in shared memory first: then consecutive threads process consecutive bits, stores are
// coalesced, and no lane idles if few bits are set.
#pragma once

#include "packs.cuh"
#include "scan.cuh"

constexpr int THREADS = 256;  // zenps.kernels.gpu.launcher.BLOCK
constexpr int WORD_BITS = 32;
constexpr int THREAD_WORDS = 8;
constexpr int64 TILE_WORDS = THREADS * THREAD_WORDS;
constexpr int64 BITMAP_TILE = TILE_WORDS * WORD_BITS;  // zenps.kernels.gpu.bitmap_codec.BITMAP_TILE
static_assert(BITMAP_TILE == 1 << 16, "uint16 names a bit of a tile");

constexpr int LISTED = 8192;  // bits that are listed at once, in 16 KB

// The first bit of this thread's words in its tile.
__device__ __forceinline__ uint32 first_of_words() { return threadIdx.x * (THREAD_WORDS * WORD_BITS); }

// Loads this thread's words of its tile, from a bitmap of `bytes` at an address divisible by 16; words beyond
// the end are zero. Returns the number of set bits.
__device__ inline uint32 read_words(const uint8* bitmap, int64 bytes, int64 tile,
                                    uint32 (&words)[THREAD_WORDS]) {
    using Quad = Pack<uint32, 4>;
    const int64 first = (tile * TILE_WORDS + threadIdx.x * THREAD_WORDS) * int64(sizeof(uint32));
    uint32 set = 0;
    for (int part = 0; part < THREAD_WORDS / 4; ++part) {
        const int64 at = first + part * int64(sizeof(Quad));
        Quad quad = {};
        if (at + int64(sizeof(Quad)) <= bytes) {
            quad = *reinterpret_cast<const Quad*>(bitmap + at);
        } else {
            for (int byte = 0; byte < int(sizeof(Quad)); ++byte)
                if (at + byte < bytes) quad.lane[byte / 4] |= uint32(bitmap[at + byte]) << (byte % 4 * 8);
        }
        for (int lane = 0; lane < 4; ++lane) {
            words[part * 4 + lane] = quad.lane[lane];
            set += __popc(quad.lane[lane]);
        }
    }
    return set;
}

// The lower halves of four bytes, as 16 bits.
__device__ __forceinline__ uint32 join_nibbles(uint32 bytes) {
    const uint32 pairs = (bytes | bytes >> 4) & 0x00ff00ffu;
    return (pairs | pairs >> 8) & 0xffffu;
}

// Calls use(rank, bit) for each of the `total` set bits of a tile, in order: the rank-th of them is bit
// `bit` of the tile. This thread's words, which are cleared, have the bits from `first` on; `rank` is the
// number of bits set before them. MOST are listed at once. A whole block takes part, and adjacent threads are
// called for adjacent ranks.
template <int MOST, int WORDS, typename Use>
__device__ inline void for_each_bit(uint32 (&words)[WORDS], uint32 first, uint32 rank, uint32 total, Use use) {
    SHARED_ARRAY(uint16, listed, MOST);
    for (uint32 begin = 0; begin < total; begin += MOST) {
        const uint32 end = begin + MOST < total ? begin + MOST : total;
        #pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            for (; words[word] && rank < end; ++rank) {
                listed[rank - begin] = uint16(first + word * WORD_BITS + __ffs(int(words[word])) - 1);
                words[word] &= words[word] - 1;  // without its lowest bit
            }
        }
        __syncthreads();
        for (uint32 at = begin + threadIdx.x; at < end; at += THREADS) use(at, listed[at - begin]);
        __syncthreads();
    }
}

// Calls use(number, position) for each set bit of a bitmap of `bits`, in order, from number 0 on, and counted() once
// with their number. Each block takes a tile; there are ceil(bits / BITMAP_TILE).
template <typename Counted, typename Use>
__device__ inline void for_each_position(ScanState* state, const uint8* bitmap, int64 bits, Counted counted,
                                         Use use) {
    const int64 tile = take_tile(state);
    uint32 words[THREAD_WORDS];
    const uint32 set = read_words(bitmap, ceil_div(bits, 8), tile, words);
    uint32 total;
    const uint32 rank = block_exclusive_sum<THREADS>(set, total);
    const int64 before = tiles_before(state, tile, total);
    if (threadIdx.x == 0 && (tile + 1) * BITMAP_TILE >= bits) counted(before + total);
    for_each_bit<LISTED>(words, first_of_words(), rank, total, [&](uint32 bit_rank, uint32 bit) {
        use(before + bit_rank, tile * BITMAP_TILE + bit);
    });
}
