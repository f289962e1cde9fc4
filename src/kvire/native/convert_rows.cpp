// Rows of floats to elements of a pool and back, a plain read as a yardstick, and this instruction set's table.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store8(to + i, load8(from + i));
    if (i < count) store_part(to + i, load_part(from + i, count - i), count - i);
}

// The largest magnitude; an infinity or a nan if there is one. Compared as integers, which order floats without
// their signs in the same way and put nans above all.
float largest_magnitude(const float* row, int64_t width) {
    v8i best = {};
    each_vector(row, width, [&](int64_t, v8f values, int64_t) KVIRE_LAMBDA {
        const v8u bits = (v8u)values & 0x7fffffffu;
        best = (v8i)select((v8i)bits > best, bits, (v8u)best);
    });
    int32_t most = 0;
    for (int i = 0; i < 8; ++i) most = best[i] > most ? best[i] : most;
    float magnitude;
    memcpy(&magnitude, &most, sizeof magnitude);
    return magnitude;
}

// As kvire/cache/scaled.py does it, which gives the reasons; bit for bit.
void quantise(const float* row, int8_t* to, float* scale, int64_t width) {
    const float step = largest_magnitude(row, width) / 127.0f;
    *scale = step < __FLT_MIN__ ? 0.0f : step;
    if (!(*scale > 0.0f && *scale < __builtin_inff())) {
        memset(to, 0, (size_t)width);
        return;
    }
    each_vector(row, width, [&](int64_t d, v8f values, int64_t count) KVIRE_LAMBDA {
        store_some(to + d, values / broadcast(step), count);
    });
}

void dequantise(const int8_t* row, float scale, float* to, int64_t width) {
    each_vector(row, width, [&](int64_t d, v8f values, int64_t count) KVIRE_LAMBDA {
        store_some(to + d, values * broadcast(scale), count);
    });
}

}  // namespace

void encode(const float* from, char* to, float* scales, int64_t rows, int64_t width, DType dtype) {
    const int64_t count = rows * width;
    switch (dtype) {
        case DType::float32: memcpy(to, from, (size_t)count * sizeof(float)); return;
        case DType::float16: return convert(from, (f16*)to, count);
        case DType::bfloat16: return convert(from, (bf16*)to, count);
        case DType::int8:
            for (int64_t r = 0; r < rows; ++r) quantise(from + r * width, (int8_t*)to + r * width, scales + r, width);
            return;
    }
}

void decode(const char* from, const float* scales, float* to, int64_t rows, int64_t width, DType dtype) {
    const int64_t count = rows * width;
    switch (dtype) {
        case DType::float32: memcpy(to, from, (size_t)count * sizeof(float)); return;
        case DType::float16: return convert((const f16*)from, to, count);
        case DType::bfloat16: return convert((const bf16*)from, to, count);
        case DType::int8:
            for (int64_t r = 0; r < rows; ++r)
                dequantise((const int8_t*)from + r * width, scales[r], to + r * width, width);
            return;
    }
}

float read_sum(const float* from, int64_t count) {
    v8f totals[8] = {};
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        for (int j = 0; j < 8; ++j) totals[j] += load8(from + i + 8 * j);
    }
    float total = 0.0f;
    for (int j = 0; j < 8; ++j) total += sum(totals[j]);
    for (; i < count; ++i) total += from[i];
    return total;
}

const KernelTable kernels = {KVIRE_ISA_NAME, attend_span, merge_spans, pack_tile,   pack_queries, attend_tile,
                             encode,         decode,      linear_rows, rms_norm,    xxh3_128,
                             read_sum};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
