// Attention of one row of queries over one span of its context: all heads together, because the K of all
// heads of a block is one run of memory, then the V, and memory is what limits decoding.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "tiles.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

template <int N>
struct Constant {
    static constexpr int value = N;
};

// Query heads that share a KV head go through the kernels at most this many at a time, so that the
// accumulators (times four tokens, or two vectors of V) fit sixteen registers.
constexpr int kScoreHeads = 3;
constexpr int kValueHeads = 4;

// f(first head, how many as a compile-time constant) until all `heads` have had their turn.
template <int Most, class F>
KVIRE_INLINE void each_group(int64_t heads, F f) {
    int64_t first = 0;
    const auto take = [&](auto size) KVIRE_LAMBDA {
        f(first, size);
        first += size.value;
    };
    while (first < heads) {
        const int64_t left = heads - first;
        if (Most >= 4 && left >= 4) take(Constant<4>());
        else if (left == 3 || left > 4) take(Constant<3>());
        else if (left >= 2) take(Constant<2>());  // four as two and two
        else take(Constant<1>());
    }
}

// Prefetches what lies `Bytes` further on from call to call; null: nothing.
template <int64_t Bytes>
KVIRE_INLINE void prefetch_next(const char*& ahead) {
    if (!ahead) return;
    for (int64_t at = 0; at < Bytes; at += TileStream::kLine) TileStream::prefetch(ahead + at);
    ahead += Bytes;
}

// sum_of[g][t] += q[g] . k[t], still in lanes; tokens are `stride` elements apart.
template <int G, int T, class E>
KVIRE_INLINE void dot_lanes(const float* q, const E* k, int64_t stride, int64_t width, const char*& ahead,
                            v8f (&sum_of)[G][4]) {
    int64_t d = 0;
    const auto add = [&](auto load) KVIRE_LAMBDA {
        prefetch_next<T * 8 * sizeof(E)>(ahead);
        v8f head[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) head[g] = load8(q + g * padded(width) + d);
        // One key at a time: with twelve sums and three heads it is the last of sixteen registers.
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            const v8f key = load(k + t * stride + d);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) sum_of[g][t] += key * head[g];
        }
    };
    for (; d + 8 <= width; d += 8) add([](const E* from) KVIRE_LAMBDA { return load8(from); });
    if (d < width) add([&](const E* from) KVIRE_LAMBDA { return load_part(from, width - d); });
}

// scores[g][t] = q[g] . k[t]
template <int G, class E>
KVIRE_INLINE void dot(const float* q, const E* k, int64_t stride, int64_t tokens, int64_t width, const char* ahead,
                      float* scores) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4) {
        v8f sum_of[G][4] = {};
        dot_lanes<G, 4>(q, k + t * stride, stride, width, ahead, sum_of);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g)
            store_bits(scores + g * kSpanTokens + t, sums(sum_of[g][0], sum_of[g][1], sum_of[g][2], sum_of[g][3]));
    }
    for (; t < tokens; ++t) {
        v8f sum_of[G][4] = {};
        dot_lanes<G, 1>(q, k + t * stride, stride, width, ahead, sum_of);
        for (int g = 0; g < G; ++g) scores[g * kSpanTokens + t] = sum(sum_of[g][0]);
    }
}

// values[g] += sum over t of weights[g][t] * v[t], in W vectors of columns. row: from one head's values to the next.
template <int G, int W, class E, class Load>
KVIRE_INLINE void add_columns(const float* weights, const E* v, int64_t stride, int64_t tokens, int64_t row,
                              const char*& ahead, float* values, Load load) {
    v8f sum_of[G][W];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) sum_of[g][w] = load8(values + g * row + w * 8);
    for (int64_t t = 0; t < tokens; ++t) {
        prefetch_next<W * 8 * sizeof(E)>(ahead);
        v8f column[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) column[w] = load(v + t * stride + w * 8);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const v8f weight = broadcast(weights[g * kSpanTokens + t]);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) sum_of[g][w] += weight * column[w];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store8(values + g * row + w * 8, sum_of[g][w]);
}

template <int G, class E>
KVIRE_INLINE void add_values(const float* weights, const E* v, int64_t stride, int64_t tokens, int64_t width,
                             const char* ahead, float* values) {
    const auto whole = [](const E* from) KVIRE_LAMBDA { return load8(from); };
    const int64_t row = padded(width);
    int64_t d = 0;
    for (; d + 16 <= width; d += 16) add_columns<G, 2>(weights, v + d, stride, tokens, row, ahead, values + d, whole);
    if (d + 8 <= width) {
        add_columns<G, 1>(weights, v + d, stride, tokens, row, ahead, values + d, whole);
        d += 8;
    }
    if (d == width) return;
    const auto part = [&](const E* from) KVIRE_LAMBDA { return load_part(from, width - d); };
    add_columns<G, 1>(weights, v + d, stride, tokens, row, ahead, values + d, part);
}

void scale_queries(const SpanQuery& task, int64_t width, float* q) {
    const int64_t row = padded(width);
    for (int64_t h = 0; h < task.query_heads; ++h) {
        const float* from = task.query + h * task.query_head_stride;
        for (int64_t d = 0; d < width; ++d) q[h * row + d] = from[d] * task.scale;
        for (int64_t d = width; d < row; ++d) q[h * row + d] = 0.0f;
    }
}

void cap_scores(float* row, int64_t count, float cap) {
    for (int64_t t = 0; t < count; t += 8)
        store8(row + t, hyperbolic_tangent(load8(row + t) / broadcast(cap)) * broadcast(cap));
}

// Turns the scores of each head into weights, in place; the last vector is filled up with weights of zero.
void weigh(const SpanQuery& task, float* scores, const SpanPartial& out) {
    const int64_t tokens = task.end - task.begin, whole = padded(tokens);
    for (int64_t h = 0; h < task.query_heads; ++h) {
        float* row = scores + h * kSpanTokens;
        for (int64_t t = tokens; t < whole; ++t) row[t] = 0.0f;
        if (task.softcap > 0) cap_scores(row, whole, task.softcap);
        for (int64_t t = tokens; t < whole; ++t) row[t] = -__builtin_inff();
        v8f best = load8(row);
        for (int64_t t = 8; t < whole; t += 8) best = maximum(best, load8(row + t));
        const v8f base = broadcast(largest(best));
        v8f total = {};
        for (int64_t t = 0; t < whole; t += 8) {
            const v8f weight = exponential(load8(row + t) - base);
            store8(row + t, weight);
            total += weight;
        }
        out.maximum[h] = base[0];
        out.weight[h] = sum(total);
    }
}

// Multiplies what each query head has for a token with the scale of its KV head's row there.
void apply_scales(const PagedLayer& layer, const SpanQuery& task, const float* base, int64_t stride, float* rows) {
    const int64_t tokens = task.end - task.begin, group = task.query_heads / layer.heads;
    for (int64_t h = 0; h < layer.heads; ++h) {
        float scales[kSpanTokens];
        for (int64_t t = 0; t < tokens;) {
            const int64_t position = task.begin + t, at = position % layer.block_size;
            const float* from = base + task.block_table[position / layer.block_size] * stride + at * layer.heads + h;
            const int64_t end = smaller(t + layer.block_size - at, tokens);
            for (; t < end; ++t, from += layer.heads) scales[t] = *from;
        }
        for (int64_t g = 0; g < group; ++g) {
            float* row = rows + (h * group + g) * kSpanTokens;
            for (int64_t t = 0; t < tokens; ++t) row[t] *= scales[t];
        }
    }
}

template <class E>
void attend(const PagedLayer& layer, const SpanQuery& task, float* scratch, const SpanPartial& out) {
    const int64_t heads = layer.heads, group = task.query_heads / heads;
    const int64_t k_width = layer.key_width, v_width = layer.value_width;
    const int64_t q_row = padded(k_width), v_row = padded(v_width);
    float* const q = scratch;
    float* const scores = scratch + task.query_heads * q_row;
    const TileStream stream(layer, task);
    scale_queries(task, k_width, q);
    memset(out.values, 0, (size_t)(task.query_heads * v_row) * sizeof(float));

    for (const Tile* tile = stream.k_begin(); tile < stream.v_begin(); ++tile) {
        for (int64_t h = 0; h < heads; ++h) {
            const E* k = (const E*)tile->rows + h * k_width;
            const char* ahead = stream.ahead_of(tile) + h * tile->tokens * k_width * (int64_t)sizeof(E);
            each_group<kScoreHeads>(group, [&](int64_t first, auto size) KVIRE_LAMBDA {
                const int64_t row = h * group + first;
                dot<size.value>(q + row * q_row, k, heads * k_width, tile->tokens, k_width, first ? nullptr : ahead,
                                scores + row * kSpanTokens + tile->offset);
            });
        }
    }
    if (has_scales<E>) apply_scales(layer, task, layer.k_scales, layer.k_scale_stride, scores);
    weigh(task, scores, out);
    if (has_scales<E>) apply_scales(layer, task, layer.v_scales, layer.v_scale_stride, scores);
    for (const Tile* tile = stream.v_begin(); tile < stream.end(); ++tile) {
        for (int64_t h = 0; h < heads; ++h) {
            const E* v = (const E*)tile->rows + h * v_width;
            const char* ahead = stream.ahead_of(tile) + h * tile->tokens * v_width * (int64_t)sizeof(E);
            each_group<kValueHeads>(group, [&](int64_t first, auto size) KVIRE_LAMBDA {
                const int64_t row = h * group + first;
                add_values<size.value>(scores + row * kSpanTokens + tile->offset, v, heads * v_width, tile->tokens,
                                       v_width, first ? nullptr : ahead, out.values + row * v_row);
            });
        }
    }
}

}  // namespace

void attend_span(const PagedLayer& layer, const SpanQuery& task, float* scratch, const SpanPartial& out) {
    switch (layer.dtype) {
        case DType::float32: return attend<float>(layer, task, scratch, out);
        case DType::float16: return attend<f16>(layer, task, scratch, out);
        case DType::bfloat16: return attend<bf16>(layer, task, scratch, out);
        case DType::int8: return attend<int8_t>(layer, task, scratch, out);
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
