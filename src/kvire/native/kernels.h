// What the kernels are given and which ones there are: plain records, so that the same table can point at
// the code of any instruction set.
#pragma once

#include <stdint.h>

namespace kvire {

enum class DType : int { float32 = 0, float16 = 1, bfloat16 = 2, int8 = 3 };

// Helpers in this header are static: files compiled for different instruction sets must not share them.
static constexpr int64_t element_bytes(DType dtype) {
    return dtype == DType::float32 ? 4 : dtype == DType::int8 ? 1 : 2;
}

// Widths are padded to whole vectors in scratch memory.
static constexpr int64_t padded(int64_t width) { return (width + 7) / 8 * 8; }

// A context is cut at multiples of this many positions, whatever else is in the batch and however many
// threads there are: that is what makes a row's result repeat bit for bit. Short enough that two threads
// share a context of 1k tokens evenly, long enough that merging the parts costs nothing.
constexpr int64_t kSpanTokens = 256;

// Prefill packs keys and values in tiles of this many positions, cut at multiples of it, each tile in panels of
// sixteen lanes: what a tile of six rows times two vectors of sums reads from end to end.
constexpr int64_t kTileTokens = 128, kPanel = 16, kTileRows = 6;

static constexpr int64_t panelled(int64_t width) { return (width + kPanel - 1) / kPanel * kPanel; }

// One layer of the pool. K of block b begins at k + b * k_block_bytes and lies [token, head, key_width];
// V alike. An int8 stands for itself times the scale of its head's row: those of block b begin at
// k_scales + b * k_scale_stride and lie [token, head]. Other dtypes have none: null.
struct PagedLayer {
    char* k;
    char* v;
    float* k_scales;
    float* v_scales;
    int64_t k_block_bytes, v_block_bytes;
    int64_t k_scale_stride, v_scale_stride;
    int64_t num_blocks, block_size;
    int64_t heads, key_width, value_width;
    DType dtype;
};

// Scale of row token * heads + head of a block; null where there are none.
static inline float* scale_of(float* scales, int64_t stride, int64_t block, int64_t row) {
    return scales ? scales + block * stride + row : nullptr;
}

// One row of queries against positions begin .. end - 1 of its sequence, all within one span.
struct SpanQuery {
    const float* query;  // [query_heads, key_width], heads query_head_stride elements apart
    int64_t query_head_stride, query_heads;
    const int32_t* block_table;
    int64_t begin, end;
    float scale, softcap;  // softcap 0: none
};

// Attention over one span before the division by the sum of weights: what merging needs.
struct SpanPartial {
    float* maximum;  // [query_heads]: largest score
    float* weight;   // [query_heads]: sum of exp(score - maximum)
    float* values;   // [query_heads, padded(value_width)]: sum of exp(score - maximum) * v
};

// Positions begin .. end - 1 of one KV head, all within one tile.
struct PackedTile {
    float* k;  // [kTileTokens / kPanel, key_width, kPanel tokens]
    float* v;  // [panelled(value_width) / kPanel, kTileTokens, kPanel columns]
    int64_t begin, end;
};

// Neighbouring tokens of one sequence with the query heads that share one KV head. Row token * group + head.
struct QueryRows {
    const float* query;  // [tokens, group, key_width]
    int64_t query_stride, query_head_stride;
    int64_t tokens, group;
    int64_t first;   // position of the first token
    int64_t window;  // a row sees its last `window` positions; 0: all
    float scale, softcap;
    int64_t key_width, value_width;
};

// out[row, n] = x[row] . weights[n] + bias[n]; everything contiguous float32.
struct LinearRows {
    const float* x;        // [rows, width]
    const float* weights;  // [out_width, width]
    const float* bias;     // [out_width] or null
    float* out;            // [rows, out_width]
    int64_t rows, width, out_width;
};

// out[row] = weights * (x[row] / sqrt(mean of x[row] squared + epsilon)); everything contiguous float32.
struct RmsNorm {
    const float* x;        // [rows, width]
    const float* weights;  // [width]
    float* out;            // [rows, width]
    int64_t rows, width;
    float epsilon;
};

// Shorter inputs are hashed in another way, which is not here.
constexpr int64_t kLeastHashed = 256, kMostHeadBytes = 256;

struct KernelTable {
    const char* isa;

    // scratch: span_scratch_floats(...) floats that no other thread uses.
    void (*attend_span)(const PagedLayer& layer, const SpanQuery& task, float* scratch, const SpanPartial& out);

    // Folds the parts of one row, first to last, into out: [query_heads, value_width], contiguous.
    // sinks: [query_heads] or null; a sink adds exp(sink) to the sum of weights.
    void (*merge_spans)(const SpanPartial* parts, int64_t count, int64_t query_heads, int64_t value_width,
                        const float* sinks, float* out);

    // One tile of KV head `head`: floats from the blocks of a sequence. Keys without a position are zero.
    void (*pack_tile)(const PagedLayer& layer, const int32_t* block_table, int64_t head, const PackedTile& tile);

    // The queries, scaled, as attend_tile reads them: rows times key_width floats.
    void (*pack_queries)(const QueryRows& rows, float* packed);

    // Adds what the rows see of one tile to their sums; an untouched row has maximum -inf and zeros.
    void (*attend_tile)(const QueryRows& rows, const float* packed, const PackedTile& tile, const SpanPartial& sums);

    // `rows` neighbouring heads' rows of floats to elements of a pool, rounding to nearest even, and back. scales:
    // one per row for int8, null for others.
    void (*encode)(const float* from, char* to, float* scales, int64_t rows, int64_t width, DType dtype);
    void (*decode)(const char* from, const float* scales, float* to, int64_t rows, int64_t width, DType dtype);

    // Weight rows begin .. end - 1 of a linear layer, for every row of x.
    void (*linear_rows)(const LinearRows& task, int64_t begin, int64_t end);

    // Rows begin .. end - 1.
    void (*rms_norm)(const RmsNorm& task, int64_t begin, int64_t end);

    // XXH3-128 of head and data together, in canonical form (16 bytes, high first). data_bytes: at least kLeastHashed;
    // head_bytes: at most kMostHeadBytes.
    void (*xxh3_128)(const char* head, int64_t head_bytes, const char* data, int64_t data_bytes, unsigned char* digest);

    // Sum of `count` floats, as fast as memory gives them.
    float (*read_sum)(const float* from, int64_t count);
};

// Queries, then scores.
static constexpr int64_t span_scratch_floats(const PagedLayer& layer, int64_t query_heads) {
    return query_heads * (padded(layer.key_width) + kSpanTokens);
}

namespace baseline {
extern const KernelTable kernels;
}
namespace avx2 {
extern const KernelTable kernels;
}

}  // namespace kvire
