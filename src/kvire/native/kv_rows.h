// Writing new K and V into the pool, and reading a stretch of context out of it as floats.
#pragma once

#include "kernels.h"

namespace kvire {

// Floats [tokens, heads, width] with the last dimension contiguous; strides in elements.
struct FloatRows {
    const float* first;
    int64_t token_stride, head_stride;
};

// Rounds k and v to the pool's dtype, nearest even, and stores token t at slots[t]. Throws std::out_of_range for a
// slot outside the pool, before anything is written.
void write_kv(const PagedLayer& layer, FloatRows k, FloatRows v, const int64_t* slots, int64_t tokens, int threads);

// K and V of positions start .. start + length - 1 into k_out [length, heads, key_width] and v_out alike, contiguous.
// Throws std::out_of_range for positions beyond the table or blocks outside the pool.
void gather_kv(const PagedLayer& layer, const int32_t* block_table, int64_t table_width, int64_t start, int64_t length,
               float* k_out, float* v_out, int threads);

}  // namespace kvire
