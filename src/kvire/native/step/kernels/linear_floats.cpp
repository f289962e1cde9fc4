// Products with weights that are floats, and the table of this instruction set's kernels.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "tiles.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {
namespace {

template <Form F>
KVIRE_STEP_INLINE F16x weights_at(const uint8_t* block, int64_t input) {
    if constexpr (F == Form::f32) return load((const float*)block + input * kOutputs);
    const uint16_t* const halves = (const uint16_t*)block + input * kOutputs;
    if constexpr (F == Form::f16) return load_f16(halves);
    return load_bf16(halves);
}

// One chain for each output, inputs ascending.
template <Form F, int R>
KVIRE_STEP_INLINE void float_tile(const LinearTile& tile) {
    F16x y[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) y[r] = zeros();
    for (int64_t k = 0; k < tile.width; ++k) {
        if (R <= 2) __builtin_prefetch(tile.block + k * layout_of(F).source_bytes * kOutputs + 4096);
        const F16x w = weights_at<F>(tile.block, k);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) y[r] = fma(broadcast(tile.x[r][k]), w, y[r]);
    }
    for (int r = 0; r < R; ++r) finish(tile, r, y[r]);
}

template <Form F>
KVIRE_STEP_INLINE void floats(const LinearTile& tile) {
    with_rows(tile.rows, [&](auto rows) { float_tile<F, decltype(rows)::count>(tile); });
}

void tile_of_any_form(const LinearTile& tile) {
    switch (tile.form) {
        case Form::f32:
        case Form::f16:
        case Form::bf16: return tile_floats(tile);
        case Form::q4_0:
        case Form::q4_1:
        case Form::iq4_nl:
        case Form::mxfp4: return tile_4_bits(tile);
        case Form::q4_k:
        case Form::q5_k:
        case Form::q6_k: return tile_k_quants(tile);
        case Form::q5_0:
        case Form::q5_1:
        case Form::q8_0: return tile_5_and_8_bits(tile);
    }
}

}  // namespace

void tile_floats(const LinearTile& tile) {
    switch (tile.form) {
        case Form::f32: return floats<Form::f32>(tile);
        case Form::f16: return floats<Form::f16>(tile);
        case Form::bf16: return floats<Form::bf16>(tile);
        default: return;
    }
}

const LinearKernels linear_kernels = {kTileRows, quantise_row, tile_of_any_form};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
