#include "kv_rows.h"

#include <stdexcept>

#include "isa.h"
#include "paged_layer.h"
#include "parallel.h"

namespace kvire {
namespace {

// Tokens per task: a few tens of KB at common sizes, so that one decode step stays on the calling thread.
constexpr int64_t kTaskTokens = 32;

// scales: of the token's first head; null where the dtype has none.
void write_token(const PagedLayer& layer, const FloatRows& rows, int64_t token, int64_t width, char* to,
                 float* scales) {
    const float* from = rows.first + token * rows.token_stride;
    if (rows.head_stride == width || layer.heads == 1)
        return kernels().encode(from, to, scales, layer.heads, width, layer.dtype);
    for (int64_t h = 0; h < layer.heads; ++h)
        kernels().encode(from + h * rows.head_stride, to + h * width * element_bytes(layer.dtype),
                         scales ? scales + h : nullptr, 1, width, layer.dtype);
}

}  // namespace

void write_kv(const PagedLayer& layer, FloatRows k, FloatRows v, const int64_t* slots, int64_t tokens, int threads) {
    check_slots(layer, slots, tokens);
    const int64_t k_token = layer.heads * layer.key_width * element_bytes(layer.dtype);
    const int64_t v_token = layer.heads * layer.value_width * element_bytes(layer.dtype);
    parallel_for((tokens + kTaskTokens - 1) / kTaskTokens, threads, [&](int64_t task, int) {
        for (int64_t t = task * kTaskTokens; t < tokens && t < (task + 1) * kTaskTokens; ++t) {
            const int64_t block = slots[t] / layer.block_size, at = slots[t] % layer.block_size;
            const int64_t row = at * layer.heads;
            write_token(layer, k, t, layer.key_width, layer.k + block * layer.k_block_bytes + at * k_token,
                        scale_of(layer.k_scales, layer.k_scale_stride, block, row));
            write_token(layer, v, t, layer.value_width, layer.v + block * layer.v_block_bytes + at * v_token,
                        scale_of(layer.v_scales, layer.v_scale_stride, block, row));
        }
    });
}

void gather_kv(const PagedLayer& layer, const int32_t* block_table, int64_t table_width, int64_t start, int64_t length,
               float* k_out, float* v_out, int threads) {
    if (length < 0 || start < 0 || start > table_width * layer.block_size - length)
        throw std::out_of_range("positions to gather leave the block table");
    check_blocks(layer, block_table, start, start + length);
    const int64_t k_row = layer.heads * layer.key_width, v_row = layer.heads * layer.value_width;
    const int64_t first_block = start / layer.block_size, end = start + length;
    const int64_t blocks = length ? (end - 1) / layer.block_size - first_block + 1 : 0;
    parallel_for(blocks, threads, [&](int64_t task, int) {
        const int64_t from = (first_block + task) * layer.block_size, block = block_table[first_block + task];
        const int64_t begin = from < start ? start : from;
        const int64_t tokens = (from + layer.block_size < end ? from + layer.block_size : end) - begin;
        const int64_t bytes = element_bytes(layer.dtype), row = (begin - from) * layer.heads;
        kernels().decode(layer.k + block * layer.k_block_bytes + (begin - from) * k_row * bytes,
                         scale_of(layer.k_scales, layer.k_scale_stride, block, row), k_out + (begin - start) * k_row,
                         tokens * layer.heads, layer.key_width, layer.dtype);
        kernels().decode(layer.v + block * layer.v_block_bytes + (begin - from) * v_row * bytes,
                         scale_of(layer.v_scales, layer.v_scale_stride, block, row), v_out + (begin - start) * v_row,
                         tokens * layer.heads, layer.value_width, layer.dtype);
    });
}

}  // namespace kvire
