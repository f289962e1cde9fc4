// Attention of many rows over one tile of packed keys and values: two matrix products with a softmax in between,
// six rows at a time, so that their scores stay in the first-level cache.
//
// Each sum is one chain of multiply-adds in ascending order whatever the tile of rows, and tiles of keys are cut at
// fixed positions: a row's result does not depend on the chunk in which it was computed.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

constexpr float kInfinity = __builtin_inff();

// Columns begin .. end - 1 of a tile.
struct Columns {
    int64_t begin, end;
};

KVIRE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// What `row` sees of the tile.
KVIRE_INLINE Columns seen_by(const QueryRows& rows, const PackedTile& tile, int64_t row) {
    const int64_t position = rows.first + row / rows.group;
    const int64_t oldest = rows.window > 0 ? position - rows.window + 1 : 0;
    const int64_t origin = tile.begin / kTileTokens * kTileTokens;
    const int64_t end = clamp(position + 1, tile.begin, tile.end);
    return {clamp(oldest, tile.begin, end) - origin, end - origin};
}

// sums[r][w] += a[r] * b[w] for `count` steps. a_row, a_step: from row to row and from step to step.
template <int Rows, int Vectors>
KVIRE_INLINE void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t count,
                           v8f (&sums)[Rows][Vectors]) {
    for (int64_t i = 0; i < count; ++i, a += a_step, b += kPanel) {
        v8f lanes[Vectors];
#pragma GCC unroll 2
        for (int w = 0; w < Vectors; ++w) lanes[w] = load8(b + w * 8);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            const v8f factor = broadcast(a[r * a_row]);
#pragma GCC unroll 2
            for (int w = 0; w < Vectors; ++w) sums[r][w] += factor * lanes[w];
        }
    }
}

// Scores of whole panels around `seen`.
template <int Rows>
KVIRE_INLINE void score(const float* queries, int64_t width, const float* k, Columns seen, float* scores) {
    for (int64_t at = seen.begin; at < seen.end; at += kPanel) {
        v8f sums[Rows][2] = {};
        multiply<Rows, 2>(queries, 1, Rows, k + at * width, width, sums);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            store8(scores + r * kTileTokens + at, sums[r][0]);
            store8(scores + r * kTileTokens + at + 8, sums[r][1]);
        }
    }
}

// values[r] += weights[r] times V, in Vectors vectors of columns.
template <int Rows, int Vectors>
KVIRE_INLINE void add_columns(const float* weights, const float* v, Columns seen, int64_t row, float* values) {
    v8f sums[Rows][Vectors];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int w = 0; w < Vectors; ++w) sums[r][w] = load8(values + r * row + w * 8);
    multiply<Rows, Vectors>(weights + seen.begin, kTileTokens, 1, v + seen.begin * kPanel, seen.end - seen.begin, sums);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int w = 0; w < Vectors; ++w) store8(values + r * row + w * 8, sums[r][w]);
}

template <int Rows>
KVIRE_INLINE void add_values(const float* weights, const float* v, Columns seen, int64_t width, float* values) {
    const int64_t row = padded(width);
    int64_t d = 0;
    for (; d + kPanel <= row; d += kPanel)
        add_columns<Rows, 2>(weights, v + d * kTileTokens, seen, row, values + d);
    if (d < row) add_columns<Rows, 1>(weights, v + d * kTileTokens, seen, row, values + d);
}

void cap_scores(float* row, Columns panels, float cap) {
    for (int64_t t = panels.begin; t < panels.end; t += 8)
        store8(row + t, hyperbolic_tangent(load8(row + t) / broadcast(cap)) * broadcast(cap));
}

// Turns a row's scores into weights and brings its sums to the new maximum. panels: where there are scores.
void weigh(float* row, Columns seen, Columns panels, int64_t width, float* maximum_of, float* weight_of,
           float* values) {
    for (int64_t t = panels.begin; t < seen.begin; ++t) row[t] = -kInfinity;
    for (int64_t t = seen.end; t < panels.end; ++t) row[t] = -kInfinity;
    v8f best = broadcast(*maximum_of);
    for (int64_t t = panels.begin; t < panels.end; t += 8) best = maximum(best, load8(row + t));
    const float found = largest(best);
    const float base = found > -kInfinity ? found : 0.0f;  // a window may show a row nothing of this tile
    v8f total = {};
    for (int64_t t = panels.begin; t < panels.end; t += 8) {
        const v8f weight = exponential(load8(row + t) - broadcast(base));
        store8(row + t, weight);
        total += weight;
    }
    if (found > *maximum_of) {
        const v8f keep = exponential(broadcast(*maximum_of - base));
        *weight_of *= keep[0];
        for (int64_t d = 0; d < padded(width); d += 8) store8(values + d, load8(values + d) * keep);
    }
    *maximum_of = found;
    *weight_of += sum(total);
}

template <int Rows>
void attend(const QueryRows& rows, const float* packed, const PackedTile& tile, const SpanPartial& sums,
            int64_t first) {
    const Columns seen{seen_by(rows, tile, first).begin, seen_by(rows, tile, first + Rows - 1).end};
    if (seen.begin >= seen.end) return;
    const Columns panels{seen.begin / kPanel * kPanel, panelled(seen.end)};
    const int64_t value_row = padded(rows.value_width);
    alignas(32) float scores[Rows * kTileTokens];
    score<Rows>(packed + first * rows.key_width, rows.key_width, tile.k, panels, scores);
    for (int r = 0; r < Rows; ++r) {
        float* const row = scores + r * kTileTokens;
        if (rows.softcap > 0) cap_scores(row, panels, rows.softcap);
        weigh(row, seen_by(rows, tile, first + r), panels, rows.value_width, sums.maximum + first + r,
              sums.weight + first + r, sums.values + (first + r) * value_row);
    }
    add_values<Rows>(scores, tile.v, seen, rows.value_width, sums.values + first * value_row);
}

}  // namespace

void attend_tile(const QueryRows& rows, const float* packed, const PackedTile& tile, const SpanPartial& sums) {
    const int64_t count = rows.tokens * rows.group;
    int64_t row = 0;
    for (; row + kTileRows <= count; row += kTileRows) attend<kTileRows>(rows, packed, tile, sums, row);
    switch (count - row) {
        case 5: return attend<5>(rows, packed, tile, sums, row);
        case 4: return attend<4>(rows, packed, tile, sums, row);
        case 3: return attend<3>(rows, packed, tile, sums, row);
        case 2: return attend<2>(rows, packed, tile, sums, row);
        case 1: return attend<1>(rows, packed, tile, sums, row);
        default: return;
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
