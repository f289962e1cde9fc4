// Operations on one row, in the order of docs/adr/0019-one-arithmetic.md.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "../row_ops.h"

#include <math.h>

#include "lanes.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {
namespace {

constexpr int kLast = kDimensions - 1;

// Sixteen numbers of an operand's last dimension, fewer at its end.
struct Line {
    const float* first;
    int64_t stride;
};

KVIRE_STEP_INLINE F16x lanes_of(Line line, int64_t at, int64_t count) {
    if (line.stride == 0) return broadcast(*line.first);
    if (line.stride == 1) return count >= kLanes ? load(line.first + at) : load_part(line.first + at, count);
    float lane[16];
    for (int64_t i = 0; i < 16; ++i) lane[i] = i < count ? line.first[(at + i) * line.stride] : 0.0f;
    return load(lane);
}

KVIRE_STEP_INLINE void put(float* to, int64_t stride, int64_t at, int64_t count, F16x values) {
    if (stride == 1) return count >= kLanes ? store(to + at, values) : store_part(to + at, values, count);
    float lane[16];
    store(lane, values);
    for (int64_t i = 0; i < 16 && i < count; ++i) to[(at + i) * stride] = lane[i];
}

// f(offset of the result, offsets of the sources) for every index of the dimensions before the last.
template <class F>
KVIRE_STEP_INLINE void each_line(const RowShape& of, F f) {
    for (int64_t a = 0; a < of.shape[0]; ++a)
        for (int64_t b = 0; b < of.shape[1]; ++b)
            for (int64_t c = 0; c < of.shape[2]; ++c) {
                int64_t from[kSources];
                for (int s = 0; s < kSources; ++s) {
                    const int64_t* const stride = of.from[s].stride;
                    from[s] = a * stride[0] + b * stride[1] + c * stride[2];
                }
                f(a * of.to.stride[0] + b * of.to.stride[1] + c * of.to.stride[2], from);
            }
}

// --- one lane from one, or from two ----------------------------------------------------------------------

// 1 / (1 + e^-x): e^-x is bounded, so that nothing overflows where the result is 0 anyway.
KVIRE_STEP_INLINE F16x sigmoid(F16x x) {
    const F16x one = broadcast(1.0f);
    return one / (one + exponential(smaller(negative(x), broadcast(88.0f))));
}

KVIRE_STEP_INLINE F16x silu(F16x x) {
    const F16x y = x / (broadcast(1.0f) + exponential(smaller(negative(x), broadcast(88.0f))));
    return where_less(x, broadcast(-88.0f), zeros(), y);
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
KVIRE_STEP_INLINE F16x gelu_tanh(F16x x) {
    const F16x cube = x * x * x;
    const F16x inner = broadcast(0.7978845608028654f) * fma(broadcast(0.044715f), cube, x);
    return broadcast(0.5f) * x * (broadcast(1.0f) + hyperbolic_tangent(inner));
}

// In double precision, rounded once: then it does not depend on which processor computes it.
template <class F>
KVIRE_STEP_INLINE F16x by_double(F16x x, F function) {
    float lane[16];
    store(lane, x);
    for (int i = 0; i < 16; ++i) lane[i] = (float)function((double)lane[i]);
    return load(lane);
}

KVIRE_STEP_INLINE F16x gelu_erf(F16x x) {
    const F16x inner = by_double(x, [](double each) { return 1.0 + erf(each * 0.70710678118654752); });
    return broadcast(0.5f) * x * inner;
}

template <RowKind K>
KVIRE_STEP_INLINE F16x unary(F16x x) {
    switch (K) {
        case RowKind::negative: return negative(x);
        case RowKind::square: return x * x;
        case RowKind::root: return root(x);
        case RowKind::inverse_root: return broadcast(1.0f) / root(x);
        case RowKind::exponential: return exponential(x);
        case RowKind::sine: return by_double(x, [](double each) { return sin(each); });
        case RowKind::cosine: return by_double(x, [](double each) { return cos(each); });
        case RowKind::tanh: return hyperbolic_tangent(x);
        case RowKind::sigmoid: return sigmoid(x);
        case RowKind::silu: return silu(x);
        case RowKind::gelu_tanh: return gelu_tanh(x);
        case RowKind::gelu_erf: return gelu_erf(x);
        case RowKind::relu: return larger(x, zeros());
        case RowKind::magnitude: return larger(x, negative(x));
        default: return x;
    }
}

template <RowKind K>
KVIRE_STEP_INLINE F16x binary(F16x x, F16x y) {
    switch (K) {
        case RowKind::add: return x + y;
        case RowKind::subtract: return x - y;
        case RowKind::multiply: return x * y;
        case RowKind::divide: return x / y;
        case RowKind::larger: return larger(x, y);
        case RowKind::smaller: return smaller(x, y);
        case RowKind::silu_times: return silu(x) * y;
        case RowKind::gelu_tanh_times: return gelu_tanh(x) * y;
        case RowKind::gelu_erf_times: return gelu_erf(x) * y;
        default: return x;
    }
}

template <RowKind K>
void each_one(const RowShape& of, float* to, const float* const* from) {
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line line{from[0] + offsets[0], of.from[0].stride[kLast]};
        for (int64_t i = 0; i < of.shape[kLast]; i += kLanes) {
            const int64_t count = of.shape[kLast] - i;
            put(to + at, of.to.stride[kLast], i, count, unary<K>(lanes_of(line, i, count)));
        }
    });
}

template <RowKind K>
void each_two(const RowShape& of, float* to, const float* const* from) {
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line first{from[0] + offsets[0], of.from[0].stride[kLast]};
        const Line second{from[1] + offsets[1], of.from[1].stride[kLast]};
        for (int64_t i = 0; i < of.shape[kLast]; i += kLanes) {
            const int64_t count = of.shape[kLast] - i;
            put(to + at, of.to.stride[kLast], i, count,
                binary<K>(lanes_of(first, i, count), lanes_of(second, i, count)));
        }
    });
}

// --- over the last dimension -----------------------------------------------------------------------------

template <class F>
KVIRE_STEP_INLINE float sum_of(Line line, int64_t width, F each) {
    F16x total = zeros();
    for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t count = width - i;
        if (count >= kLanes || line.stride != 0) {
            total = total + each(lanes_of(line, i, count));
        } else {  // one number, as often as it counts
            float lane[16] = {};
            for (int64_t j = 0; j < count; ++j) lane[j] = *line.first;
            total = total + each(load(lane));
        }
    }
    return sum(total);
}

KVIRE_STEP_INLINE float largest_of(Line line, int64_t width) {
    float best = line.first[0];
    for (int64_t i = 1; i < width; ++i) best = line.first[i * line.stride] > best ? line.first[i * line.stride] : best;
    return best;
}

void reduce(const RowShape& of, float* to, const float* const* from) {
    const int64_t width = of.shape[kLast];
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line line{from[0] + offsets[0], of.from[0].stride[kLast]};
        if (of.kind == RowKind::largest) {
            to[at] = largest_of(line, width);
            return;
        }
        const float total = sum_of(line, width, [](F16x x) { return x; });
        to[at] = of.kind == RowKind::mean ? total / (float)width : total;
    });
}

void softmax(const RowShape& of, float* to, const float* const* from) {
    const int64_t width = of.shape[kLast];
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line line{from[0] + offsets[0], of.from[0].stride[kLast]};
        const F16x most = broadcast(largest_of(line, width));
        F16x total = zeros();
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t count = width - i;
            float lane[16];
            store(lane, exponential(lanes_of(line, i, count) - most));
            for (int64_t j = count; j < kLanes; ++j) lane[j] = 0.0f;
            total = total + load(lane);
            put(to + at, of.to.stride[kLast], i, count, load(lane));
        }
        const F16x all = broadcast(sum(total));
        const Line written{to + at, of.to.stride[kLast]};
        for (int64_t i = 0; i < width; i += kLanes)
            put(to + at, of.to.stride[kLast], i, width - i, lanes_of(written, i, width - i) / all);
    });
}

void rms_norm(const RowShape& of, float* to, const float* const* from) {
    const int64_t width = of.shape[kLast];
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line line{from[0] + offsets[0], of.from[0].stride[kLast]};
        const float mean = sum_of(line, width, [](F16x x) { return x * x; }) / (float)width;
        const F16x factor = broadcast(1.0f / __builtin_sqrtf(mean + of.number[0]));
        const Line weight{of.sources > 1 ? from[1] + offsets[1] : nullptr, of.from[1].stride[kLast]};
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t count = width - i;
            F16x y = lanes_of(line, i, count) * factor;
            if (of.sources > 1) {
                F16x w = lanes_of(weight, i, count);
                if (of.number[1] != 0.0f) w = w + broadcast(of.number[1]);
                y = y * w;
            }
            put(to + at, of.to.stride[kLast], i, count, y);
        }
    });
}

void layer_norm(const RowShape& of, float* to, const float* const* from) {
    const int64_t width = of.shape[kLast];
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const Line line{from[0] + offsets[0], of.from[0].stride[kLast]};
        const F16x mean = broadcast(sum_of(line, width, [](F16x x) { return x; }) / (float)width);
        F16x squares = zeros();
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t count = width - i;
            float lane[16];
            const F16x off = lanes_of(line, i, count) - mean;
            store(lane, off * off);
            for (int64_t j = count; j < kLanes; ++j) lane[j] = 0.0f;
            squares = squares + load(lane);
        }
        const F16x factor = broadcast(1.0f / __builtin_sqrtf(sum(squares) / (float)width + of.number[0]));
        const Line weight{from[1] + offsets[1], of.from[1].stride[kLast]};
        const Line bias{from[2] + offsets[2], of.from[2].stride[kLast]};
        for (int64_t i = 0; i < width; i += kLanes) {
            const int64_t count = width - i;
            const F16x y = (lanes_of(line, i, count) - mean) * factor;
            put(to + at, of.to.stride[kLast], i, count,
                y * lanes_of(weight, i, count) + lanes_of(bias, i, count));
        }
    });
}

void rotary(const RowShape& of, float* to, const float* const* from) {
    const int64_t half = of.shape[kLast] / 2;
    each_line(of, [&](int64_t at, const int64_t* offsets) {
        const int64_t x = of.from[0].stride[kLast], c = of.from[1].stride[kLast], s = of.from[2].stride[kLast];
        const float *const first = from[0] + offsets[0], *const second = first + half * x;
        const float *const cosines = from[1] + offsets[1], *const sines = from[2] + offsets[2];
        for (int64_t i = 0; i < half; i += kLanes) {
            const int64_t count = half - i;
            const F16x low = lanes_of({first, x}, i, count), high = lanes_of({second, x}, i, count);
            const F16x low_turned = low * lanes_of({cosines, c}, i, count) -
                                    high * lanes_of({sines, s}, i, count);
            const F16x high_turned = high * lanes_of({cosines + half * c, c}, i, count) +
                                     low * lanes_of({sines + half * s, s}, i, count);
            put(to + at, of.to.stride[kLast], i, count, low_turned);
            put(to + at + half * of.to.stride[kLast], of.to.stride[kLast], i, count, high_turned);
        }
    });
}

#define KVIRE_ONE(kind) \
    case RowKind::kind: return each_one<RowKind::kind>(of, to, from)
#define KVIRE_TWO(kind) \
    case RowKind::kind: return each_two<RowKind::kind>(of, to, from)

void run(const RowShape& of, float* to, const float* const* from) {
    switch (of.kind) {
        KVIRE_ONE(copy);
        KVIRE_ONE(negative);
        KVIRE_ONE(square);
        KVIRE_ONE(root);
        KVIRE_ONE(inverse_root);
        KVIRE_ONE(exponential);
        KVIRE_ONE(sine);
        KVIRE_ONE(cosine);
        KVIRE_ONE(tanh);
        KVIRE_ONE(sigmoid);
        KVIRE_ONE(silu);
        KVIRE_ONE(gelu_tanh);
        KVIRE_ONE(gelu_erf);
        KVIRE_ONE(relu);
        KVIRE_ONE(magnitude);
        KVIRE_TWO(add);
        KVIRE_TWO(subtract);
        KVIRE_TWO(multiply);
        KVIRE_TWO(divide);
        KVIRE_TWO(larger);
        KVIRE_TWO(smaller);
        KVIRE_TWO(silu_times);
        KVIRE_TWO(gelu_tanh_times);
        KVIRE_TWO(gelu_erf_times);
        case RowKind::sum:
        case RowKind::mean:
        case RowKind::largest: return reduce(of, to, from);
        case RowKind::softmax: return softmax(of, to, from);
        case RowKind::rms_norm: return rms_norm(of, to, from);
        case RowKind::layer_norm: return layer_norm(of, to, from);
        case RowKind::rotary: return rotary(of, to, from);
    }
}

}  // namespace

const RowKernels row_kernels = {run};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
