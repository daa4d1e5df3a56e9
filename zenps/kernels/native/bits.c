/* Bitmaps, least significant bit first, as the codecs have them. */
#include "native.h"

#include <string.h>

static uint64_t word_at(const unsigned char *bitmap, int64_t bytes) {
    uint64_t word = 0;
    memcpy(&word, bitmap, (size_t)(bytes < 8 ? bytes : 8));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

int64_t zenps_set_bits(const unsigned char *bitmap, int64_t bytes, int64_t *numbers, int64_t most) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < bytes; begin += 8)
        for (uint64_t word = word_at(bitmap + begin, bytes - begin); word; word &= word - 1) {
            if (found == most)
                return -1;
            numbers[found++] = 8 * begin + __builtin_ctzll(word);
        }
    return found;
}

int zenps_mark_bits(const Key *numbers, int64_t count, unsigned char *bitmap, int64_t bytes) {
    memset(bitmap, 0, (size_t)bytes);
    for (int64_t index = 0; index < count; ++index) {
        uint64_t number = (uint64_t)numbers[index];
        if (number >= (uint64_t)bytes * 8)
            return -1;
        bitmap[number >> 3] = (unsigned char)(bitmap[number >> 3] | 1u << (number & 7));
    }
    return 0;
}
