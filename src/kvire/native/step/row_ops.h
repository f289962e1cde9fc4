// Operations that compute a row from that row alone: norms, rotary positions, activations, sums. Everything between
// the products and the attention of a step is made of them.
#pragma once

#include <stdint.h>

namespace kvire {
namespace step {

// The numbers are part of the interface with kvire/step/program.py.
enum class RowKind : int {
    copy = 0,
    negative = 1,
    square = 2,
    root = 3,
    inverse_root = 4,
    exponential = 5,
    sine = 6,
    cosine = 7,
    tanh = 8,
    sigmoid = 9,
    silu = 10,
    gelu_tanh = 11,
    gelu_erf = 12,
    relu = 13,
    magnitude = 14,
    add = 20,
    subtract = 21,
    multiply = 22,
    divide = 23,
    larger = 24,
    smaller = 25,
    sum = 30,    // over the last dimension, as the next three
    mean = 31,
    largest = 32,
    softmax = 33,
    rms_norm = 40,     // x, and a weight unless there is one source; numbers: epsilon, what is added to the weight
    layer_norm = 41,   // x, weight, bias; numbers: epsilon
    rotary = 42,       // x, cosines, sines: x * cos + turned x * sin, the halves of the last dimension turned
    silu_times = 43,   // silu(first) * second, as the next two
    gelu_tanh_times = 44,
    gelu_erf_times = 45,
};

constexpr int kDimensions = 4, kSources = 3;

// Where an operand's numbers are: from a pointer on, `stride` floats apart in each dimension; 0: the same again.
struct RowStrides {
    int64_t stride[kDimensions];
};

// One operation on one row. shape: of the result, or of the source of a reduction, outermost first, padded with ones
// in front.
struct RowShape {
    RowKind kind;
    int sources;
    int64_t shape[kDimensions];
    RowStrides to, from[kSources];
    float number[2];
};

struct RowKernels {
    void (*run)(const RowShape& operation, float* to, const float* const* from);
};

namespace baseline {
extern const RowKernels row_kernels;
}
namespace avx2 {
extern const RowKernels row_kernels;
}
namespace avx512 {
extern const RowKernels row_kernels;
}

const RowKernels& row_kernels();

// Throws std::invalid_argument for a kind that does not exist, or has another number of sources.
void check_row_shape(const RowShape& operation);

}  // namespace step
}  // namespace kvire
