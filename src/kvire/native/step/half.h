// Small floats to floats, by their definition: for what is not in a kernel.
#pragma once

#include <stdint.h>
#include <string.h>

namespace kvire {
namespace step {

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float float_of_bfloat(uint16_t bits) { return float_of_bits((uint32_t)bits << 16); }

static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 0x3ffu;
    if (exponent == 31u) return float_of_bits(sign | 0x7f800000u | (fraction << 13));
    if (exponent) return float_of_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
    const float magnitude = (float)fraction * 5.9604644775390625e-08f;  // 2^-24
    return sign ? -magnitude : magnitude;
}

// Half of 2^(exponent - 127): the scale of mxfp4, whose values are kept doubled.
static inline float float_of_e8m0_half(uint8_t exponent) {
    return float_of_bits(exponent < 2 ? 0x00200000u << exponent : (uint32_t)(exponent - 1) << 23);
}

}  // namespace step
}  // namespace kvire
