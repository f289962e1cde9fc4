// Products with weights whose scales are integers, in spans of 256 inputs that share a factor.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "dots.h"
#include "tiles.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {
namespace {

// A factor of eleven bits times a scale of six: exact.
KVIRE_STEP_INLINE F16x times(F16x factor, const uint8_t* scales) { return factor * to_float(load_u8(scales)); }

template <Form F, int R>
KVIRE_STEP_INLINE void span_with_minima(const LinearTile& tile, const uint8_t* span, int64_t first,
                                        const int8_t* (&q)[R], F16x (&y)[R]) {
    constexpr Layout layout = layout_of(F);
    const F16x d = load_f16((const uint16_t*)span), least = negative(load_f16((const uint16_t*)(span + 32)));
    const uint8_t* group = span + layout.span_head_bytes;
    for (int64_t g = first; g < first + layout.span_groups; ++g, group += layout.group_bytes) {
        if (R <= 2)
            for (int64_t at = 0; at < layout.group_bytes; at += 64) __builtin_prefetch(group + 2560 + at);
        I16x acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = integers(0);
        add_codes<F, 0, 8>(group, q, acc);
        const F16x scale = times(d, group + code_bytes<F>), minimum = times(least, group + code_bytes<F> + kOutputs);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            y[r] = fma(to_float(acc[r]) * broadcast(tile.scale[r][g]), scale, y[r]);
            y[r] = fma(minimum, broadcast(tile.scaled_sum[r][g]), y[r]);
            q[r] += kGroup;
        }
    }
}

// A scale for each half of a group: their sum is below 2^24, and so exact as a float.
template <int R>
KVIRE_STEP_INLINE void span_of_halves(const LinearTile& tile, const uint8_t* span, int64_t first,
                                      const int8_t* (&q)[R], F16x (&y)[R]) {
    constexpr Form F = Form::q6_k;
    constexpr Layout layout = layout_of(F);
    const F16x d = load_f16((const uint16_t*)span);
    const uint8_t* group = span + layout.span_head_bytes;
    for (int64_t g = first; g < first + layout.span_groups; ++g, group += layout.group_bytes) {
        if (R <= 2)
            for (int64_t at = 0; at < layout.group_bytes; at += 64) __builtin_prefetch(group + 2560 + at);
        const I16x first_scale = load_s8((const int8_t*)group + code_bytes<F>);
        const I16x second_scale = load_s8((const int8_t*)group + code_bytes<F> + kOutputs);
        I16x both[R], acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] = integers(-subtracted<F> * tile.sums[r][2 * g]);
        add_codes<F, 0, 4>(group, q, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            both[r] = acc[r] * first_scale;
            acc[r] = integers(-subtracted<F> * tile.sums[r][2 * g + 1]);
        }
        add_codes<F, 4, 4>(group, q, acc);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16x dot = to_float(both[r] + acc[r] * second_scale);
            y[r] = fma(dot * broadcast(tile.scale[r][g]), d, y[r]);
            q[r] += kGroup;
        }
    }
}

template <Form F, int R>
KVIRE_STEP_INLINE void k_tile(const LinearTile& tile) {
    constexpr Layout layout = layout_of(F);
    F16x y[R];
    const int8_t* q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        y[r] = zeros();
        q[r] = tile.q[r];
    }
    const uint8_t* span = tile.block;
    for (int64_t g = 0; g < tile.groups; g += layout.span_groups) {
        if constexpr (F == Form::q6_k) span_of_halves<R>(tile, span, g, q, y);
        else span_with_minima<F, R>(tile, span, g, q, y);
        span += layout.span_head_bytes + layout.span_groups * layout.group_bytes;
    }
    for (int r = 0; r < R; ++r) finish(tile, r, y[r]);
}

template <Form F>
KVIRE_STEP_INLINE void k_quant(const LinearTile& tile) {
    with_rows(tile.rows, [&](auto rows) { k_tile<F, decltype(rows)::count>(tile); });
}

}  // namespace

void tile_k_quants(const LinearTile& tile) {
    switch (tile.form) {
        case Form::q4_k: return k_quant<Form::q4_k>(tile);
        case Form::q5_k: return k_quant<Form::q5_k>(tile);
        case Form::q6_k: return k_quant<Form::q6_k>(tile);
        default: return;
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
