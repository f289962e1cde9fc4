#include "paged_layer.h"

#include <stdexcept>
#include <string>

namespace kvire {
namespace {

void check_scales(const PagedLayer& layer) {
    const bool needed = layer.dtype == DType::int8;
    if (needed != (layer.k_scales != nullptr) || needed != (layer.v_scales != nullptr))
        throw std::invalid_argument("a layer needs the addresses of its scales if its dtype is int8, and only then");
    const int64_t floats = needed ? layer.block_size * layer.heads : 0;
    if (layer.num_blocks > 1 && (layer.k_scale_stride < floats || layer.v_scale_stride < floats))
        throw std::invalid_argument("scales of a layer overlap");
}

}  // namespace

void check_layer(const PagedLayer& layer) {
    if (!layer.k || !layer.v) throw std::invalid_argument("a layer needs the addresses of its K and V");
    if (layer.num_blocks <= 0 || layer.block_size <= 0 || layer.heads <= 0 || layer.key_width <= 0 ||
        layer.value_width <= 0)
        throw std::invalid_argument("sizes of a layer must be positive");
    const int64_t rows = layer.block_size * layer.heads * element_bytes(layer.dtype);
    if (layer.num_blocks > 1 &&
        (layer.k_block_bytes < rows * layer.key_width || layer.v_block_bytes < rows * layer.value_width))
        throw std::invalid_argument("blocks of a layer overlap");
    check_scales(layer);
}

void check_blocks(const PagedLayer& layer, const int32_t* block_table, int64_t begin, int64_t end) {
    for (int64_t i = begin / layer.block_size; i * layer.block_size < end; ++i) {
        if (block_table[i] < 0 || block_table[i] >= layer.num_blocks)
            throw std::out_of_range("block id " + std::to_string(block_table[i]) + " is not in a pool of " +
                                    std::to_string(layer.num_blocks) + " blocks");
    }
}

void check_slots(const PagedLayer& layer, const int64_t* slots, int64_t count) {
    const int64_t end = layer.num_blocks * layer.block_size;
    for (int64_t i = 0; i < count; ++i) {
        if (slots[i] < 0 || slots[i] >= end)
            throw std::out_of_range("slot " + std::to_string(slots[i]) + " is not in a pool of " +
                                    std::to_string(end) + " tokens");
    }
}

}  // namespace kvire
