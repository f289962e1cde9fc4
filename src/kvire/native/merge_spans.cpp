// Folding the partial results of one row into its output, by log-sum-exp, always first span to last.
//
// Compiled once per instruction set; simd.h says what must not be used here.
#include "kernel_functions.h"
#include "simd.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {
namespace {

float exponential_of(float x) { return exponential(broadcast(x))[0]; }

// out = out * keep + from * take
void blend(float* out, const float* from, int64_t width, float keep, float take) {
    int64_t d = 0;
    for (; d + 8 <= width; d += 8)
        store8(out + d, load8(out + d) * broadcast(keep) + load8(from + d) * broadcast(take));
    for (; d < width; ++d) out[d] = out[d] * keep + from[d] * take;
}

void merge_head(const SpanPartial* parts, int64_t count, int64_t head, int64_t width, const float* sinks, float* out) {
    float maximum = parts[0].maximum[head], weight = parts[0].weight[head];
    memcpy(out, parts[0].values + head * padded(width), (size_t)width * sizeof(float));
    for (int64_t i = 1; i < count; ++i) {
        const float other = parts[i].maximum[head], best = other > maximum ? other : maximum;
        const float keep = exponential_of(maximum - best), take = exponential_of(other - best);
        blend(out, parts[i].values + head * padded(width), width, keep, take);
        weight = weight * keep + parts[i].weight[head] * take;
        maximum = best;
    }
    float share = 1.0f;
    if (sinks) {
        const float best = sinks[head] > maximum ? sinks[head] : maximum;
        share = exponential_of(maximum - best);
        weight = weight * share + exponential_of(sinks[head] - best);
    }
    for (int64_t d = 0; d < width; ++d) out[d] *= share / weight;
}

}  // namespace

void merge_spans(const SpanPartial* parts, int64_t count, int64_t query_heads, int64_t value_width,
                 const float* sinks, float* out) {
    for (int64_t h = 0; h < query_heads; ++h)
        merge_head(parts, count, h, value_width, sinks, out + h * value_width);
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
