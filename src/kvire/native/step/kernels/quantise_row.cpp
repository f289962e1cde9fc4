// One row of floats as integers with a scale for every 32.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "tiles.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {
namespace {

constexpr float kLeast = 7.888609052210118e-31f;  // 2^-100: below it 127 / largest would overflow, and nothing is lost

KVIRE_STEP_INLINE void quantise_group(F16x first, F16x second, int8_t* q, float* scale, float* scaled_sum,
                                      int16_t* sums) {
    const F16x magnitude = larger(larger(first, negative(first)), larger(second, negative(second)));
    const float most = largest(magnitude);
    const float finite = sum(first * zeros() + second * zeros());  // 0, or a nan
    if (!(most >= kLeast) || finite != 0.0f) {
        memset(q, 0, kGroup);
        sums[0] = sums[1] = 0;
        *scale = *scaled_sum = finite == 0.0f ? 0.0f : finite;  // never -0
        return;
    }
    const F16x factor = broadcast(127.0f / most);
    const I16x low = to_nearest(first * factor), high = to_nearest(second * factor);
    store_s8(q, low);
    store_s8(q + 16, high);
    const int32_t low_sum = sum(low), high_sum = sum(high);
    sums[0] = (int16_t)low_sum;
    sums[1] = (int16_t)high_sum;
    *scale = most / 127.0f;
    *scaled_sum = *scale * (float)(low_sum + high_sum);
}

}  // namespace

void quantise_row(const float* x, int64_t width, int8_t* q, float* scale, float* scaled_sum, int16_t* sums) {
    const int64_t whole = width / kGroup;
    for (int64_t g = 0; g < whole; ++g)
        quantise_group(load(x + g * kGroup), load(x + g * kGroup + 16), q + g * kGroup, scale + g, scaled_sum + g,
                       sums + 2 * g);
    if (const int64_t rest = width - whole * kGroup) {
        float padded[kGroup] = {};
        memcpy(padded, x + whole * kGroup, (size_t)rest * sizeof(float));
        quantise_group(load(padded), load(padded + 16), q + whole * kGroup, scale + whole, scaled_sum + whole,
                       sums + 2 * whole);
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
