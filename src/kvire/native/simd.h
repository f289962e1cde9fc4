// Eight float lanes through GCC/Clang vector extensions: one source for AVX2, SSE2 and NEON.
//
// The files that include this header are compiled once per instruction set, each time into a namespace of
// its own (KVIRE_ISA_NAMESPACE). Everything here is therefore inlined or local to that namespace: an inline
// function of the standard library, compiled with AVX2 on, could be the copy that the linker keeps for
// everybody, and would then kill the process on an older CPU.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define KVIRE_INLINE static inline __attribute__((always_inline))
// On lambdas: what they capture stays in registers only if they are inlined.
#define KVIRE_LAMBDA __attribute__((always_inline))

// __builtin_shufflevector came to GCC with version 12; older ones know only __builtin_shuffle.
#if defined(__clang__) || __GNUC__ >= 12
#define KVIRE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVIRE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, v8i{__VA_ARGS__})
#endif

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {

typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef uint32_t v8u __attribute__((vector_size(32)));
typedef float v4f __attribute__((vector_size(16)));
typedef uint16_t v8h __attribute__((vector_size(16)));
typedef int8_t v8c __attribute__((vector_size(8)));

// Element types of a pool. A tag keeps f16 and bf16 apart where both are 16 bits.
struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

// Whether a row's elements count in steps of a scale of its own.
template <class E>
constexpr bool has_scales = false;
template <>
constexpr bool has_scales<int8_t> = true;

KVIRE_INLINE v8f broadcast(float x) { return v8f{x, x, x, x, x, x, x, x}; }

template <class Vector, class Element>
KVIRE_INLINE Vector load_bits(const Element* from) {
    Vector lanes;
    memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

template <class Element, class Vector>
KVIRE_INLINE void store_bits(Element* to, Vector lanes) {
    memcpy(to, &lanes, sizeof lanes);
}

KVIRE_INLINE v8f select(v8i mask, v8f yes, v8f no) { return (v8f)((mask & (v8i)yes) | (~mask & (v8i)no)); }
KVIRE_INLINE v8u select(v8i mask, v8u yes, v8u no) { return (v8u)((mask & (v8i)yes) | (~mask & (v8i)no)); }
KVIRE_INLINE v8f maximum(v8f a, v8f b) { return select(a > b, a, b); }

// Adding it to a float below 2^22 rounds that to an integer, ties to even, which the low bits then hold.
constexpr float kShifter = 12582912.0f;  // 1.5 * 2^23

// --- float16: IEEE half. Portable bit arithmetic, exact also where denormals are flushed to zero. -------

KVIRE_INLINE v8f widen_f16_bits(v8h half) {
    const v8u wide = __builtin_convertvector(half, v8u);
    const v8u magnitude = (wide & 0x7fffu) << 13;
    const v8u exponent = magnitude & (0x7c00u << 13);
    v8u bits = magnitude + ((127u - 15u) << 23);
    bits += (v8u)(exponent == (0x7c00u << 13)) & ((128u - 16u) << 23);  // inf and nan keep all ones
    // A half denormal is m * 2^-24: give it the exponent of 2^-14 and subtract that implicit one again.
    const v8f denormal = (v8f)(bits + (1u << 23)) - broadcast(6.103515625e-05f);
    bits = select((v8i)(exponent == 0u), (v8u)denormal, bits);
    return (v8f)(bits | ((wide & 0x8000u) << 16));
}

KVIRE_INLINE v8h narrow_f16_bits(v8f value) {
    const v8u bits = (v8u)value;
    const v8u magnitude = bits & 0x7fffffffu;
    const v8u odd = (magnitude >> 13) & 1u;  // round to nearest, ties to even
    v8u half = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
    // Below 2^-14 the sum with 0.5 lands the result, rounded by the addition itself, in the low bits.
    const v8u denormal = (v8u)((v8f)magnitude + broadcast(0.5f)) - 0x3f000000u;
    half = select((v8i)(magnitude < 0x38800000u), denormal, half);
    const v8u special = 0x7c00u + ((v8u)(magnitude > 0x7f800000u) & 0x200u);  // inf, or a quiet nan
    half = select((v8i)(magnitude >= 0x47800000u), special, half);
    return __builtin_convertvector(half | ((bits >> 16) & 0x8000u), v8h);
}

// --- load8 / store8: eight elements of a pool to and from float lanes ------------------------------------

KVIRE_INLINE v8f load8(const float* from) { return load_bits<v8f>(from); }
KVIRE_INLINE void store8(float* to, v8f value) { store_bits(to, value); }

KVIRE_INLINE v8f load8(const bf16* from) {
#if defined(__AVX2__)
    return (v8f)((v8u)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)) << 16);
#else
    return (v8f)(__builtin_convertvector(load_bits<v8h>(from), v8u) << 16);
#endif
}

KVIRE_INLINE void store8(bf16* to, v8f value) {
    const v8u bits = (v8u)value;
    v8u rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = select((v8i)((bits & 0x7fffffffu) > 0x7f800000u), v8u{} + 0x7fc0u, rounded);
    store_bits(to, __builtin_convertvector(rounded, v8h));
}

KVIRE_INLINE v8f load8(const f16* from) {
#if defined(__F16C__)
    return (v8f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#elif defined(__aarch64__)
    const uint16x8_t bits = vld1q_u16((const uint16_t*)from);
    const float32x4_t low = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(bits)));
    const float32x4_t high = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(bits)));
    v8f lanes;
    memcpy(&lanes, &low, sizeof low);
    memcpy((char*)&lanes + sizeof low, &high, sizeof high);
    return lanes;
#else
    return widen_f16_bits(load_bits<v8h>(from));
#endif
}

KVIRE_INLINE void store8(f16* to, v8f value) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    store_bits(to, narrow_f16_bits(value));
#endif
}

KVIRE_INLINE v8f load8(const int8_t* from) {
#if defined(__AVX2__)
    return (v8f)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_bits<v8c>(from), v8i), v8f);
#endif
}

// From -127 to 127; rounds to nearest, ties to even.
KVIRE_INLINE void store8(int8_t* to, v8f value) {
    store_bits(to, __builtin_convertvector((v8i)(value + broadcast(kShifter)), v8c));
}

// First `count` < 8 elements; the other lanes are zero.
template <class E>
KVIRE_INLINE v8f load_part(const E* from, int64_t count) {
    E buffer[8] = {};
    memcpy(buffer, from, (size_t)count * sizeof(E));
    return load8(buffer);
}

template <class E>
KVIRE_INLINE void store_part(E* to, v8f value, int64_t count) {
    E buffer[8];
    store8(buffer, value);
    memcpy(to, buffer, (size_t)count * sizeof(E));
}

template <class E>
KVIRE_INLINE void store_some(E* to, v8f value, int64_t count) {
    if (count == 8) store8(to, value);
    else store_part(to, value, count);
}

// f(first column, eight floats, how many of them count)
template <class E, class F>
KVIRE_INLINE void each_vector(const E* row, int64_t width, F f) {
    int64_t d = 0;
    for (; d + 8 <= width; d += 8) f(d, load8(row + d), 8);
    if (d < width) f(d, load_part(row + d, width - d), width - d);
}

// --- sums and functions ---------------------------------------------------------------------------------

// Lane i is the sum of all lanes of the i-th argument.
KVIRE_INLINE v4f sums(v8f a, v8f b, v8f c, v8f d) {
    const v8f ab = KVIRE_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + KVIRE_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const v8f cd = KVIRE_SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + KVIRE_SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const v8f abcd =
        KVIRE_SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + KVIRE_SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    v4f half[2];
    memcpy(half, &abcd, sizeof abcd);
    return half[0] + half[1];
}

// The same additions in the same order, so that a token's score does not depend on its neighbours.
KVIRE_INLINE float sum(v8f a) { return sums(a, a, a, a)[0]; }

KVIRE_INLINE float largest(v8f a) {
    float best = a[0];
    for (int i = 1; i < 8; ++i) best = a[i] > best ? a[i] : best;
    return best;
}

// e^x for x <= 88; exactly 0 below -87.3 and for -inf. Reduced to |r| <= ln(2)/2, then the Taylor series up
// to r^7: its remainder, 5e-9, is below half a unit in the last place.
KVIRE_INLINE v8f exponential(v8f x) {
    const v8f shifter = broadcast(kShifter);
    const v8f shifted = x * broadcast(1.44269504f) + shifter;
    const v8f n = shifted - shifter;
    const v8f r = (x - n * broadcast(0.693359375f)) - n * broadcast(-2.12194440e-4f);
    v8f series = broadcast(1.0f / 5040);
    series = series * r + broadcast(1.0f / 720);
    series = series * r + broadcast(1.0f / 120);
    series = series * r + broadcast(1.0f / 24);
    series = series * r + broadcast(1.0f / 6);
    series = series * r + broadcast(0.5f);
    series = series * r + broadcast(1.0f);
    series = series * r + broadcast(1.0f);
    const v8f power = (v8f)(((v8u)shifted << 23) + 0x3f800000u);
    return (v8f)((v8i)(series * power) & ~(x < broadcast(-87.3f)));
}

// tanh x: series up to x^9 near 0, where 1 - 2 / (e^2x + 1) would cancel, that formula elsewhere.
KVIRE_INLINE v8f hyperbolic_tangent(v8f x) {
    const v8f limit = broadcast(10.0f);  // tanh(10) is 1 in float
    const v8f clamped = select(x > limit, limit, select(x < -limit, -limit, x));
    const v8f far = broadcast(1.0f) - broadcast(2.0f) / (exponential(clamped + clamped) + broadcast(1.0f));
    const v8f square = x * x;
    v8f near = broadcast(62.0f / 2835);
    near = near * square - broadcast(17.0f / 315);
    near = near * square + broadcast(2.0f / 15);
    near = near * square - broadcast(1.0f / 3);
    near = near * square * x + x;
    return select((x < broadcast(0.25f)) & (x > broadcast(-0.25f)), near, far);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
