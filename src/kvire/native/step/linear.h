// Products of rows with packed weights, cut into tasks that may run in any order and on any thread: a row's result
// depends on that row alone (docs/adr/0019-one-arithmetic.md).
#pragma once

#include "weights.h"

namespace kvire {
namespace step {

// Rows of floats as integers, each group of 32 with its own scale. Does not own its memory.
struct QuantisedRows {
    int64_t rows, width;  // as of the weights; a row's last group is padded with zeros
    int8_t* q;            // [rows, groups * 32]
    float* scale;         // [rows, groups]
    float* scaled_sum;    // [rows, groups]: scale * sum of q
    int16_t* sums;        // [rows, groups * 2]: sums of q over each half of a group

    int64_t groups() const { return (width + kGroup - 1) / kGroup; }
    static int64_t bytes(int64_t rows, int64_t width);
    static QuantisedRows at(void* memory, int64_t rows, int64_t width);  // memory: `bytes`, aligned to 64
};

void quantise_row(const float* x, const QuantisedRows& to, int64_t row);

// As many rows as a tile has at most.
constexpr int kMostTileRows = 8;

// A few rows by one block of sixteen outputs.
struct LinearTile {
    Form form;
    const uint8_t* block;
    int64_t width, groups;
    int outputs, rows;  // outputs: of the block that are there, sixteen but in the last one
    const int8_t* q[kMostTileRows];
    const float* scale[kMostTileRows];
    const float* scaled_sum[kMostTileRows];
    const int16_t* sums[kMostTileRows];
    const float* x[kMostTileRows];  // instead of the four above, for weights that are floats
    const float* bias;              // of the block's first output, or null
    float* out[kMostTileRows];      // of the block's first output
};

struct LinearKernels {
    int most_rows;  // of a tile
    void (*quantise_row)(const float* x, int64_t width, int8_t* q, float* scale, float* scaled_sum, int16_t* sums);
    void (*tile)(const LinearTile& tile);
};

namespace baseline {
extern const LinearKernels linear_kernels;
}
namespace avx2 {
extern const LinearKernels linear_kernels;
}
namespace avx512 {
extern const LinearKernels linear_kernels;
}

const LinearKernels& linear_kernels();

// out[i] = weights times row input[i], plus bias, for i below rows.
class LinearWork {
  public:
    struct Input {
        const QuantisedRows* quantised;  // null for weights that are floats
        const float* x;                  // [rows, stride] for those
        int64_t stride;
        const int32_t* index;  // of the input's row for each output row; null: the same
    };

    // workers: threads that will share the tasks.
    LinearWork(const PackedWeights& weights, const Input& input, int64_t rows, const float* bias, float* out,
               int64_t out_stride, int workers, const LinearKernels& kernels = linear_kernels());

    int64_t tasks() const { return row_chunks_ * block_chunks_; }
    void run(int64_t task) const;

  private:
    void run_rows(int64_t block, int64_t begin, int64_t end) const;

    PackedWeights weights_;
    Input input_;
    const float* bias_;
    float* out_;
    int64_t rows_, out_stride_, row_chunks_, block_chunks_, chunk_blocks_;
    const LinearKernels& kernels_;
};

}  // namespace step
}  // namespace kvire
