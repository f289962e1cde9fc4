// The exact integer sums of a group: sixteen outputs by R rows, 32 inputs. Integer sums have no order, so each
// processor takes its fastest way.
//
// VNNI adds four products of an unsigned and a signed byte to an int32. AVX2 adds two of them to an int16, of which
// as many are added as cannot overflow; weights of eight bits go one by one, the sign moved to the other factor.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#pragma once

#include "../weights.h"
#include "lanes.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

// zero: subtracted from every code. most: largest code, which bounds the int16 sums of AVX2.
template <Form F>
struct Codes;
template <> struct Codes<Form::q8_0> { static constexpr int bits = 8, zero = 128, most = 255; };
template <> struct Codes<Form::q4_0> { static constexpr int bits = 4, zero = 8, most = 15; };
template <> struct Codes<Form::q4_1> { static constexpr int bits = 4, zero = 0, most = 15; };
template <> struct Codes<Form::q5_0> { static constexpr int bits = 5, zero = 16, most = 31; };
template <> struct Codes<Form::q5_1> { static constexpr int bits = 5, zero = 0, most = 31; };
template <> struct Codes<Form::q4_k> { static constexpr int bits = 4, zero = 0, most = 15; };
template <> struct Codes<Form::q5_k> { static constexpr int bits = 5, zero = 0, most = 31; };
template <> struct Codes<Form::q6_k> { static constexpr int bits = 6, zero = 32, most = 63; };
template <> struct Codes<Form::iq4_nl> { static constexpr int bits = 4, zero = 128, most = 255; };
template <> struct Codes<Form::mxfp4> { static constexpr int bits = 4, zero = 12, most = 24; };

template <Form F>
constexpr int64_t code_bytes = Codes<F>::bits * 64;

// What the four bits of a form with a table stand for, plus its zero.
constexpr uint8_t kIq4Table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kMxTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <Form F>
constexpr const uint8_t* table() {
    return F == Form::iq4_nl ? kIq4Table : F == Form::mxfp4 ? kMxTable : nullptr;
}

KVIRE_STEP_INLINE int32_t four_bytes(const int8_t* from) {
    int32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

#if defined(__AVX512F__)

// Chunk `chunk` of a group: 64 codes, those of one output side by side.
template <Form F>
KVIRE_STEP_INLINE __m512i chunk_codes(const uint8_t* group, int chunk) {
    constexpr int bits = Codes<F>::bits;
    if constexpr (bits == 8) return _mm512_loadu_si512(group + chunk * 64);
    const __m512i run = _mm512_loadu_si512(group + chunk / 2 * 64), low = _mm512_set1_epi8(15);
    __m512i codes = _mm512_and_si512(chunk % 2 ? _mm512_srli_epi16(run, 4) : run, low);
    if constexpr (table<F>() != nullptr) {
        const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table<F>()));
        codes = _mm512_shuffle_epi8(values, codes);
    }
    if constexpr (bits == 5) {
        const __m512i fifth = _mm512_loadu_si512(group + 256);
        const __m512i moved = chunk < 4 ? _mm512_slli_epi16(fifth, 4 - chunk) : _mm512_srli_epi16(fifth, chunk - 4);
        codes = _mm512_or_si512(codes, _mm512_and_si512(moved, _mm512_set1_epi8(16)));
    }
    if constexpr (bits == 6) {
        const __m512i upper = _mm512_loadu_si512(group + 256 + chunk / 4 * 64);
        const int at = chunk % 4 * 2;
        const __m512i moved = at < 4 ? _mm512_slli_epi16(upper, 4 - at) : _mm512_srli_epi16(upper, at - 4);
        codes = _mm512_or_si512(codes, _mm512_and_si512(moved, _mm512_set1_epi8(48)));
    }
    return codes;
}

// acc[r] += the sums of chunks First .. First + Count - 1.
template <Form F, int First, int Count, int R>
KVIRE_STEP_INLINE void add_codes(const uint8_t* group, const int8_t* const* q, I16x (&acc)[R]) {
#pragma GCC unroll 8
    for (int chunk = First; chunk < First + Count; ++chunk) {
        const __m512i codes = chunk_codes<F>(group, chunk);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            acc[r].v = _mm512_dpbusd_epi32(acc[r].v, codes, _mm512_set1_epi32(four_bytes(q[r] + 4 * chunk)));
    }
}

template <Form F>
constexpr int subtracted = Codes<F>::zero;

#elif defined(__AVX2__)

// GCC 12 otherwise computes all products first, and moves a hundred registers to the stack.
#define KVIRE_KEEP_ORDER(x) asm volatile("" : "+x"(x))

// Codes above 127 stand for themselves less their zero, as signed bytes.
template <Form F>
constexpr bool is_signed = Codes<F>::most > 127;
template <Form F>
constexpr int subtracted = is_signed<F> ? 0 : Codes<F>::zero;

// Chunks whose sums of two products fit an int16 together.
template <Form F>
constexpr int wide_after = is_signed<F> ? 1 : 32767 / (2 * 127 * Codes<F>::most) >= 8   ? 8
                                          : 32767 / (2 * 127 * Codes<F>::most) >= 4 ? 4
                                                                                    : 2;

// Half of a chunk: 32 codes, of eight outputs. half: 0 or 1.
template <Form F>
KVIRE_STEP_INLINE __m256i chunk_codes(const uint8_t* group, int chunk, int half) {
    constexpr int bits = Codes<F>::bits;
    const auto run = [&](int index) __attribute__((always_inline)) {
        return _mm256_loadu_si256((const __m256i*)(group + index * 64 + half * 32));
    };
    if constexpr (bits == 8) return _mm256_xor_si256(run(chunk), _mm256_set1_epi8((char)0x80));
    const __m256i low = _mm256_set1_epi8(15), from = run(chunk / 2);
    __m256i codes = _mm256_and_si256(chunk % 2 ? _mm256_srli_epi16(from, 4) : from, low);
    if constexpr (table<F>() != nullptr) {
        __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table<F>()));
        if constexpr (is_signed<F>) values = _mm256_xor_si256(values, _mm256_set1_epi8((char)0x80));
        codes = _mm256_shuffle_epi8(values, codes);
    }
    if constexpr (bits == 5) {
        const __m256i fifth = run(4);
        const __m256i moved = chunk < 4 ? _mm256_slli_epi16(fifth, 4 - chunk) : _mm256_srli_epi16(fifth, chunk - 4);
        codes = _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
    }
    if constexpr (bits == 6) {
        const __m256i upper = run(4 + chunk / 4);
        const int at = chunk % 4 * 2;
        const __m256i moved = at < 4 ? _mm256_slli_epi16(upper, 4 - at) : _mm256_srli_epi16(upper, at - 4);
        codes = _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8(48)));
    }
    return codes;
}

template <Form F>
KVIRE_STEP_INLINE __m256i products(__m256i codes, __m256i row) {
    if constexpr (is_signed<F>) return _mm256_maddubs_epi16(_mm256_sign_epi8(codes, codes), _mm256_sign_epi8(row, codes));
    return _mm256_maddubs_epi16(codes, row);
}

template <Form F, int First, int Count, int R>
KVIRE_STEP_INLINE void add_codes(const uint8_t* group, const int8_t* const* q, I16x (&acc)[R]) {
    constexpr int step = wide_after<F> < Count ? wide_after<F> : Count;
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int begin = First; begin < First + Count; begin += step) {
        __m256i low[R], high[R];
#pragma GCC unroll 8
        for (int chunk = begin; chunk < begin + step; ++chunk) {
            const __m256i low_codes = chunk_codes<F>(group, chunk, 0), high_codes = chunk_codes<F>(group, chunk, 1);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const __m256i row = _mm256_set1_epi32(four_bytes(q[r] + 4 * chunk));
                const __m256i a = products<F>(low_codes, row), b = products<F>(high_codes, row);
                low[r] = chunk == begin ? a : _mm256_add_epi16(low[r], a);
                high[r] = chunk == begin ? b : _mm256_add_epi16(high[r], b);
                KVIRE_KEEP_ORDER(low[r]);
                KVIRE_KEEP_ORDER(high[r]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            acc[r].low = _mm256_add_epi32(acc[r].low, _mm256_madd_epi16(low[r], ones));
            acc[r].high = _mm256_add_epi32(acc[r].high, _mm256_madd_epi16(high[r], ones));
        }
    }
}

#else

template <Form F>
constexpr int subtracted = Codes<F>::zero;

template <Form F>
KVIRE_STEP_INLINE int code_of(const uint8_t* group, int chunk, int at) {
    constexpr int bits = Codes<F>::bits;
    if (bits == 8) return group[chunk * 64 + at];
    int code = (group[chunk / 2 * 64 + at] >> chunk % 2 * 4) & 15;
    if (table<F>() != nullptr) code = table<F>()[code];
    if (bits == 5) code |= ((group[256 + at] >> chunk) & 1) << 4;
    if (bits == 6) code |= ((group[256 + chunk / 4 * 64 + at] >> chunk % 4 * 2) & 3) << 4;
    return code;
}

template <Form F, int First, int Count, int R>
KVIRE_STEP_INLINE void add_codes(const uint8_t* group, const int8_t* const* q, I16x (&acc)[R]) {
    for (int chunk = First; chunk < First + Count; ++chunk)
        for (int output = 0; output < 16; ++output)
            for (int j = 0; j < 4; ++j) {
                const int code = code_of<F>(group, chunk, 4 * output + j);
                for (int r = 0; r < R; ++r) acc[r].lane[output] += code * q[r][4 * chunk + j];
            }
}

#endif

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
