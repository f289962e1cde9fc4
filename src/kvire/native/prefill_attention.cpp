#include "prefill_attention.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "paged_layer.h"
#include "parallel.h"
#include "scratch.h"

namespace kvire {
namespace {

// Positions that are packed at a time; bounds the copy (67 MB for 8 heads of 128) of a long context.
constexpr int64_t kPieceTokens = 8192;
static_assert(kPieceTokens % kTileTokens == 0, "tiles must not cross pieces");

// Rows of a task: enough for packed keys to be read from the second-level cache many times, few enough to share out
// evenly.
constexpr int64_t kTaskRows = 96;

int64_t first_position(const PrefillChunk& chunk) {
    const int64_t oldest = chunk.context_len - chunk.tokens - chunk.window + 1;
    return chunk.window > 0 && oldest > 0 ? oldest : 0;
}

void check(const PagedLayer& layer, const PrefillChunk& chunk) {
    if (chunk.query_heads <= 0 || chunk.query_heads % layer.heads != 0)
        throw std::invalid_argument("query heads must be a multiple of the layer's KV heads");
    const int64_t length = chunk.context_len;
    if (chunk.tokens < 1 || length < chunk.tokens || length > chunk.table_width * layer.block_size)
        throw std::out_of_range("context length " + std::to_string(length) + " does not fit its block table");
    check_blocks(layer, chunk.block_table, first_position(chunk), length);
}

// Packs the context piece by piece; over each piece all rows attend, some tokens of one KV head per task.
class Prefill {
  public:
    Prefill(const PagedLayer& layer, const PrefillChunk& chunk, int threads)
        : layer_(layer),
          chunk_(chunk),
          threads_(threads),
          group_(chunk.query_heads / layer.heads),
          task_tokens_(std::max<int64_t>(kTaskRows / group_, 1)),
          tasks_((chunk.tokens + task_tokens_ - 1) / task_tokens_ * layer.heads),
          k_floats_(kTileTokens * layer.key_width) {
        const int64_t begin = first_position(chunk), rows = task_tokens_ * group_;
        const int64_t tiles = (std::min(chunk.context_len - begin, kPieceTokens) - 1) / kTileTokens + 2;
        packed_ = Scratch(tiles * layer.heads, k_floats_ + kTileTokens * panelled(layer.value_width));
        queries_ = Scratch(threads, rows * layer.key_width);
        one_piece_ = begin / kPieceTokens == (chunk.context_len - 1) / kPieceTokens;
        sums_ = Scratch(one_piece_ ? threads : tasks_, rows * (padded(layer.value_width) + 2));
    }

    void run() {
        for (int64_t begin = first_position(chunk_); begin < chunk_.context_len;) {
            const int64_t end = std::min((begin / kPieceTokens + 1) * kPieceTokens, chunk_.context_len);
            pack(begin, end);
            // The last tokens see most: long tasks first.
            parallel_for(tasks_, threads_, [&](int64_t i, int worker) { attend(tasks_ - 1 - i, worker, begin, end); });
            begin = end;
        }
    }

  private:
    PackedTile tile(int64_t index, int64_t head, int64_t begin, int64_t end) const {
        float* const k = packed_.row((index - begin / kTileTokens) * layer_.heads + head);
        return {k, k + k_floats_, std::max(index * kTileTokens, begin), std::min((index + 1) * kTileTokens, end)};
    }

    void pack(int64_t begin, int64_t end) {
        const int64_t first = begin / kTileTokens, tiles = (end - 1) / kTileTokens - first + 1;
        parallel_for(tiles * layer_.heads, threads_, [&](int64_t i, int) {
            const int64_t head = i % layer_.heads;
            kernels().pack_tile(layer_, chunk_.block_table, head, tile(first + i / layer_.heads, head, begin, end));
        });
    }

    QueryRows rows(int64_t token, int64_t head) const {
        return {chunk_.queries + token * chunk_.query_stride + head * group_ * chunk_.query_head_stride,
                chunk_.query_stride,
                chunk_.query_head_stride,
                std::min(task_tokens_, chunk_.tokens - token),
                group_,
                chunk_.context_len - chunk_.tokens + token,
                chunk_.window,
                chunk_.scale,
                chunk_.softcap,
                layer_.key_width,
                layer_.value_width};
    }

    SpanPartial sums(int64_t task, int worker) const {
        float* const values = sums_.row(one_piece_ ? worker : task);
        float* const maximum = values + task_tokens_ * group_ * padded(layer_.value_width);
        return {maximum, maximum + task_tokens_ * group_, values};
    }

    void clear(const SpanPartial& sums) const {
        const int64_t count = task_tokens_ * group_;
        std::fill_n(sums.maximum, count, -std::numeric_limits<float>::infinity());
        std::fill_n(sums.weight, count, 0.0f);
        std::fill_n(sums.values, count * padded(layer_.value_width), 0.0f);
    }

    void attend(int64_t task, int worker, int64_t begin, int64_t end) {
        const int64_t token = task / layer_.heads * task_tokens_, head = task % layer_.heads;
        const QueryRows rows = this->rows(token, head);
        const SpanPartial sums = this->sums(task, worker);
        float* const queries = queries_.row(worker);
        if (begin == first_position(chunk_)) clear(sums);
        kernels().pack_queries(rows, queries);
        const int64_t seen_end = std::min(end, rows.first + rows.tokens);
        const int64_t oldest = rows.window > 0 ? rows.first - rows.window + 1 : 0;
        for (int64_t i = std::max(begin, oldest) / kTileTokens; i * kTileTokens < seen_end; ++i)
            kernels().attend_tile(rows, queries, tile(i, head, begin, end), sums);
        if (end == chunk_.context_len) finish(rows, token, head, sums);
    }

    void finish(const QueryRows& rows, int64_t token, int64_t head, const SpanPartial& sums) const {
        for (int64_t t = 0; t < rows.tokens; ++t) {
            const int64_t row = t * group_, first = head * group_;
            const SpanPartial part{sums.maximum + row, sums.weight + row,
                                   sums.values + row * padded(layer_.value_width)};
            kernels().merge_spans(&part, 1, group_, layer_.value_width, chunk_.sinks ? chunk_.sinks + first : nullptr,
                                  chunk_.out + ((token + t) * chunk_.query_heads + first) * layer_.value_width);
        }
    }

    const PagedLayer& layer_;
    const PrefillChunk& chunk_;
    const int threads_;
    const int64_t group_, task_tokens_, tasks_, k_floats_;
    bool one_piece_;
    Scratch packed_, queries_, sums_;
};

}  // namespace

void prefill_attention(const PagedLayer& layer, const PrefillChunk& chunk, int threads) {
    check(layer, chunk);
    Prefill(layer, chunk, threads).run();
}

}  // namespace kvire
