// Weights in the form their file has them, in one order for every number of rows and every processor.
//
// Sixteen outputs stand in the lanes of a vector. Inputs come in groups of 32, each in eight chunks of four inputs;
// a chunk is 64 bytes, byte 4 * output + input. Per group:
//   4 bits: four runs of 64 bytes, chunk 2i in the low halves of run i, chunk 2i + 1 in the high halves;
//   5 bits: the same, then one run in which bit i of a byte is the fifth bit of chunk i;
//   6 bits: the same, then two runs; bits 2i and 2i + 1 of run r are the upper bits of chunk 4 * r + i;
//   8 bits: eight runs, one chunk each, of weight + 128.
// Scales of the sixteen outputs follow, or precede the groups that share them. Floats lie [input, output].
// Every form is lossless, and at most 4 % larger than its file's.
#pragma once

#include <stdint.h>

namespace kvire {
namespace step {

constexpr int64_t kOutputs = 16, kGroup = 32;  // of a block; inputs under one scale of a quantised row

// The numbers are part of packed files.
enum class Form : int {
    f32 = 0,
    f16 = 1,
    bf16 = 2,
    q8_0 = 3,
    q4_0 = 4,
    q4_1 = 5,
    q5_0 = 6,
    q5_1 = 7,
    q4_k = 8,
    q5_k = 9,
    q6_k = 10,
    iq4_nl = 11,
    mxfp4 = 12,
};
constexpr int kForms = 13;

// How one form lies in memory. Groups that share scales form a span.
struct Layout {
    int64_t source_inputs, source_bytes;   // of a block of the file's own
    int64_t span_groups, span_head_bytes;  // scales before the groups of a span
    int64_t group_bytes;                   // a group's weights and its own scales
    bool is_float;
};

static constexpr Layout layout_of(Form form) {
    switch (form) {
        case Form::f32: return {1, 4, 1, 0, 2048, true};
        case Form::f16:
        case Form::bf16: return {1, 2, 1, 0, 1024, true};
        case Form::q8_0: return {32, 34, 1, 0, 512 + 32, false};
        case Form::q4_0: return {32, 18, 1, 0, 256 + 32, false};
        case Form::q4_1: return {32, 20, 1, 0, 256 + 64, false};
        case Form::q5_0: return {32, 22, 1, 0, 320 + 32, false};
        case Form::q5_1: return {32, 24, 1, 0, 320 + 64, false};
        case Form::q4_k: return {256, 144, 8, 64, 256 + 32, false};
        case Form::q5_k: return {256, 176, 8, 64, 320 + 32, false};
        case Form::q6_k: return {256, 210, 8, 32, 384 + 32, false};
        case Form::iq4_nl: return {32, 18, 1, 0, 256 + 32, false};
        case Form::mxfp4: return {32, 17, 1, 0, 256 + 16, false};
    }
    return {};
}

// A matrix [outputs, width]; does not own its memory.
struct PackedWeights {
    Form form;
    int64_t outputs, width;
    const uint8_t* bytes;  // blocks of sixteen outputs one after the other, each with all of its inputs

    int64_t blocks() const { return (outputs + kOutputs - 1) / kOutputs; }
    int64_t groups() const { return (width + kGroup - 1) / kGroup; }  // also of floats: padded with zeros
    int64_t block_bytes() const {
        const Layout layout = layout_of(form);
        return groups() / layout.span_groups * layout.span_head_bytes + groups() * layout.group_bytes;
    }
    const uint8_t* block(int64_t index) const { return bytes + index * block_bytes(); }
};

// Throws std::invalid_argument if a matrix of this shape cannot have the form: then its width is no multiple of the
// form's own blocks.
void check_shape(Form form, int64_t outputs, int64_t width);

int64_t packed_bytes(Form form, int64_t outputs, int64_t width);

// Rows of the file's own blocks, [outputs, width], into the blocks of sixteen outputs `begin` .. `end` - 1 of `packed`.
void pack(const PackedWeights& shape, const uint8_t* rows, uint8_t* packed, int64_t begin, int64_t end);

// The exact weights of one output: [width] floats.
void unpack_row(const PackedWeights& weights, int64_t output, float* to);

}  // namespace step
}  // namespace kvire
