#include "linear.h"

#include <algorithm>

#include "isa.h"

namespace kvire {
namespace step {
namespace {

constexpr int64_t kAlign = 64;

// Rows of a task: as many as stay, quantised, in the second-level cache while a block of weights passes.
constexpr int64_t kChunkRows = 256;

// Tasks for each worker: enough that one put aside by the system holds little, few enough to draw cheaply.
constexpr int64_t kTasksPerWorker = 8;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

int64_t QuantisedRows::bytes(int64_t rows, int64_t width) {
    const int64_t groups = (width + kGroup - 1) / kGroup * rows;
    return aligned(groups * kGroup) + 2 * aligned(groups * 4) + aligned(groups * 4);
}

QuantisedRows QuantisedRows::at(void* memory, int64_t rows, int64_t width) {
    const int64_t groups = (width + kGroup - 1) / kGroup * rows;
    char* at = static_cast<char*>(memory);
    const auto take = [&at](int64_t bytes) {
        char* const from = at;
        at += aligned(bytes);
        return static_cast<void*>(from);
    };
    QuantisedRows to{rows, width, nullptr, nullptr, nullptr, nullptr};
    to.q = static_cast<int8_t*>(take(groups * kGroup));
    to.scale = static_cast<float*>(take(groups * 4));
    to.scaled_sum = static_cast<float*>(take(groups * 4));
    to.sums = static_cast<int16_t*>(take(groups * 4));
    return to;
}

void quantise_row(const float* x, const QuantisedRows& to, int64_t row) {
    const int64_t at = row * to.groups();
    linear_kernels().quantise_row(x, to.width, to.q + at * kGroup, to.scale + at, to.scaled_sum + at, to.sums + 2 * at);
}

const LinearKernels& linear_kernels() { return KVIRE_STEP_TABLE(linear_kernels); }

LinearWork::LinearWork(const PackedWeights& weights, const Input& input, int64_t rows, const float* bias, float* out,
                       int64_t out_stride, int workers, const LinearKernels& kernels)
    : weights_(weights), input_(input), bias_(bias), out_(out), rows_(rows), out_stride_(out_stride),
      row_chunks_((rows + kChunkRows - 1) / kChunkRows), kernels_(kernels) {
    const int64_t wanted = std::max<int64_t>(1, workers * kTasksPerWorker / std::max<int64_t>(row_chunks_, 1));
    chunk_blocks_ = std::max<int64_t>(1, (weights.blocks() + wanted - 1) / wanted);
    block_chunks_ = (weights.blocks() + chunk_blocks_ - 1) / chunk_blocks_;
}

void LinearWork::run(int64_t task) const {
    const int64_t first = task / block_chunks_ * kChunkRows, last = std::min(first + kChunkRows, rows_);
    const int64_t begin = task % block_chunks_ * chunk_blocks_;
    for (int64_t block = begin; block < std::min(begin + chunk_blocks_, weights_.blocks()); ++block)
        run_rows(block, first, last);
}

void LinearWork::run_rows(int64_t block, int64_t begin, int64_t end) const {
    LinearTile tile;
    tile.form = weights_.form;
    tile.block = weights_.block(block);
    tile.width = weights_.width;
    tile.groups = weights_.groups();
    tile.outputs = static_cast<int>(std::min(kOutputs, weights_.outputs - block * kOutputs));
    tile.bias = bias_ ? bias_ + block * kOutputs : nullptr;
    for (int64_t row = begin; row < end; row += tile.rows) {
        tile.rows = static_cast<int>(std::min<int64_t>(kernels_.most_rows, end - row));
        for (int i = 0; i < tile.rows; ++i) {
            const int64_t from = input_.index ? input_.index[row + i] : row + i;
            if (const QuantisedRows* q = input_.quantised) {
                const int64_t group = from * q->groups();
                tile.q[i] = q->q + group * kGroup;
                tile.scale[i] = q->scale + group;
                tile.scaled_sum[i] = q->scaled_sum + group;
                tile.sums[i] = q->sums + 2 * group;
            } else {
                tile.x[i] = input_.x + from * input_.stride;
            }
            tile.out[i] = out_ + (row + i) * out_stride_ + block * kOutputs;
        }
        kernels_.tile(tile);
    }
}

}  // namespace step
}  // namespace kvire
