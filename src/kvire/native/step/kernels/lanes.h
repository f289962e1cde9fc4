// Sixteen float lanes, whatever the processor: one zmm, two ymm, four NEON registers, or plain C.
//
// Every function gives the same bits in every one of them: each is a chain of single IEEE operations in a stated
// order, a fused multiply-add is one only where `fma` says so, and these files are compiled with -ffp-contract=off.
// The results of the native step therefore do not depend on the processor (docs/adr/0019-one-arithmetic.md).
//
// Compiled once per instruction set, into a namespace of its own; simd.h says what must not be used here.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define KVIRE_STEP_INLINE static inline __attribute__((always_inline))
#define KVIRE_STEP_INLINE_MEMBER inline __attribute__((always_inline))

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

constexpr int64_t kLanes = 16;

// --- one vector ------------------------------------------------------------------------------------------

#if defined(__AVX512F__)

struct F16x { __m512 v; };  // sixteen floats
struct I16x { __m512i v; };  // sixteen int32

KVIRE_STEP_INLINE F16x broadcast(float x) { return {_mm512_set1_ps(x)}; }
KVIRE_STEP_INLINE F16x load(const float* from) { return {_mm512_loadu_ps(from)}; }
KVIRE_STEP_INLINE void store(float* to, F16x a) { _mm512_storeu_ps(to, a.v); }
KVIRE_STEP_INLINE F16x operator+(F16x a, F16x b) { return {_mm512_add_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x operator-(F16x a, F16x b) { return {_mm512_sub_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x operator*(F16x a, F16x b) { return {_mm512_mul_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x operator/(F16x a, F16x b) { return {_mm512_div_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x fma(F16x a, F16x b, F16x c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c
KVIRE_STEP_INLINE F16x larger(F16x a, F16x b) { return {_mm512_max_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x smaller(F16x a, F16x b) { return {_mm512_min_ps(a.v, b.v)}; }
KVIRE_STEP_INLINE F16x root(F16x a) { return {_mm512_sqrt_ps(a.v)}; }
// yes where a < b, else no
KVIRE_STEP_INLINE F16x where_less(F16x a, F16x b, F16x yes, F16x no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
KVIRE_STEP_INLINE I16x bits_of(F16x a) { return {_mm512_castps_si512(a.v)}; }
KVIRE_STEP_INLINE F16x floats_of_bits(I16x a) { return {_mm512_castsi512_ps(a.v)}; }
KVIRE_STEP_INLINE F16x to_float(I16x a) { return {_mm512_cvtepi32_ps(a.v)}; }
KVIRE_STEP_INLINE I16x to_nearest(F16x a) { return {_mm512_cvtps_epi32(a.v)}; }  // ties to even
KVIRE_STEP_INLINE I16x integers(int32_t x) { return {_mm512_set1_epi32(x)}; }
KVIRE_STEP_INLINE I16x operator+(I16x a, I16x b) { return {_mm512_add_epi32(a.v, b.v)}; }
KVIRE_STEP_INLINE I16x operator*(I16x a, I16x b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int Bits>
KVIRE_STEP_INLINE I16x shift_left(I16x a) { return {_mm512_slli_epi32(a.v, Bits)}; }
KVIRE_STEP_INLINE F16x load_f16(const uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from))};
}
KVIRE_STEP_INLINE void store_f16(uint16_t* to, F16x a) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
KVIRE_STEP_INLINE F16x load_bf16(const uint16_t* from) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16))};
}
KVIRE_STEP_INLINE I16x load_u8(const uint8_t* from) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from))};
}
KVIRE_STEP_INLINE I16x load_s8(const int8_t* from) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from))};
}

#elif defined(__AVX2__)

struct F16x { __m256 low, high; };
struct I16x { __m256i low, high; };

KVIRE_STEP_INLINE F16x broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
KVIRE_STEP_INLINE F16x load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
KVIRE_STEP_INLINE void store(float* to, F16x a) { _mm256_storeu_ps(to, a.low); _mm256_storeu_ps(to + 8, a.high); }
KVIRE_STEP_INLINE F16x operator+(F16x a, F16x b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x operator-(F16x a, F16x b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x operator*(F16x a, F16x b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x operator/(F16x a, F16x b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x fma(F16x a, F16x b, F16x c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
KVIRE_STEP_INLINE F16x larger(F16x a, F16x b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x smaller(F16x a, F16x b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
KVIRE_STEP_INLINE F16x root(F16x a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
KVIRE_STEP_INLINE F16x where_less(F16x a, F16x b, F16x yes, F16x no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
KVIRE_STEP_INLINE I16x bits_of(F16x a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
KVIRE_STEP_INLINE F16x floats_of_bits(I16x a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
KVIRE_STEP_INLINE F16x to_float(I16x a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
KVIRE_STEP_INLINE I16x to_nearest(F16x a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
KVIRE_STEP_INLINE I16x integers(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
KVIRE_STEP_INLINE I16x operator+(I16x a, I16x b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
KVIRE_STEP_INLINE I16x operator*(I16x a, I16x b) {
    return {_mm256_mullo_epi32(a.low, b.low), _mm256_mullo_epi32(a.high, b.high)};
}
template <int Bits>
KVIRE_STEP_INLINE I16x shift_left(I16x a) { return {_mm256_slli_epi32(a.low, Bits), _mm256_slli_epi32(a.high, Bits)}; }
KVIRE_STEP_INLINE F16x load_f16(const uint16_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
}
KVIRE_STEP_INLINE void store_f16(uint16_t* to, F16x a) {
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(to + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}
KVIRE_STEP_INLINE F16x load_bf16(const uint16_t* from) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 8)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
}
KVIRE_STEP_INLINE I16x load_u8(const uint8_t* from) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))};
}
KVIRE_STEP_INLINE I16x load_s8(const int8_t* from) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8)))};
}

#else  // NEON through the compiler, or plain C: slow without a fused multiply-add, but the same bits

struct F16x { float lane[16]; };
struct I16x { int32_t lane[16]; };

#define KVIRE_EACH_LANE for (int i = 0; i < 16; ++i)
KVIRE_STEP_INLINE F16x broadcast(float x) { F16x r; KVIRE_EACH_LANE r.lane[i] = x; return r; }
KVIRE_STEP_INLINE F16x load(const float* from) { F16x r; memcpy(&r, from, sizeof r); return r; }
KVIRE_STEP_INLINE void store(float* to, F16x a) { memcpy(to, &a, sizeof a); }
KVIRE_STEP_INLINE F16x operator+(F16x a, F16x b) { KVIRE_EACH_LANE a.lane[i] += b.lane[i]; return a; }
KVIRE_STEP_INLINE F16x operator-(F16x a, F16x b) { KVIRE_EACH_LANE a.lane[i] -= b.lane[i]; return a; }
KVIRE_STEP_INLINE F16x operator*(F16x a, F16x b) { KVIRE_EACH_LANE a.lane[i] *= b.lane[i]; return a; }
KVIRE_STEP_INLINE F16x operator/(F16x a, F16x b) { KVIRE_EACH_LANE a.lane[i] /= b.lane[i]; return a; }
KVIRE_STEP_INLINE F16x fma(F16x a, F16x b, F16x c) {
    KVIRE_EACH_LANE c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
KVIRE_STEP_INLINE F16x larger(F16x a, F16x b) {
    KVIRE_EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
KVIRE_STEP_INLINE F16x smaller(F16x a, F16x b) {
    KVIRE_EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
KVIRE_STEP_INLINE F16x root(F16x a) { KVIRE_EACH_LANE a.lane[i] = __builtin_sqrtf(a.lane[i]); return a; }
KVIRE_STEP_INLINE F16x where_less(F16x a, F16x b, F16x yes, F16x no) {
    KVIRE_EACH_LANE no.lane[i] = a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i];
    return no;
}
KVIRE_STEP_INLINE I16x bits_of(F16x a) { I16x r; memcpy(&r, &a, sizeof r); return r; }
KVIRE_STEP_INLINE F16x floats_of_bits(I16x a) { F16x r; memcpy(&r, &a, sizeof r); return r; }
KVIRE_STEP_INLINE F16x to_float(I16x a) { F16x r; KVIRE_EACH_LANE r.lane[i] = (float)a.lane[i]; return r; }
KVIRE_STEP_INLINE I16x to_nearest(F16x a) {
    I16x r;
    KVIRE_EACH_LANE r.lane[i] = (int32_t)__builtin_rintf(a.lane[i]);
    return r;
}
KVIRE_STEP_INLINE I16x integers(int32_t x) { I16x r; KVIRE_EACH_LANE r.lane[i] = x; return r; }
KVIRE_STEP_INLINE I16x operator+(I16x a, I16x b) { KVIRE_EACH_LANE a.lane[i] += b.lane[i]; return a; }
KVIRE_STEP_INLINE I16x operator*(I16x a, I16x b) { KVIRE_EACH_LANE a.lane[i] *= b.lane[i]; return a; }
template <int Bits>
KVIRE_STEP_INLINE I16x shift_left(I16x a) {
    KVIRE_EACH_LANE a.lane[i] = (int32_t)((uint32_t)a.lane[i] << Bits);
    return a;
}
// IEEE half, by its definition: see widen_f16_bits and narrow_f16_bits of simd.h.
KVIRE_STEP_INLINE float widened(uint16_t half) {
    const uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13, exponent = magnitude & (0x7c00u << 13);
    uint32_t bits = magnitude + ((127u - 15u) << 23);
    if (exponent == (0x7c00u << 13)) bits += (128u - 16u) << 23;
    float value;
    if (exponent == 0) {
        bits += 1u << 23;
        memcpy(&value, &bits, sizeof value);
        value -= 6.103515625e-05f;
        memcpy(&bits, &value, sizeof bits);
    }
    bits |= (uint32_t)(half & 0x8000u) << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}
KVIRE_STEP_INLINE uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        float small;
        memcpy(&small, &magnitude, sizeof small);
        small += 0.5f;
        uint32_t rounded;
        memcpy(&rounded, &small, sizeof rounded);
        return (uint16_t)(sign | (rounded - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
KVIRE_STEP_INLINE F16x load_f16(const uint16_t* from) {
    F16x r;
    KVIRE_EACH_LANE r.lane[i] = widened(from[i]);
    return r;
}
KVIRE_STEP_INLINE void store_f16(uint16_t* to, F16x a) { KVIRE_EACH_LANE to[i] = narrowed(a.lane[i]); }
KVIRE_STEP_INLINE F16x load_bf16(const uint16_t* from) {
    I16x r;
    KVIRE_EACH_LANE r.lane[i] = (int32_t)((uint32_t)from[i] << 16);
    return floats_of_bits(r);
}
KVIRE_STEP_INLINE I16x load_u8(const uint8_t* from) { I16x r; KVIRE_EACH_LANE r.lane[i] = from[i]; return r; }
KVIRE_STEP_INLINE I16x load_s8(const int8_t* from) { I16x r; KVIRE_EACH_LANE r.lane[i] = from[i]; return r; }
#undef KVIRE_EACH_LANE

#endif

// --- the same everywhere ---------------------------------------------------------------------------------

KVIRE_STEP_INLINE F16x zeros() { return broadcast(0.0f); }
KVIRE_STEP_INLINE F16x negative(F16x a) { return broadcast(-0.0f) - a; }

// The first `count` <= 16 floats; the other lanes are `rest`.
KVIRE_STEP_INLINE F16x load_part(const float* from, int64_t count, float rest = 0.0f) {
    float buffer[16];
    for (int64_t i = 0; i < 16; ++i) buffer[i] = i < count ? from[i] : rest;
    return load(buffer);
}

KVIRE_STEP_INLINE void store_part(float* to, F16x a, int64_t count) {
    float buffer[16];
    store(buffer, a);
    memcpy(to, buffer, (size_t)count * sizeof(float));
}

// bf16, rounded to nearest even; a nan stays one.
KVIRE_STEP_INLINE void store_bf16(uint16_t* to, F16x a) {
    float values[16];
    store(values, a);
    for (int i = 0; i < 16; ++i) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        to[i] = (bits & 0x7fffffffu) > 0x7f800000u ? (uint16_t)0x7fc0u
                                                   : (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    }
}

// --- across lanes ----------------------------------------------------------------------------------------

#if defined(__AVX2__)
KVIRE_STEP_INLINE __m256 low_half(F16x a) {
#if defined(__AVX512F__)
    return _mm512_castps512_ps256(a.v);
#else
    return a.low;
#endif
}
KVIRE_STEP_INLINE __m256 high_half(F16x a) {
#if defined(__AVX512F__)
    return _mm512_extractf32x8_ps(a.v, 1);
#else
    return a.high;
#endif
}
#endif

// Lanes 0..15 added as a tree: 8 apart, then 4, 2, 1.
KVIRE_STEP_INLINE float sum(F16x a) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_add_ps(low_half(a), high_half(a));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float lane[16];
    store(lane, a);
    for (int apart = 8; apart > 0; apart /= 2)
        for (int i = 0; i < apart; ++i) lane[i] += lane[i + apart];
    return lane[0];
#endif
}

// Not for nans.
KVIRE_STEP_INLINE float largest(F16x a) {
#if defined(__AVX2__)
    const __m256 eight = _mm256_max_ps(low_half(a), high_half(a));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float lane[16];
    store(lane, a);
    for (int apart = 8; apart > 0; apart /= 2)
        for (int i = 0; i < apart; ++i) lane[i] = lane[i] > lane[i + apart] ? lane[i] : lane[i + apart];
    return lane[0];
#endif
}

// Of integers whose sum fits.
KVIRE_STEP_INLINE int32_t sum(I16x a) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(a.v);
#elif defined(__AVX2__)
    const __m256i eight = _mm256_add_epi32(a.low, a.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#else
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += a.lane[i];
    return total;
#endif
}

// Of integers from -128 to 127.
KVIRE_STEP_INLINE void store_s8(int8_t* to, I16x a) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8(a.v));
#elif defined(__AVX2__)
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.low, a.high), 0xd8);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#else
    for (int i = 0; i < 16; ++i) to[i] = (int8_t)a.lane[i];
#endif
}

// e^x for x <= 88; exactly 0 below -87.3 and for -inf; a nan stays one. Reduced to |r| <= ln(2)/2, then the Taylor
// series up to r^7: its remainder, 5e-9, is below half a unit in the last place.
KVIRE_STEP_INLINE F16x exponential(F16x x) {
    const F16x shifter = broadcast(12582912.0f);  // 1.5 * 2^23: the sum's low bits hold the nearest integer
    const F16x shifted = fma(x, broadcast(1.44269504f), shifter);
    const F16x n = shifted - shifter;
    const F16x r = fma(n, broadcast(2.12194440e-4f), fma(n, broadcast(-0.693359375f), x));
    F16x series = broadcast(1.0f / 5040);
    series = fma(series, r, broadcast(1.0f / 720));
    series = fma(series, r, broadcast(1.0f / 120));
    series = fma(series, r, broadcast(1.0f / 24));
    series = fma(series, r, broadcast(1.0f / 6));
    series = fma(series, r, broadcast(0.5f));
    series = fma(series, r, broadcast(1.0f));
    series = fma(series, r, broadcast(1.0f));
    const F16x power = floats_of_bits(shift_left<23>(bits_of(shifted)) + integers(0x3f800000));
    return where_less(x, broadcast(-87.3f), zeros(), series * power);
}

// tanh x: series up to x^9 near 0, where 1 - 2 / (e^2x + 1) would cancel, that formula elsewhere.
KVIRE_STEP_INLINE F16x hyperbolic_tangent(F16x x) {
    const F16x limit = broadcast(10.0f), one = broadcast(1.0f);  // tanh(10) is 1 in float
    // By comparisons, which leave a nan alone.
    const F16x clamped = where_less(limit, x, limit, where_less(x, negative(limit), negative(limit), x));
    const F16x far = one - broadcast(2.0f) / (exponential(clamped + clamped) + one);
    const F16x square = x * x;
    F16x near = broadcast(62.0f / 2835);
    near = fma(near, square, broadcast(-17.0f / 315));
    near = fma(near, square, broadcast(2.0f / 15));
    near = fma(near, square, broadcast(-1.0f / 3));
    near = fma(near * square, x, x);
    return where_less(square, broadcast(0.0625f), near, far);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
