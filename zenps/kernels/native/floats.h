/* Conversion of 16-bit floats, rounded to nearest even as torch does, in integer arithmetic that vectorises.
 *
 * A NaN keeps its sign and the upper bits of its payload, and becomes quiet, as F16C's instructions do it. No result
 * depends on whether the thread flushes denormals to zero. After Fabian Giesen's float_to_half_fast3_rtne.
 */
#ifndef ZENPS_FLOATS_H
#define ZENPS_FLOATS_H

#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = (uint32_t)(half & 0x7fff) << 13;
    uint32_t normal = magnitude + ((uint32_t)(127 - 15) << 23);
    /* 2⁻¹⁴ is added as an implicit bit, and subtracted: both are normal numbers. */
    uint32_t small = as_bits(as_float(magnitude + ((uint32_t)(127 - 14) << 23)) - as_float((uint32_t)(127 - 14) << 23));
    uint32_t special = magnitude | 0x7f800000 | (magnitude > 0x0f800000 ? 0x400000 : 0);
    uint32_t finite = magnitude < 0x00800000 ? small : normal;
    return as_float(sign | (magnitude >= 0x0f800000 ? special : finite));
}

static inline uint16_t to_half(float value) {
    uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    uint32_t normal = (magnitude - ((uint32_t)(127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    /* Adding ½ makes the processor round to the multiples of 2⁻²⁴, which are the denormals of float16. */
    uint32_t small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    uint32_t finite = magnitude < (uint32_t)(127 - 14) << 23 ? small : normal;
    uint32_t special = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : 0x7c00;
    return (uint16_t)(sign | (magnitude >= (uint32_t)(127 + 16) << 23 ? special : finite));
}

static inline float from_brain(uint16_t brain) {
    return as_float((uint32_t)brain << 16);
}

static inline uint16_t to_brain(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#endif
