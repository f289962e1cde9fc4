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

}  // namespace

void encode(const float* from, char* to, int64_t count, DType dtype) {
    switch (dtype) {
        case DType::float32: memcpy(to, from, (size_t)count * sizeof(float)); return;
        case DType::float16: return convert(from, (f16*)to, count);
        case DType::bfloat16: return convert(from, (bf16*)to, count);
    }
}

void decode(const char* from, float* to, int64_t count, DType dtype) {
    switch (dtype) {
        case DType::float32: memcpy(to, from, (size_t)count * sizeof(float)); return;
        case DType::float16: return convert((const f16*)from, to, count);
        case DType::bfloat16: return convert((const bf16*)from, to, count);
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
                             encode,         decode,      linear_rows, rms_norm,    read_sum};

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
