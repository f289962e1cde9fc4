// The stretches of memory that one span of a context consists of, in the order in which they are read.
#pragma once

#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {

KVIRE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVIRE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// K or V of a few neighbouring tokens, all heads. offset: position of the first relative to the span.
struct Tile {
    const char* rows;
    int64_t tokens, offset;
};

// The K of all tiles, then their V.
//
// While the kernel reads one tile it prefetches the one `ahead` places further on, a line at a time between its
// arithmetic. Into the second-level cache: a core has only some 24 buffers for lines on their way to the first,
// and with these as the limit decoding stops at half of what memory gives (measured: 12 against 20 GB/s per core
// on Zen 4). The distance covers latency times bandwidth several times over.
class TileStream {
  public:
    TileStream(const PagedLayer& layer, const SpanQuery& task) {
        if (layer.k_scales) {
            prefetch_scales(layer, task, layer.k_scales, layer.k_scale_stride);
            prefetch_scales(layer, task, layer.v_scales, layer.v_scale_stride);
        }
        const int64_t k_row = layer.heads * layer.key_width * element_bytes(layer.dtype);
        const int64_t v_row = layer.heads * layer.value_width * element_bytes(layer.dtype);
        const int64_t tile_tokens = larger(k_row, v_row) > kWideRow ? kFewTokens : kManyTokens;
        add(layer, task, layer.k, layer.k_block_bytes, k_row, tile_tokens);
        count_ = size_;
        add(layer, task, layer.v, layer.v_block_bytes, v_row, tile_tokens);
        ahead_ = smaller((kAheadBytes - 1) / (tile_tokens * k_row) + 1, kMostAhead);
        for (int64_t i = 0; i < ahead_; ++i) tiles_[size_ + i] = tiles_[size_ - 1];  // past the end: read already
        for (int64_t i = 0; i < ahead_; ++i) {
            for (int64_t at = 0; at < tiles_[i].tokens * k_row; at += kLine) prefetch(tiles_[i].rows + at);
        }
    }

    const Tile* k_begin() const { return tiles_; }
    const Tile* v_begin() const { return tiles_ + count_; }
    const Tile* end() const { return tiles_ + size_; }

    // What to prefetch while `tile` is read.
    const char* ahead_of(const Tile* tile) const { return tile[ahead_].rows; }

    static constexpr int64_t kLine = 64;
    KVIRE_INLINE void prefetch(const char* line) { __builtin_prefetch(line, 0, /* second level */ 2); }

  private:
    // Eight tokens are two steps of the score loop, and as many for which sums of V stay in registers. Fewer where
    // a tile would otherwise no longer be small beside the cache that prefetching fills.
    static constexpr int64_t kManyTokens = 8, kFewTokens = 4, kWideRow = 2048;
    static constexpr int64_t kAheadBytes = 8 << 10, kMostAhead = 64;

    void add(const PagedLayer& layer, const SpanQuery& task, const char* base, int64_t block_bytes, int64_t row_bytes,
             int64_t tile_tokens) {
        for (int64_t position = task.begin; position < task.end;) {
            const int64_t block = task.block_table[position / layer.block_size], at = position % layer.block_size;
            const int64_t tokens = smaller(smaller(tile_tokens, layer.block_size - at), task.end - position);
            tiles_[size_++] = {base + block * block_bytes + at * row_bytes, tokens, position - task.begin};
            position += tokens;
        }
    }

    // All at once: they are few beside the rows.
    void prefetch_scales(const PagedLayer& layer, const SpanQuery& task, const float* base, int64_t stride) {
        for (int64_t position = task.begin; position < task.end;) {
            const int64_t block = task.block_table[position / layer.block_size], at = position % layer.block_size;
            const int64_t tokens = smaller(layer.block_size - at, task.end - position);
            const char* from = (const char*)(base + block * stride + at * layer.heads);
            for (int64_t byte = 0; byte < tokens * layer.heads * 4; byte += kLine) prefetch(from + byte);
            position += tokens;
        }
    }

    Tile tiles_[2 * kSpanTokens + kMostAhead];  // as many as blocks of a single token would need
    int64_t count_ = 0, size_ = 0, ahead_ = 0;
};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
