// A tile of a product: R rows by sixteen outputs. dots.h has the integer sums, which differ by processor; here they
// become floats, in the one order of docs/adr/0019-one-arithmetic.md.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#pragma once

#include "../linear.h"
#include "lanes.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

void quantise_row(const float* x, int64_t width, int8_t* q, float* scale, float* scaled_sum, int16_t* sums);

// One per group of forms, each in a file of its own.
void tile_4_bits(const LinearTile& tile);
void tile_k_quants(const LinearTile& tile);
void tile_5_and_8_bits(const LinearTile& tile);
void tile_floats(const LinearTile& tile);

// f(R) with the number of rows as a constant.
template <int R>
struct Rows {
    static constexpr int count = R;
};

template <class F>
KVIRE_STEP_INLINE void with_rows(int rows, F f) {
    switch (rows) {
        case 1: return f(Rows<1>());
        case 2: return f(Rows<2>());
        case 3: return f(Rows<3>());
        case 4: return f(Rows<4>());
#if defined(__AVX512F__)
        case 5: return f(Rows<5>());
        case 6: return f(Rows<6>());
        case 7: return f(Rows<7>());
        case 8: return f(Rows<8>());
#endif
        default: return;
    }
}

KVIRE_STEP_INLINE void finish(const LinearTile& tile, int row, F16x y) {
    if (tile.outputs == kOutputs) {
        if (tile.bias) y = y + load(tile.bias);
        return store(tile.out[row], y);
    }
    if (tile.bias) y = y + load_part(tile.bias, tile.outputs);
    store_part(tile.out[row], y, tile.outputs);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
