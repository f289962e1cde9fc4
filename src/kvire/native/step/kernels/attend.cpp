// Rows of queries against one piece of a context.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "../attention.h"
#include "lanes.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {
namespace {

constexpr int kVectors = kPiece / kLanes;
constexpr float kHidden = -__builtin_inff();

#if defined(__AVX512F__)
constexpr int kRows = 6, kTogether = 4;  // a tile's sums fill most registers
#else
constexpr int kRows = 6, kTogether = 1;
#endif

KVIRE_STEP_INLINE float exponential_of(float x) {
    float lane[16];
    store(lane, exponential(broadcast(x)));
    return lane[0];
}

// Sixteen keys at one width, or sixteen numbers of one value, from a panel of floats.
struct PanelKeys {
    const float* k;
    KVIRE_STEP_INLINE_MEMBER F16x at(int64_t d, int64_t i) const { return load(k + d * kPiece + i * kLanes); }
    KVIRE_STEP_INLINE_MEMBER void prefetch(int64_t) const {}
};

struct PanelValues {
    const float* v;
    int64_t stride;
    KVIRE_STEP_INLINE_MEMBER F16x at(int64_t t, int64_t w) const { return load(v + t * stride + w * kLanes); }
    KVIRE_STEP_INLINE_MEMBER void prefetch(int64_t) const {}
};

template <DType D>
KVIRE_STEP_INLINE F16x stored(const char* from, int64_t index) {
    if constexpr (D == DType::float32) return load((const float*)from + index);
    if constexpr (D == DType::float16) return load_f16((const uint16_t*)from + index);
    if constexpr (D == DType::bfloat16) return load_bf16((const uint16_t*)from + index);
    return to_float(load_s8((const int8_t*)from + index));
}

// The same from the pool.
template <DType D>
struct PoolKeys {
    const PieceInPool& piece;
    KVIRE_STEP_INLINE_MEMBER F16x at(int64_t d, int64_t i) const {
        const F16x keys = stored<D>(piece.k[i], d * piece.block_size);
        if constexpr (D == DType::int8) return keys * load(piece.k_scales[i]);
        return keys;
    }
    KVIRE_STEP_INLINE_MEMBER void prefetch(int64_t d) const {
        if (d * piece.block_size * element_bytes(D) % 64) return;  // within a line
        for (int i = 0; i < kVectors; ++i)
            __builtin_prefetch(piece.next_k[i] + d * piece.block_size * element_bytes(D));
    }
};

template <DType D>
struct PoolValues {
    const PieceInPool& piece;
    KVIRE_STEP_INLINE_MEMBER F16x at(int64_t t, int64_t w) const {
        const F16x values = stored<D>(piece.v[t / kLanes], t % kLanes * piece.value_width + w * kLanes);
        if constexpr (D == DType::int8) return values * broadcast(piece.v_scales[t / kLanes][t % kLanes]);
        return values;
    }
    KVIRE_STEP_INLINE_MEMBER void prefetch(int64_t t) const {
        const char* const next = piece.next_v[t / kLanes] + t % kLanes * piece.value_width * element_bytes(D);
        for (int64_t at = 0; at < piece.value_width * element_bytes(D); at += 64) __builtin_prefetch(next + at);
    }
};

// scores[r][64]: the width ascending, one chain for each key.
template <int R, int Together, class Keys>
KVIRE_STEP_INLINE void score(const Keys& keys, const float* q, int64_t key_width, int64_t vectors, float* scores) {
    for (int64_t first = 0; first < vectors; first += Together) {
        F16x z[R][Together];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < Together; ++i) z[r][i] = zeros();
        for (int64_t d = 0; d < key_width; ++d) {
            if (first == 0) keys.prefetch(d);
            F16x k[Together];
#pragma GCC unroll 4
            for (int i = 0; i < Together; ++i) k[i] = keys.at(d, first + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const F16x each = broadcast(q[r * key_width + d]);
#pragma GCC unroll 4
                for (int i = 0; i < Together; ++i) z[r][i] = fma(each, k[i], z[r][i]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < Together; ++i) store(scores + r * kPiece + (first + i) * kLanes, z[r][i]);
    }
}

// Scores become weights; returns their largest, and the sum of the weights.
KVIRE_STEP_INLINE void weigh(float* scores, int32_t low, int32_t high, float softcap, float* most, float* weight) {
    for (int32_t i = (high + kLanes - 1) / kLanes * kLanes; i < kPiece; ++i) scores[i] = kHidden;  // not computed
    if (softcap != 0.0f)
        for (int i = 0; i < kVectors; ++i) {
            const F16x cap = broadcast(softcap);
            store(scores + i * kLanes, cap * hyperbolic_tangent(load(scores + i * kLanes) / cap));
        }
    for (int32_t i = 0; i < low; ++i) scores[i] = kHidden;
    for (int32_t i = high; i < kPiece; ++i) scores[i] = kHidden;
    F16x best = load(scores);
    for (int i = 1; i < kVectors; ++i) best = larger(best, load(scores + i * kLanes));
    *most = largest(best);
    const F16x base = broadcast(*most);
    F16x total = zeros();
    for (int i = 0; i < kVectors; ++i) {
        const F16x each = exponential(load(scores + i * kLanes) - base);
        store(scores + i * kLanes, each);
        total = total + each;
    }
    *weight = sum(total);
}

// The positions that a tile's rows see: from begin to end by any row, from all_begin to all_end by all that see some.
struct Seen {
    const int32_t *low, *high;  // of each row
    int64_t begin, end, all_begin, all_end;
};

Seen seen_by(const int32_t* low, const int32_t* high, int rows) {
    Seen seen{low, high, kPiece, 0, 0, kPiece};
    for (int r = 0; r < rows; ++r) {
        if (low[r] >= high[r]) continue;
        seen.begin = low[r] < seen.begin ? low[r] : seen.begin;
        seen.end = high[r] > seen.end ? high[r] : seen.end;
        seen.all_begin = low[r] > seen.all_begin ? low[r] : seen.all_begin;
        seen.all_end = high[r] < seen.all_end ? high[r] : seen.all_end;
    }
    if (seen.all_begin >= seen.all_end) seen.all_begin = seen.all_end = seen.end;
    return seen;
}

// Positions that only some rows see. A product with the weight of the others, 0, could be nan, or turn -0 into 0.
template <int R, int W, class Values>
KVIRE_STEP_INLINE void add_to_some(const Values& v, int64_t first, const float* weights, const Seen& seen, int64_t begin,
                                   int64_t end, F16x (*y)[W]) {
    for (int64_t t = begin; t < end; ++t) {
        F16x column[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) column[w] = v.at(t, first + w);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            if (t < seen.low[r] || t >= seen.high[r]) continue;
            const F16x each = broadcast(weights[r * kPiece + t]);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) y[r][w] = fma(each, column[w], y[r][w]);
        }
    }
}

// values[r] = the sum of weights times v, positions ascending.
template <int R, int W, class Values>
KVIRE_STEP_INLINE void add_columns(const Values& v, int64_t first, const float* weights, const Seen& seen, float* values,
                                   int64_t stride) {
    F16x y[R][W];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) y[r][w] = zeros();
    if constexpr (R > 1) add_to_some<R, W>(v, first, weights, seen, seen.begin, seen.all_begin, y);
    for (int64_t t = seen.all_begin; t < seen.all_end; ++t) {
        if (first == 0) v.prefetch(t);
        F16x column[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) column[w] = v.at(t, first + w);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16x each = broadcast(weights[r * kPiece + t]);
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) y[r][w] = fma(each, column[w], y[r][w]);
        }
    }
    if constexpr (R > 1) add_to_some<R, W>(v, first, weights, seen, seen.all_end, seen.end, y);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store(values + r * stride + (first + w) * kLanes, y[r][w]);
}

template <int R, class Values>
KVIRE_STEP_INLINE void add_values(const Values& v, int64_t value_width, const float* weights, const Seen& seen,
                                  float* values, int64_t stride) {
    const int64_t vectors = (value_width + kLanes - 1) / kLanes;
    int64_t w = 0;
    for (; w + kTogether <= vectors; w += kTogether)
        add_columns<R, kTogether>(v, w, weights, seen, values, stride);
    for (; w < vectors; ++w) add_columns<R, 1>(v, w, weights, seen, values, stride);
}

// What is left of one side's sums, and what is taken of the other's, once both count from the same largest score.
struct Shares {
    float best[kLanes], keep[kLanes], take[kLanes];
};

// Of sixteen pairs at once. Nothing is said of those of which a side saw nothing.
KVIRE_STEP_INLINE void share(const float* mine, const float* other, Shares* shares) {
    const F16x a = load(mine), b = load(other), best = larger(b, a);
    store(shares->best, best);
    store(shares->keep, exponential(a - best));
    store(shares->take, exponential(b - best));
}

// A side that saw nothing leaves the other as it is; its values are not even read.
KVIRE_STEP_INLINE void join_row(const Sums& sums, int64_t row, float other, float weight, const float* from, float best,
                                float keep, float take) {
    float* const values = sums.values + row * sums.stride;
    if (other == kHidden) return;
    if (sums.largest[row] == kHidden) {
        memcpy(values, from, (size_t)sums.stride * sizeof(float));
        sums.weight[row] = weight;
        sums.largest[row] = other;
        return;
    }
    for (int64_t d = 0; d < sums.stride; d += kLanes)
        store(values + d, fma(load(from + d), broadcast(take), load(values + d) * broadcast(keep)));
    sums.weight[row] = __builtin_fmaf(weight, take, sums.weight[row] * keep);
    sums.largest[row] = best;
}

// R rows from `row` on against one piece, then joined to their sums. scratch: R rows of values.
// A function of its own: as part of its callers it would take minutes to compile with sanitizers.
template <int R, class Keys, class Values, class Piece>
__attribute__((noinline)) void attend_tile(const Piece& rows, const Keys& keys, const Values& values, const Sums& sums, int64_t row,
                                   bool is_first, float* scratch) {
    const int32_t *const low = rows.low + row, *const high = rows.high + row;
    const Seen seen = seen_by(low, high, R);
    alignas(64) float scores[R * kPiece], most[kLanes] = {}, mine[kLanes] = {}, weight[R];
    for (int r = 0; r < R; ++r) most[r] = kHidden, weight[r] = 0.0f;
    if (seen.begin < seen.end) {
        const float* const q = rows.queries + row * rows.key_width;
        const int64_t vectors = (seen.end + kLanes - 1) / kLanes;
        if (vectors % kTogether) score<R, 1>(keys, q, rows.key_width, vectors, scores);
        else score<R, kTogether>(keys, q, rows.key_width, vectors, scores);
        for (int r = 0; r < R; ++r) {
            if (low[r] < high[r]) weigh(scores + r * kPiece, low[r], high[r], rows.softcap, most + r, weight + r);
            else memset(scores + r * kPiece, 0, kPiece * sizeof(float));
        }
        add_values<R>(values, rows.value_width, scores, seen, scratch, sums.stride);
    }
    const Sums own{sums.largest + row, sums.weight + row, sums.values + row * sums.stride, sums.stride};
    if (is_first) {
        for (int r = 0; r < R; ++r) own.largest[r] = kHidden, own.weight[r] = 0.0f;
        memset(own.values, 0, (size_t)(R * own.stride) * sizeof(float));
    }
    Shares shares{};
    if (!is_first) {
        for (int r = 0; r < R; ++r) mine[r] = own.largest[r];
        share(mine, most, &shares);
    }
    for (int r = 0; r < R; ++r)
        join_row(own, r, most[r], weight[r], scratch + r * own.stride, shares.best[r], shares.keep[r], shares.take[r]);
}

void attend(const PieceRows& rows, const Sums& sums, bool is_first) {
    float scratch[kRows * kWidest];
    const PanelKeys keys{rows.k};
    const PanelValues values{rows.v, sums.stride};
    int64_t row = 0;
    for (; row + kRows <= rows.rows; row += kRows) attend_tile<kRows>(rows, keys, values, sums, row, is_first, scratch);
    for (; row + 3 <= rows.rows; row += 3) attend_tile<3>(rows, keys, values, sums, row, is_first, scratch);
    for (; row < rows.rows; ++row) attend_tile<1>(rows, keys, values, sums, row, is_first, scratch);
}

template <DType D>
void attend_stored(const PieceInPool& rows, const Sums& sums, bool is_first) {
    float scratch[kFewRows * kWidest];
    const PoolKeys<D> keys{rows};
    const PoolValues<D> values{rows};
    int64_t row = 0;
    for (; row + kFewRows <= rows.rows; row += kFewRows)
        attend_tile<kFewRows>(rows, keys, values, sums, row, is_first, scratch);
    switch (rows.rows - row) {
        case 1: return attend_tile<1>(rows, keys, values, sums, row, is_first, scratch);
        case 2: return attend_tile<2>(rows, keys, values, sums, row, is_first, scratch);
        case 3: return attend_tile<3>(rows, keys, values, sums, row, is_first, scratch);
        default: return;
    }
}

void attend_in_pool(const PieceInPool& rows, const Sums& sums, bool is_first) {
    switch (rows.dtype) {
        case DType::float32: return attend_stored<DType::float32>(rows, sums, is_first);
        case DType::float16: return attend_stored<DType::float16>(rows, sums, is_first);
        case DType::bfloat16: return attend_stored<DType::bfloat16>(rows, sums, is_first);
        case DType::int8: return attend_stored<DType::int8>(rows, sums, is_first);
    }
}

// Pieces 1 .. pieces - 1, `apart` floats from one to the next, to piece 0, ascending. Shares depend on largest scores
// alone, so those of sixteen pieces are computed at once.
void join(const Sums& first, int64_t pieces, int64_t apart, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t begin = 1; begin < pieces; begin += kLanes) {
            const int64_t count = pieces - begin < kLanes ? pieces - begin : kLanes;
            float mine[kLanes] = {}, other[kLanes] = {}, best = first.largest[row];
            for (int64_t i = 0; i < count; ++i) {
                mine[i] = best;
                other[i] = first.largest[row + (begin + i) * apart];
                best = other[i] > best ? other[i] : best;
            }
            Shares shares;
            share(mine, other, &shares);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t at = (begin + i) * apart;
                join_row(first, row, other[i], first.weight[row + at], first.values + row * first.stride + at,
                         shares.best[i], shares.keep[i], shares.take[i]);
            }
        }
    }
}

void finish(const Sums& sums, int64_t row, int64_t value_width, const float* sink, float* out) {
    float share = 1.0f, weight = sums.weight[row];
    if (sink) {
        const float mine = sums.largest[row], best = *sink > mine ? *sink : mine;
        share = exponential_of(mine - best);
        weight = weight * share + exponential_of(*sink - best);
    }
    const F16x factor = broadcast(share / weight);
    const float* const values = sums.values + row * sums.stride;
    int64_t d = 0;
    for (; d + kLanes <= value_width; d += kLanes) store(out + d, load(values + d) * factor);
    if (d < value_width) store_part(out + d, load(values + d) * factor, value_width - d);
}

void scale(const float* from, float factor, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i) * broadcast(factor));
    for (; i < count; ++i) to[i] = from[i] * factor;
}

// --- pieces of KV as floats ------------------------------------------------------------------------------

KVIRE_STEP_INLINE F16x elements(const char* from, DType dtype, int64_t index) {
    switch (dtype) {
        case DType::float32: return load((const float*)from + index);
        case DType::float16: return load_f16((const uint16_t*)from + index);
        case DType::bfloat16: return load_bf16((const uint16_t*)from + index);
        case DType::int8: break;
    }
    return to_float(load_s8((const int8_t*)from + index));
}

KVIRE_STEP_INLINE float element(const char* from, DType dtype, int64_t index) {
    alignas(64) char padded[64] = {};
    const int64_t bytes = element_bytes(dtype);
    memcpy(padded, from + index * bytes, (size_t)bytes);
    float lane[16];
    store(lane, elements(padded, dtype, 0));
    return lane[0];
}

void pack_k(const char* from, const float* scales, DType dtype, int64_t width, int64_t block_size, int64_t first,
            int64_t count, float* panel, int64_t at) {
    for (int64_t d = 0; d < width; ++d) {
        float* const to = panel + d * kPiece + at;
        const int64_t row = d * block_size + first;
        int64_t t = 0;
        for (; t + kLanes <= count; t += kLanes) {
            F16x values = elements(from, dtype, row + t);
            if (scales) values = values * load(scales + first + t);
            store(to + t, values);
        }
        for (; t < count; ++t) {
            const float value = element(from, dtype, row + t);
            to[t] = scales ? value * scales[first + t] : value;
        }
    }
}

void pack_v(const char* from, const float* scales, DType dtype, int64_t width, int64_t first, int64_t count,
            float* panel, int64_t stride, int64_t at) {
    for (int64_t t = 0; t < count; ++t) {
        float* const to = panel + (at + t) * stride;
        const int64_t row = (first + t) * width;
        const F16x factor = broadcast(scales ? scales[first + t] : 1.0f);
        int64_t d = 0;
        for (; d + kLanes <= width; d += kLanes) {
            const F16x values = elements(from, dtype, row + d);
            store(to + d, scales ? values * factor : values);
        }
        for (; d < width; ++d) {
            const float value = element(from, dtype, row + d);
            to[d] = scales ? value * scales[first + t] : value;
        }
        for (; d < stride; ++d) to[d] = 0.0f;
    }
}

}  // namespace

const AttentionKernels attention_kernels = {pack_k, pack_v, attend, attend_in_pool, join, finish, scale};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
