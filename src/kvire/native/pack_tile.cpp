// Keys and values of a sequence's blocks, and its queries, in the order in which attend_tile.cpp reads them.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

// The floats that eight elements of a row stand for.
template <class E>
KVIRE_INLINE v8f scaled(v8f values, const float* scale) {
    if constexpr (has_scales<E>) return values * broadcast(*scale);
    return values;
}

// One token's key becomes one lane of a panel. scale: of the row, if its elements have one.
template <class E>
void pack_key(const E* key, const float* scale, int64_t width, int64_t token, float* k) {
    float* const lane = k + token / kPanel * width * kPanel + token % kPanel;
    each_vector(key, width, [&](int64_t d, v8f elements, int64_t count) KVIRE_LAMBDA {
        const v8f values = scaled<E>(elements, scale);
        for (int64_t i = 0; i < count; ++i) lane[(d + i) * kPanel] = values[i];
    });
}

// One token's value becomes one row of every panel.
template <class E>
void pack_value(const E* value, const float* scale, int64_t width, int64_t token, float* v) {
    each_vector(value, width, [&](int64_t d, v8f elements, int64_t) KVIRE_LAMBDA {
        const v8f values = scaled<E>(elements, scale);
        store8(v + d / kPanel * kTileTokens * kPanel + token * kPanel + d % kPanel, values);
    });
}

template <class E>
void pack(const PagedLayer& layer, const int32_t* block_table, int64_t head, const PackedTile& tile) {
    for (int64_t position = tile.begin; position < tile.end; ++position) {
        const int64_t block = block_table[position / layer.block_size], at = position % layer.block_size;
        const int64_t token = position % kTileTokens, row = at * layer.heads + head;
        const E* const k = (const E*)(layer.k + block * layer.k_block_bytes) + row * layer.key_width;
        const E* const v = (const E*)(layer.v + block * layer.v_block_bytes) + row * layer.value_width;
        pack_key(k, scale_of(layer.k_scales, layer.k_scale_stride, block, row), layer.key_width, token, tile.k);
        pack_value(v, scale_of(layer.v_scales, layer.v_scale_stride, block, row), layer.value_width, token, tile.v);
    }
}

}  // namespace

void pack_tile(const PagedLayer& layer, const int32_t* block_table, int64_t head, const PackedTile& tile) {
    // Scores are computed for whole panels of keys; of values only what is there is read.
    if (tile.end - tile.begin < kTileTokens) memset(tile.k, 0, (size_t)(kTileTokens * layer.key_width) * sizeof(float));
    switch (layer.dtype) {
        case DType::float32: return pack<float>(layer, block_table, head, tile);
        case DType::float16: return pack<f16>(layer, block_table, head, tile);
        case DType::bfloat16: return pack<bf16>(layer, block_table, head, tile);
        case DType::int8: return pack<int8_t>(layer, block_table, head, tile);
    }
}

// [tile of rows, key_width, rows of the tile]
void pack_queries(const QueryRows& rows, float* packed) {
    const int64_t count = rows.tokens * rows.group;
    for (int64_t row = 0; row < count; ++row) {
        const int64_t tile = row / kTileRows * kTileRows, left = count - tile;
        const int64_t height = left < kTileRows ? left : kTileRows;
        const float* from =
            rows.query + row / rows.group * rows.query_stride + row % rows.group * rows.query_head_stride;
        float* const to = packed + tile * rows.key_width + row - tile;
        for (int64_t d = 0; d < rows.key_width; ++d) to[d * height] = from[d] * rows.scale;
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
