// Root mean square normalisation in one pass over memory; a row's result does not depend on the others.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

// Four chains hide the latency of the additions.
float sum_of_squares(const float* x, int64_t width) {
    v8f chains[4] = {};
    int64_t i = 0;
    for (; i + 32 <= width; i += 32) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
            const v8f lanes = load8(x + i + 8 * c);
            chains[c] += lanes * lanes;
        }
    }
    for (; i < width; i += 8) {
        const v8f lanes = i + 8 <= width ? load8(x + i) : load_part(x + i, width - i);
        chains[0] += lanes * lanes;
    }
    return sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

}  // namespace

void rms_norm(const RmsNorm& task, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* const x = task.x + row * task.width;
        float* const out = task.out + row * task.width;
        const float mean = sum_of_squares(x, task.width) / (float)task.width;
        const float scale = 1.0f / __builtin_sqrtf(mean + task.epsilon);
        int64_t i = 0;
        for (; i + 8 <= task.width; i += 8)
            store8(out + i, load8(task.weights + i) * (load8(x + i) * broadcast(scale)));
        for (; i < task.width; ++i) out[i] = task.weights[i] * (x[i] * scale);
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
