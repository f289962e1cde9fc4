#include "row_ops.h"

#include <stdexcept>

#include "isa.h"

namespace kvire {
namespace step {

const RowKernels& row_kernels() { return KVIRE_STEP_TABLE(row_kernels); }

void check_row_shape(const RowShape& operation) {
    int least = 1, most = 1;
    switch (operation.kind) {
        case RowKind::copy: case RowKind::negative: case RowKind::square: case RowKind::root:
        case RowKind::inverse_root: case RowKind::exponential: case RowKind::sine: case RowKind::cosine:
        case RowKind::tanh: case RowKind::sigmoid: case RowKind::silu: case RowKind::gelu_tanh:
        case RowKind::gelu_erf: case RowKind::relu: case RowKind::magnitude: case RowKind::sum: case RowKind::mean:
        case RowKind::largest: case RowKind::softmax: break;
        case RowKind::add: case RowKind::subtract: case RowKind::multiply: case RowKind::divide:
        case RowKind::larger: case RowKind::smaller: case RowKind::silu_times: case RowKind::gelu_tanh_times:
        case RowKind::gelu_erf_times: least = most = 2; break;
        case RowKind::rms_norm: most = 2; break;
        case RowKind::layer_norm: case RowKind::rotary: least = most = 3; break;
        default: throw std::invalid_argument("no such operation on rows");
    }
    if (operation.sources < least || operation.sources > most)
        throw std::invalid_argument("an operation on rows has another number of sources");
    for (int64_t size : operation.shape)
        if (size < 1 || size > (1 << 24)) throw std::invalid_argument("a row has an impossible shape");
    if (operation.kind == RowKind::rotary && operation.shape[kDimensions - 1] % 2)
        throw std::invalid_argument("a rotary width is even");
}

}  // namespace step
}  // namespace kvire
