// The tile of a form whose groups have a scale of their own, and perhaps a minimum.
#pragma once

#include "dots.h"
#include "tiles.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

template <Form F>
KVIRE_STEP_INLINE F16x scales_of_group(const uint8_t* scales) {
    if constexpr (F == Form::mxfp4) {  // half of 2^(e - 127), denormal below 2
        float each[16];
        for (int i = 0; i < 16; ++i) {
            const uint32_t e = scales[i], bits = e < 2 ? 0x00200000u << e : (e - 1) << 23;
            memcpy(each + i, &bits, sizeof bits);
        }
        return load(each);
    }
    return load_f16((const uint16_t*)scales);
}

template <Form F, bool HasMinimum, int R>
KVIRE_STEP_INLINE void scaled_tile(const LinearTile& tile) {
    constexpr int64_t group_bytes = layout_of(F).group_bytes;
    F16x y[R];
    const int8_t* q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        y[r] = zeros();
        q[r] = tile.q[r];
    }
    const uint8_t* group = tile.block;
    for (int64_t g = 0; g < tile.groups; ++g, group += group_bytes) {
        if (R <= 2)
            for (int64_t at = 0; at < group_bytes; at += 64) __builtin_prefetch(group + 2560 + at);
        I16x acc[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            acc[r] = integers(subtracted<F> ? -subtracted<F> * (tile.sums[r][2 * g] + tile.sums[r][2 * g + 1]) : 0);
        add_codes<F, 0, 8>(group, q, acc);
        const F16x d = scales_of_group<F>(group + code_bytes<F>);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            y[r] = fma(to_float(acc[r]) * broadcast(tile.scale[r][g]), d, y[r]);
            if constexpr (HasMinimum) {
                const F16x m = load_f16((const uint16_t*)(group + code_bytes<F> + 32));
                y[r] = fma(m, broadcast(tile.scaled_sum[r][g]), y[r]);
            }
            q[r] += kGroup;
        }
    }
    for (int r = 0; r < R; ++r) finish(tile, r, y[r]);
}

template <Form F, bool HasMinimum>
KVIRE_STEP_INLINE void scaled(const LinearTile& tile) {
    with_rows(tile.rows, [&](auto rows) { scaled_tile<F, HasMinimum, decltype(rows)::count>(tile); });
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
