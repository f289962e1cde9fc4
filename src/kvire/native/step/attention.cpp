#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "../isa.h"
#include "../paged_layer.h"
#include "isa.h"

namespace kvire {
namespace step {
namespace {

constexpr int64_t kLanes = 16;

int64_t in_lanes(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

int64_t first_seen(int64_t position, int64_t window) { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

int64_t piece_end(int64_t position) { return position / kPiece + 1; }

// Memory of one worker, in floats.
struct Scratch {
    float *k, *v, *queries, *largest, *weight, *values;
    int32_t *low, *high;

    Scratch(float* at, int64_t key_width, int64_t value_floats, int64_t rows) {
        const auto take = [&at](int64_t floats) {
            float* const from = at;
            at += in_lanes(floats);
            return from;
        };
        k = take(key_width * kPiece);
        v = take(value_floats * kPiece);
        queries = take(rows * key_width);
        values = take(rows * value_floats);
        largest = take(rows);
        weight = take(rows);
        low = reinterpret_cast<int32_t*>(take(rows));
        high = reinterpret_cast<int32_t*>(take(rows));
    }
};

int64_t most_rows(int64_t group) { return std::max<int64_t>(1, kTaskRows / group) * group; }

}  // namespace

const AttentionKernels& attention_kernels() { return KVIRE_STEP_TABLE(attention_kernels); }

void check_step(const StepLayer& layer, const StepSequences& sequences, const StepTables& tables) {
    if (layer.query_heads < 1 || layer.query_heads % layer.pool.heads)
        throw std::invalid_argument("query heads must be a multiple of the layer's KV heads");
    if (layer.pool.key_width > kWidest || layer.pool.value_width > kWidest)
        throw std::invalid_argument("a key or value has at most 1024 numbers");
    check_slots(layer.pool, tables.slots, sequences.row_begin[sequences.count]);
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t rows = sequences.row_begin[s + 1] - sequences.row_begin[s], length = sequences.context_lens[s];
        if (rows < 1 || length < rows || length > tables.stride * layer.pool.block_size)
            throw std::out_of_range("a context does not fit its block table");
        check_blocks(layer.pool, tables.block_tables + s * tables.stride, first_seen(length - rows, layer.window), length);
    }
}

AttentionPlan::AttentionPlan(const StepSequences& sequences, int64_t heads, int64_t query_heads, int64_t window,
                             int workers) {
    const int64_t group = query_heads / heads, tokens = std::max<int64_t>(1, kTaskRows / group);
    int64_t decodes = 0;
    for (int64_t s = 0; s < sequences.count; ++s) decodes += sequences.row_begin[s + 1] - sequences.row_begin[s] == 1;
    const bool split = decodes * heads < 4 * workers;
    for (int64_t s = 0; s < sequences.count; ++s) {
        const int64_t rows = sequences.row_begin[s + 1] - sequences.row_begin[s], length = sequences.context_lens[s];
        for (int64_t head = 0; head < heads; ++head) {
            if (rows > 1 || !split) {
                for (int64_t first = 0; first < rows; first += tokens)
                    attends.push_back({s, head, first, std::min(tokens, rows - first), 0, 0, -1});
                continue;
            }
            const int64_t begin = first_seen(length - 1, window) / kPiece, end = piece_end(length - 1);
            const int64_t wanted = std::max<int64_t>(1, 4 * workers / std::max<int64_t>(decodes * heads, 1));
            const int64_t run = std::max<int64_t>(1, (end - begin + wanted - 1) / wanted);
            if (run >= end - begin) {
                attends.push_back({s, head, 0, 1, 0, 0, -1});
                continue;
            }
            merges.push_back({s, head, partials, end - begin});
            for (int64_t piece = begin; piece < end; piece += run) {
                attends.push_back({s, head, 0, 1, piece, std::min(piece + run, end), partials});
                partials += (std::min(piece + run, end) - piece) * group;
            }
        }
    }
    // The last rows of a prompt see most.
    std::stable_sort(attends.begin(), attends.end(), [](const AttendTask& a, const AttendTask& b) {
        return a.first_row + a.rows > b.first_row + b.rows;
    });
}

AttentionWork::AttentionWork(const StepLayer& layer, const StepSequences& sequences, const StepTables& tables,
                             const AttentionPlan& plan, Rows queries, float* out, int64_t out_stride, float* scratch,
                             float* partials, const AttentionKernels& kernels)
    : layer_(layer), sequences_(sequences), tables_(tables), plan_(plan), queries_(queries), out_(out),
      out_stride_(out_stride), scratch_(scratch), partials_(partials), group_(layer.query_heads / layer.pool.heads),
      value_floats_(in_lanes(layer.pool.value_width)),
      reads_pool_(layer.pool.block_size % kLanes == 0 && layer.pool.value_width % kLanes == 0), kernels_(kernels) {}

int64_t AttentionWork::scratch_floats(int64_t key_width, int64_t value_width, int64_t query_heads, int64_t heads) {
    const int64_t rows = most_rows(query_heads / heads), values = in_lanes(value_width);
    return in_lanes(key_width * kPiece) + in_lanes(values * kPiece) + in_lanes(rows * key_width) +
           in_lanes(rows * values) + 4 * in_lanes(rows);
}

int64_t AttentionWork::partial_floats(const AttentionPlan& plan, int64_t value_width) {
    return plan.partials * (in_lanes(value_width) + kLanes);
}

namespace {

// The numbers of one key, `stride` numbers apart.
template <class Number>
void spread(const char* from, int64_t count, int64_t stride, char* to) {
    for (int64_t d = 0; d < count; ++d)
        std::memcpy(to + d * stride * static_cast<int64_t>(sizeof(Number)),
                    from + d * static_cast<int64_t>(sizeof(Number)), sizeof(Number));
}

}  // namespace

void AttentionWork::write(const StepLayer& layer, const StepTables& tables, Rows k, Rows v, int64_t begin, int64_t end) {
    const PagedLayer& pool = layer.pool;
    const int64_t bytes = element_bytes(pool.dtype);
    char encoded[sizeof(float) * kWidest];
    for (int64_t row = begin; row < end; ++row) {
        const int64_t block = tables.slots[row] / pool.block_size, at = tables.slots[row] % pool.block_size;
        for (int64_t head = 0; head < pool.heads; ++head) {
            const int64_t scale = head * pool.block_size + at;
            kernels().encode(k.first + row * k.stride + head * pool.key_width, encoded,
                             scale_of(pool.k_scales, pool.k_scale_stride, block, scale), 1, pool.key_width, pool.dtype);
            char* const to = pool.k + block * pool.k_block_bytes + (head * pool.key_width * pool.block_size + at) * bytes;
            switch (bytes) {
                case 1: spread<uint8_t>(encoded, pool.key_width, pool.block_size, to); break;
                case 2: spread<uint16_t>(encoded, pool.key_width, pool.block_size, to); break;
                default: spread<uint32_t>(encoded, pool.key_width, pool.block_size, to); break;
            }
            kernels().encode(v.first + row * v.stride + head * pool.value_width,
                             pool.v + block * pool.v_block_bytes +
                                 (head * pool.block_size + at) * pool.value_width * bytes,
                             scale_of(pool.v_scales, pool.v_scale_stride, block, scale), 1, pool.value_width,
                             pool.dtype);
        }
    }
}

void AttentionWork::pack(const AttendTask& task, int64_t piece, int64_t seen, int64_t end, float* k, float* v) const {
    const PagedLayer& pool = layer_.pool;
    const int32_t* const table = tables_.block_tables + task.sequence * tables_.stride;
    const int64_t bytes = element_bytes(pool.dtype);
    for (int64_t position = std::max(piece * kPiece, seen); position < end;) {
        const int64_t block = table[position / pool.block_size], first = position % pool.block_size;
        const int64_t count = std::min(pool.block_size - first, end - position), at = position - piece * kPiece;
        const int64_t scale = task.head * pool.block_size;
        kernels_.pack_k(pool.k + block * pool.k_block_bytes + task.head * pool.key_width * pool.block_size * bytes,
                        scale_of(pool.k_scales, pool.k_scale_stride, block, scale), pool.dtype, pool.key_width,
                        pool.block_size, first, count, k, at);
        kernels_.pack_v(pool.v + block * pool.v_block_bytes + task.head * pool.block_size * pool.value_width * bytes,
                        scale_of(pool.v_scales, pool.v_scale_stride, block, scale), pool.dtype, pool.value_width, first,
                        count, v, value_floats_, at);
        position += count;
    }
}

void AttentionWork::locate(const AttendTask& task, int64_t piece, int64_t seen, int64_t end, PieceInPool& at) const {
    const PagedLayer& pool = layer_.pool;
    const int32_t* const table = tables_.block_tables + task.sequence * tables_.stride;
    const int64_t bytes = element_bytes(pool.dtype), begin = piece * kPiece;
    const auto place = [&](int64_t position, const char*& k, const char*& v, int64_t i, bool scales) {
        const int64_t block = table[position / pool.block_size], first = position % pool.block_size;
        k = pool.k + block * pool.k_block_bytes + (task.head * pool.key_width * pool.block_size + first) * bytes;
        v = pool.v + block * pool.v_block_bytes + (task.head * pool.block_size + first) * pool.value_width * bytes;
        if (!scales || !pool.k_scales) return;
        const int64_t scale = task.head * pool.block_size + first;
        at.k_scales[i] = scale_of(pool.k_scales, pool.k_scale_stride, block, scale);
        at.v_scales[i] = scale_of(pool.v_scales, pool.v_scale_stride, block, scale);
    };
    at.vectors = std::min<int64_t>(kPiece / kLanes, (end - begin + kLanes - 1) / kLanes);
    for (int64_t i = 0; i < kPiece / kLanes; ++i) {
        // Sixteen positions that no row sees may have no block: the first that have stand for them.
        if (i < at.vectors) place(std::max(begin + i * kLanes, seen / kLanes * kLanes), at.k[i], at.v[i], i, true);
        const int64_t next = begin + kPiece + i * kLanes;
        if (next < end) place(next, at.next_k[i], at.next_v[i], i, false);
        else at.next_k[i] = at.k[0], at.next_v[i] = at.v[0];  // read already
    }
}

void AttentionWork::attend(const AttendTask& task, int worker) const {
    const PagedLayer& pool = layer_.pool;
    const int64_t rows = task.rows * group_, key_width = pool.key_width;
    const Scratch scratch(scratch_ + worker * scratch_floats(key_width, pool.value_width, layer_.query_heads, pool.heads),
                          key_width, value_floats_, most_rows(group_));
    const int64_t begin_row = sequences_.row_begin[task.sequence];
    const int64_t length = sequences_.context_lens[task.sequence];
    const int64_t before = length - (sequences_.row_begin[task.sequence + 1] - begin_row);
    const int64_t first = before + task.first_row;  // position of the task's first token
    for (int64_t t = 0; t < task.rows; ++t)
        kernels_.scale(queries_.first + (begin_row + task.first_row + t) * queries_.stride + task.head * group_ * key_width,
                       layer_.scale, group_ * key_width, scratch.queries + t * group_ * key_width);
    const bool is_partial = task.partial >= 0;
    const int64_t begin = is_partial ? task.first_piece : first_seen(first, layer_.window) / kPiece;
    const int64_t last = first + task.rows - 1, end = is_partial ? task.piece_end : piece_end(last);
    const PieceRows piece_rows{scratch.queries, rows, key_width, pool.value_width, scratch.k, scratch.v,
                               scratch.low, scratch.high, layer_.softcap};
    PieceInPool few{};
    few.queries = scratch.queries;
    few.rows = rows;
    few.key_width = key_width;
    few.value_width = pool.value_width;
    few.dtype = pool.dtype;
    few.block_size = pool.block_size;
    few.low = scratch.low;
    few.high = scratch.high;
    few.softcap = layer_.softcap;
    const bool in_pool = reads_pool_ && rows <= kMostRowsInPool;
    Sums sums{scratch.largest, scratch.weight, scratch.values, value_floats_};
    for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t from = piece * kPiece;
        if (!in_pool) pack(task, piece, first_seen(first, layer_.window), std::min(from + kPiece, last + 1), scratch.k, scratch.v);
        for (int64_t t = 0; t < task.rows; ++t) {
            const int64_t low = std::max<int64_t>(0, first_seen(first + t, layer_.window) - from);
            const int64_t high = std::min<int64_t>(kPiece, first + t + 1 - from);
            for (int64_t g = 0; g < group_; ++g) {
                scratch.low[t * group_ + g] = static_cast<int32_t>(std::min(low, kPiece));
                scratch.high[t * group_ + g] = static_cast<int32_t>(std::max<int64_t>(high, 0));
            }
        }
        if (is_partial) {
            float* const at = partials_ + (task.partial + (piece - begin) * group_) * (value_floats_ + kLanes);
            sums = {at, at + group_, at + kLanes * group_, value_floats_};
        }
        const bool is_first = is_partial || piece == begin;
        if (in_pool) {
            locate(task, piece, first_seen(first, layer_.window), last + 1, few);
            kernels_.attend_in_pool(few, sums, is_first);
        } else {
            kernels_.attend(piece_rows, sums, is_first);
        }
    }
    if (is_partial) return;
    for (int64_t t = 0; t < task.rows; ++t)
        for (int64_t g = 0; g < group_; ++g) {
            const int64_t head = task.head * group_ + g;
            kernels_.finish(sums, t * group_ + g, pool.value_width, layer_.sinks ? layer_.sinks + head : nullptr,
                            out_ + (begin_row + task.first_row + t) * out_stride_ + head * pool.value_width);
        }
}

void AttentionWork::merge(const MergeTask& task) const {
    const int64_t stride = group_ * (value_floats_ + kLanes);
    float* const first = partials_ + task.partial * (value_floats_ + kLanes);
    const Sums sums{first, first + group_, first + kLanes * group_, value_floats_};
    kernels_.join(sums, task.pieces, stride, group_);
    const int64_t row = sequences_.row_begin[task.sequence], value_width = layer_.pool.value_width;
    for (int64_t g = 0; g < group_; ++g) {
        const int64_t head = task.head * group_ + g;
        kernels_.finish(sums, g, value_width, layer_.sinks ? layer_.sinks + head : nullptr,
                        out_ + row * out_stride_ + head * value_width);
    }
}

}  // namespace step
}  // namespace kvire
