// Attention of the tokens that one sequence computes together, over the paged cache.
#pragma once

#include "kernels.h"

namespace kvire {

// The last `tokens` positions of a context.
struct PrefillChunk {
    const float* queries;  // [tokens, query_heads, key_width], last dimension contiguous
    int64_t query_stride, query_head_stride;
    int64_t tokens, query_heads;
    const int32_t* block_table;  // [table_width]
    int64_t table_width;
    int64_t context_len;  // tokens in the cache, the chunk's own included
    float scale;
    int64_t window;      // each token attends to the last `window` positions up to its own; 0: to all
    float softcap;       // 0: none
    const float* sinks;  // [query_heads] or null
    float* out;          // [tokens, query_heads, value_width], contiguous
};

// Throws std::out_of_range for a length or a needed block id that leaves the table or the pool, before anything
// is computed.
void prefill_attention(const PagedLayer& layer, const PrefillChunk& chunk, int threads);

}  // namespace kvire
