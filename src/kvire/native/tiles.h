// The stretches of memory that one span of a context consists of, and the prefetcher that runs ahead of the
// kernel along them.
#pragma once

#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {

// K and V of up to kTileTokens neighbouring tokens, all heads. offset: position relative to the span.
struct Tile {
    const char* k;
    const char* v;
    int64_t tokens, offset;
};

// Two steps of the score loop; the sums of V stay in registers for as long.
constexpr int64_t kTileTokens = 8;

KVIRE_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KVIRE_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// tiles: room for kSpanTokens, which blocks of a single token would need. Returns how many there are.
KVIRE_INLINE int64_t cut_tiles(const PagedLayer& layer, const SpanQuery& task, Tile* tiles) {
    const int64_t k_bytes = layer.heads * layer.key_width * element_bytes(layer.dtype);
    const int64_t v_bytes = layer.heads * layer.value_width * element_bytes(layer.dtype);
    int64_t count = 0;
    for (int64_t position = task.begin; position < task.end;) {
        const int64_t block = task.block_table[position / layer.block_size], at = position % layer.block_size;
        const int64_t tokens = smaller(smaller(kTileTokens, layer.block_size - at), task.end - position);
        tiles[count++] = {layer.k + block * layer.k_block_bytes + at * k_bytes,
                          layer.v + block * layer.v_block_bytes + at * v_bytes, tokens, position - task.begin};
        position += tokens;
    }
    return count;
}

// Walks the K of all tiles and then their V, a fixed distance ahead of the kernel.
//
// Into the second-level cache: a core has only some 24 buffers for lines on their way to the first level, and
// with these as the limit decoding stops at half of what memory gives (measured: 15 against 25 GB/s per core
// on Zen 4). The distance covers latency times bandwidth several times over, and at least one tile, because a
// tile is read head by head while the walk is linear.
class Prefetch {
  public:
    Prefetch(const PagedLayer& layer, const Tile* tiles, int64_t count)
        : tiles_(tiles), count_(count), k_bytes_(layer.heads * layer.key_width * element_bytes(layer.dtype)),
          v_bytes_(layer.heads * layer.value_width * element_bytes(layer.dtype)) {
        enter_next();
        advance(smaller(larger(kLeastAhead, kTileTokens * larger(k_bytes_, v_bytes_)), kMostAhead));
    }

    KVIRE_MEMBER void advance(int64_t bytes) {
        for (int64_t lines = bytes / kLine; lines > 0 && next_ < end_;) {
            const char* stop = next_ + lines * kLine;
            if (stop > end_) stop = end_;
            for (; next_ < stop; next_ += kLine, --lines) __builtin_prefetch(next_, 0, kSecondLevel);
            if (next_ >= end_) enter_next();
        }
    }

  private:
    static constexpr int64_t kLine = 64, kLeastAhead = 16 << 10, kMostAhead = 64 << 10;
    static constexpr int kSecondLevel = 2;

    void enter_next() {
        if (index_ >= 2 * count_) return;
        const bool values = index_ >= count_;
        const Tile& tile = tiles_[values ? index_ - count_ : index_];
        next_ = values ? tile.v : tile.k;
        end_ = next_ + tile.tokens * (values ? v_bytes_ : k_bytes_);
        ++index_;
    }

    const Tile* tiles_;
    int64_t count_, k_bytes_, v_bytes_, index_ = 0;
    const char* next_ = nullptr;
    const char* end_ = nullptr;
};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
