/* Feistel permutation of zenps/partition/keyspace.py: included once for each instruction set. */

/* Numbers whose halves are permuted at a time: they stay in a core's first cache. */
#define HALVES 512

/* A hash of `half` in [0, size). */
INLINE uint32_t NAMED(hash)(uint32_t half, uint32_t key, uint32_t size) {
    uint32_t hashed = (half ^ key) * 0x85ebca6bu;
    hashed ^= hashed >> 13;
    hashed *= 0xc2b2ae35u;
    return (uint32_t)((uint64_t)hashed * size >> 32);
}

/* Halves are below 2^31: of a half and the half plus or minus `size`, the lesser is the one that has not wrapped around. */
INLINE void NAMED(add)(uint32_t *half, const uint32_t *other, int64_t count, uint32_t key, uint32_t size) {
    for (int64_t index = 0; index < count; ++index) {
        uint32_t sum = half[index] + NAMED(hash)(other[index], key, size);
        half[index] = sum < sum - size ? sum : sum - size;
    }
}

INLINE void NAMED(subtract)(uint32_t *half, const uint32_t *other, int64_t count, uint32_t key, uint32_t size) {
    for (int64_t index = 0; index < count; ++index) {
        uint32_t difference = half[index] - NAMED(hash)(other[index], key, size);
        half[index] = difference < difference + size ? difference : difference + size;
    }
}

/* Permutes at most HALVES numbers once, in place. */
TARGET static void NAMED(cipher)(const Feistel *feistel, int is_inverse, int64_t *numbers, int64_t count) {
    uint32_t right[HALVES], left[HALVES];
    int64_t size = feistel->left_size;
    double reciprocal = 1.0 / (double)size;
    for (int64_t index = 0; index < count; ++index) {
        /* The quotient is below 2^31 + 1, and so wrong by one at most. */
        int64_t quotient = (int64_t)((double)numbers[index] * reciprocal), rest = numbers[index] - quotient * size;
        int64_t is_less = rest < 0, is_more = rest >= size;
        right[index] = (uint32_t)(quotient + is_more - is_less);
        left[index] = (uint32_t)(rest + (is_less - is_more) * size);
    }
    uint32_t left_size = (uint32_t)size, right_size = (uint32_t)feistel->right_size;
    for (int step = 0; step < FEISTEL_ROUNDS; ++step) {
        int round = is_inverse ? FEISTEL_ROUNDS - 1 - step : step, is_left = round % 2 == 0;
        uint32_t key = (uint32_t)feistel->keys[round];
        uint32_t *half = is_left ? left : right, *other = is_left ? right : left, modulus = is_left ? left_size : right_size;
        if (is_inverse)
            NAMED(subtract)(half, other, count, key, modulus);
        else
            NAMED(add)(half, other, count, key, modulus);
    }
    for (int64_t index = 0; index < count; ++index)
        numbers[index] = (int64_t)((uint64_t)right[index] * left_size + left[index]);
}

/* Permutes each number again until it is below the size. Returns `count`, or less if one was outside at first. */
TARGET static int64_t NAMED(permute)(const Feistel *feistel, int is_inverse, const Key *numbers, int64_t count,
                                     int64_t *found) {
    uint64_t size = (uint64_t)feistel->size;
    for (int64_t begin = 0; begin < count; begin += HALVES) {
        int64_t rest = count - begin, block = rest < HALVES ? rest : HALVES, *places = found + begin;
        int is_outside = 0;
        for (int64_t index = 0; index < block; ++index) {
            places[index] = numbers[begin + index];
            is_outside |= (uint64_t)places[index] >= size;
        }
        if (is_outside)
            return begin;
        NAMED(cipher)(feistel, is_inverse, places, block);
        for (int64_t index = 0; index < block; ++index)
            while ((uint64_t)places[index] >= size)
                NAMED(cipher)(feistel, is_inverse, &places[index], 1);
    }
    return count;
}
