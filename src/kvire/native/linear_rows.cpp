// A linear layer for few rows: every weight is read once, as fast as memory gives it.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

// Each output is one chain of multiply-adds over the width, eight lanes wide, in ascending order, whatever the
// tile: so a row's result does not depend on how many others there are. Eight chains hide the latency.
template <int Weights, int Rows>
KVIRE_INLINE void tile(const LinearRows& task, int64_t weight, int64_t row) {
    const float* w = task.weights + weight * task.width;
    const float* x = task.x + row * task.width;
    v8f chains[Weights][Rows] = {};
    int64_t i = 0;
    for (; i + 8 <= task.width; i += 8) {
        v8f values[Rows];
        for (int m = 0; m < Rows; ++m) values[m] = load8(x + m * task.width + i);
        for (int n = 0; n < Weights; ++n) {
            const float* from = w + n * task.width + i;
            // The same place in the next tile, line by line; tiles.h says why into the second-level cache.
            if (!(i & 8)) __builtin_prefetch(from + Weights * task.width, 0, /* second level */ 2);
            const v8f lanes = load8(from);
            for (int m = 0; m < Rows; ++m) chains[n][m] += lanes * values[m];
        }
    }
    if (i < task.width)
        for (int n = 0; n < Weights; ++n)
            for (int m = 0; m < Rows; ++m)
                chains[n][m] += load_part(w + n * task.width + i, task.width - i) *
                                load_part(x + m * task.width + i, task.width - i);
    for (int n = 0; n < Weights; ++n)
        for (int m = 0; m < Rows; ++m) {
            const float bias = task.bias ? task.bias[weight + n] : 0.0f;
            task.out[(row + m) * task.out_width + weight + n] = sum(chains[n][m]) + bias;
        }
}

// `Weights` weight rows against all rows of x: they stay in the first-level cache meanwhile.
template <int Weights>
KVIRE_INLINE void strip(const LinearRows& task, int64_t weight) {
    int64_t row = 0;
    for (; row + 4 <= task.rows; row += 4) tile<Weights, 4>(task, weight, row);
    if (task.rows - row == 3) tile<Weights, 3>(task, weight, row);
    if (task.rows - row == 2) tile<Weights, 2>(task, weight, row);
    if (task.rows - row == 1) tile<Weights, 1>(task, weight, row);
}

}  // namespace

void linear_rows(const LinearRows& task, int64_t begin, int64_t end) {
    int64_t weight = begin;
    if (task.rows == 1)
        for (; weight + 8 <= end; weight += 8) tile<8, 1>(task, weight, 0);
    if (task.rows == 2)
        for (; weight + 4 <= end; weight += 4) tile<4, 2>(task, weight, 0);
    for (; weight + 2 <= end; weight += 2) strip<2>(task, weight);
    if (weight < end) strip<1>(task, weight);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
