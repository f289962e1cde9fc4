// Attention of sequences that compute one token each, over the paged cache.
#pragma once

#include "kernels.h"

namespace kvire {

struct DecodeBatch {
    const float* queries;  // [sequences, query_heads, key_width], last dimension contiguous
    int64_t query_stride, query_head_stride;
    int64_t sequences, query_heads;
    const int32_t* block_tables;  // [sequences, table_width], rows table_stride apart
    int64_t table_stride, table_width;
    const int32_t* context_lens;  // [sequences]: tokens in the cache, the query's own included
    float scale;
    int64_t window;      // attend to the last `window` positions; 0: to all
    float softcap;       // 0: none
    const float* sinks;  // [query_heads] or null
    float* out;          // [sequences, query_heads, value_width], contiguous
};

// Throws std::out_of_range for a length or a needed block id that leaves the table or the pool, before anything
// is computed.
void decode_attention(const PagedLayer& layer, const DecodeBatch& batch, int threads);

}  // namespace kvire
