#include "decode_attention.h"

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "paged_layer.h"
#include "parallel.h"
#include "scratch.h"

namespace kvire {
namespace {

// Partial results that are kept at a time. Beyond, the batch is computed in several waves, so that memory stays
// bounded however many long sequences decode together.
constexpr int64_t kWaveBytes = 64 << 20;

int64_t first_position(const DecodeBatch& batch, int64_t sequence) {
    const int64_t length = batch.context_lens[sequence];
    return batch.window > 0 && length > batch.window ? length - batch.window : 0;
}

int64_t span_count(const DecodeBatch& batch, int64_t sequence) {
    const int64_t first = first_position(batch, sequence) / kSpanTokens;
    return (batch.context_lens[sequence] - 1) / kSpanTokens - first + 1;
}

void check(const PagedLayer& layer, const DecodeBatch& batch) {
    if (batch.query_heads <= 0 || batch.query_heads % layer.heads != 0)
        throw std::invalid_argument("query heads must be a multiple of the layer's KV heads");
    for (int64_t s = 0; s < batch.sequences; ++s) {
        const int64_t length = batch.context_lens[s];
        if (length < 1 || length > batch.table_width * layer.block_size)
            throw std::out_of_range("context length " + std::to_string(length) + " does not fit its block table");
        check_blocks(layer, batch.block_tables + s * batch.table_stride, first_position(batch, s), length);
    }
}

// One part of one row's context.
struct Span {
    int64_t sequence, begin, end;
};

// Consecutive sequences whose partial results are in memory together.
class Wave {
  public:
    Wave(const PagedLayer& layer, const DecodeBatch& batch, int64_t first, int threads)
        : layer_(layer), batch_(batch), first_(first) {
        const int64_t part_floats = batch.query_heads * (padded(layer.value_width) + 2);
        while (first_ + count_ < batch.sequences) {
            const int64_t more = span_count(batch, first_ + count_);
            const int64_t bytes = (static_cast<int64_t>(spans_.size()) + more) * part_floats * 4;
            if (count_ > 0 && bytes > kWaveBytes) break;
            add_sequence(first_ + count_++);
        }
        partials_ = Scratch(static_cast<int64_t>(spans_.size()), part_floats);
        working_ = Scratch(threads, span_scratch_floats(layer, batch.query_heads));
        parts_.reserve(spans_.size());
        for (size_t i = 0; i < spans_.size(); ++i) {
            float* values = partials_.row(static_cast<int64_t>(i));
            float* maximum = values + batch.query_heads * padded(layer.value_width);
            parts_.push_back({maximum, maximum + batch.query_heads, values});
        }
        left_.reset(new std::atomic<int64_t>[static_cast<size_t>(count_)]);
        for (int64_t s = 0; s < count_; ++s) left_[s] = starts_[s + 1] - starts_[s];
    }

    int64_t next_sequence() const { return first_ + count_; }

    void run(int threads) {
        parallel_for(static_cast<int64_t>(spans_.size()), threads, [this](int64_t i, int worker) {
            const int64_t sequence = spans_[i].sequence;
            attend(i, worker);
            // Whoever computes a row's last missing part merges them all: no second round of threads.
            if (left_[sequence - first_].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(sequence);
        });
    }

  private:
    void add_sequence(int64_t sequence) {
        const int64_t length = batch_.context_lens[sequence];
        for (int64_t begin = first_position(batch_, sequence); begin < length;) {
            int64_t end = (begin / kSpanTokens + 1) * kSpanTokens;
            if (end > length) end = length;
            spans_.push_back({sequence, begin, end});
            begin = end;
        }
        starts_.push_back(static_cast<int64_t>(spans_.size()));
    }

    void attend(int64_t index, int worker) {
        const Span& span = spans_[index];
        const SpanQuery query{batch_.queries + span.sequence * batch_.query_stride,
                              batch_.query_head_stride,
                              batch_.query_heads,
                              batch_.block_tables + span.sequence * batch_.table_stride,
                              span.begin,
                              span.end,
                              batch_.scale,
                              batch_.softcap};
        kernels().attend_span(layer_, query, working_.row(worker), parts_[index]);
    }

    void merge(int64_t sequence) {
        const int64_t begin = starts_[sequence - first_], end = starts_[sequence - first_ + 1];
        kernels().merge_spans(&parts_[begin], end - begin, batch_.query_heads, layer_.value_width, batch_.sinks,
                              batch_.out + sequence * batch_.query_heads * layer_.value_width);
    }

    const PagedLayer& layer_;
    const DecodeBatch& batch_;
    int64_t first_, count_ = 0;  // sequences first_ .. first_ + count_ - 1
    std::vector<Span> spans_;
    std::vector<int64_t> starts_{0};  // per sequence: its first span
    std::vector<SpanPartial> parts_;
    Scratch partials_, working_;
    std::unique_ptr<std::atomic<int64_t>[]> left_;  // per sequence: parts not computed yet
};

}  // namespace

void decode_attention(const PagedLayer& layer, const DecodeBatch& batch, int threads) {
    check(layer, batch);
    for (int64_t sequence = 0; sequence < batch.sequences;) {
        Wave wave(layer, batch, sequence, threads);
        wave.run(threads);
        sequence = wave.next_sequence();
    }
}

}  // namespace kvire
