#include "weights.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "half.h"

namespace kvire {
namespace step {
namespace {

constexpr int kMostInputs = 256, kMostGroups = kMostInputs / kGroup;

constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kMxValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// One block of a row as its file has it, taken apart. codes: as packed, that is unsigned and with all their bits.
struct SourceBlock {
    uint8_t codes[kMostInputs];
    uint8_t head[2][2];                        // d and the factor of the minima, as float16; K-quants only
    uint8_t scales[kMostGroups][4];            // of each group, as they will lie: at most two float16
};

// Inputs 0 .. 15 in the low halves of sixteen bytes, 16 .. 31 in the high ones.
void split_halves(const uint8_t* bytes, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = bytes[i] & 15;
        codes[i + 16] = bytes[i] >> 4;
    }
}

// The six-bit scales and minima of the eight groups of q4_k and q5_k: gguf's order, twelve bytes.
void read_scales_and_minima(const uint8_t* from, SourceBlock& block) {
    for (int i = 0; i < 4; ++i) {
        block.scales[i][0] = from[i] & 63;
        block.scales[i][1] = from[i + 4] & 63;
        block.scales[i + 4][0] = (from[i + 8] & 15) | ((from[i] >> 2) & 48);
        block.scales[i + 4][1] = (from[i + 8] >> 4) | ((from[i + 4] >> 2) & 48);
    }
}

void read_k4(const uint8_t* from, SourceBlock& block, const uint8_t* quarters, const uint8_t* fifth_bits) {
    std::memcpy(block.head, from, 4);
    read_scales_and_minima(from + 4, block);
    for (int i = 0; i < 256; ++i) {
        const int group = i / 32, at = i % 32;
        const uint8_t byte = quarters[group / 2 * 32 + at];
        block.codes[i] = group % 2 ? byte >> 4 : byte & 15;
        if (fifth_bits) block.codes[i] |= ((fifth_bits[at] >> group) & 1) << 4;
    }
}

void read_q6(const uint8_t* from, SourceBlock& block) {
    const uint8_t *low = from, *high = from + 128, *scales = from + 192;
    std::memcpy(block.head, from + 208, 2);
    for (int i = 0; i < 256; ++i) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const uint8_t byte = low[half * 64 + quarter % 2 * 32 + at];
        block.codes[i] = (quarter / 2 ? byte >> 4 : byte & 15) | (((high[half * 32 + at] >> 2 * quarter) & 3) << 4);
    }
    for (int g = 0; g < 8; ++g) std::memcpy(block.scales[g], scales + 2 * g, 2);
}

void read_fifth_bits(const uint8_t* bits, uint8_t* codes) {
    for (int i = 0; i < 32; ++i) codes[i] |= ((bits[i / 8] >> i % 8) & 1) << 4;
}

void read(Form form, const uint8_t* from, SourceBlock& block) {
    switch (form) {
        case Form::q8_0:
            std::memcpy(block.scales[0], from, 2);
            for (int i = 0; i < 32; ++i) block.codes[i] = from[2 + i] ^ 0x80;  // + 128
            return;
        case Form::q4_0:
        case Form::iq4_nl:
            std::memcpy(block.scales[0], from, 2);
            return split_halves(from + 2, block.codes);
        case Form::q4_1:
            std::memcpy(block.scales[0], from, 4);
            return split_halves(from + 4, block.codes);
        case Form::q5_0:
            std::memcpy(block.scales[0], from, 2);
            split_halves(from + 6, block.codes);
            return read_fifth_bits(from + 2, block.codes);
        case Form::q5_1:
            std::memcpy(block.scales[0], from, 4);
            split_halves(from + 8, block.codes);
            return read_fifth_bits(from + 4, block.codes);
        case Form::mxfp4:
            block.scales[0][0] = from[0];
            return split_halves(from + 1, block.codes);
        case Form::q4_k: return read_k4(from, block, from + 16, nullptr);
        case Form::q5_k: return read_k4(from, block, from + 48, from + 16);
        case Form::q6_k: return read_q6(from, block);
        default: return;
    }
}

int bits_of(Form form) {
    switch (form) {
        case Form::q8_0: return 8;
        case Form::q6_k: return 6;
        case Form::q5_0:
        case Form::q5_1:
        case Form::q5_k: return 5;
        default: return 4;
    }
}

// Bytes of one scale of one output, and how many kinds of them a group has.
struct ScaleShape {
    int bytes, kinds;
};

ScaleShape scales_of(Form form) {
    switch (form) {
        case Form::q4_1:
        case Form::q5_1: return {2, 2};
        case Form::q4_k:
        case Form::q5_k:
        case Form::q6_k: return {1, 2};
        case Form::mxfp4: return {1, 1};
        default: return {2, 1};
    }
}

void put_codes(int bits, const uint8_t* codes, int output, uint8_t* group) {
    for (int i = 0; i < 32; ++i) {
        const int chunk = i / 4, at = 4 * output + i % 4;
        const uint8_t code = codes[i];
        if (bits == 8) {
            group[chunk * 64 + at] = code;
            continue;
        }
        group[chunk / 2 * 64 + at] |= (uint8_t)((code & 15) << chunk % 2 * 4);
        if (bits == 5) group[256 + at] |= (uint8_t)((code >> 4) << chunk);
        if (bits == 6) group[256 + chunk / 4 * 64 + at] |= (uint8_t)((code >> 4) << chunk % 4 * 2);
    }
}

int code_at(int bits, const uint8_t* group, int output, int input) {
    const int chunk = input / 4, at = 4 * output + input % 4;
    if (bits == 8) return group[chunk * 64 + at];
    int code = (group[chunk / 2 * 64 + at] >> chunk % 2 * 4) & 15;
    if (bits == 5) code |= ((group[256 + at] >> chunk) & 1) << 4;
    if (bits == 6) code |= ((group[256 + chunk / 4 * 64 + at] >> chunk % 4 * 2) & 3) << 4;
    return code;
}

int64_t code_bytes(int bits) { return bits * 64; }

// Where group `group` of a block begins.
int64_t group_offset(const Layout& layout, int64_t group) {
    return (group / layout.span_groups + 1) * layout.span_head_bytes + group * layout.group_bytes;
}

int64_t head_offset(const Layout& layout, int64_t group) {
    const int64_t span = group / layout.span_groups;
    return span * (layout.span_head_bytes + layout.span_groups * layout.group_bytes);
}

void pack_output(const PackedWeights& shape, const uint8_t* row, int output, uint8_t* block) {
    const Layout layout = layout_of(shape.form);
    const int bits = bits_of(shape.form);
    const ScaleShape scales = scales_of(shape.form);
    const int64_t groups = layout.source_inputs / kGroup;
    for (int64_t at = 0; at < shape.width / layout.source_inputs; ++at, row += layout.source_bytes) {
        SourceBlock source;
        read(shape.form, row, source);
        for (int64_t g = 0; g < groups; ++g) {
            uint8_t* const group = block + group_offset(layout, at * groups + g);
            put_codes(bits, source.codes + g * kGroup, output, group);
            uint8_t* const to = group + code_bytes(bits);
            for (int kind = 0; kind < scales.kinds; ++kind)
                std::memcpy(to + (kind * kOutputs + output) * scales.bytes, source.scales[g] + kind * scales.bytes,
                            (size_t)scales.bytes);
        }
        uint8_t* const head = block + head_offset(layout, at * groups);
        for (int64_t kind = 0; kind < layout.span_head_bytes / 32; ++kind)
            std::memcpy(head + kind * 32 + output * 2, source.head[kind], 2);
    }
}

void pack_floats(const PackedWeights& shape, const uint8_t* row, int output, uint8_t* block) {
    const int64_t bytes = layout_of(shape.form).source_bytes;
    for (int64_t k = 0; k < shape.width; ++k)
        std::memcpy(block + (k * kOutputs + output) * bytes, row + k * bytes, (size_t)bytes);
}

float float16_at(const uint8_t* from, int64_t index) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * index, 2);
    return float_of_half(bits);
}

// Factors of the weights of one output in one group: w = d * code + m, or by halves of the group.
struct Factors {
    float d[2];
    float m;
    int zero;
};

Factors factors_of(Form form, const uint8_t* head, const uint8_t* scales, int output) {
    switch (form) {
        case Form::q8_0: return {{float16_at(scales, output), float16_at(scales, output)}, 0.0f, 128};
        case Form::q4_0: return {{float16_at(scales, output), float16_at(scales, output)}, 0.0f, 8};
        case Form::q5_0: return {{float16_at(scales, output), float16_at(scales, output)}, 0.0f, 16};
        case Form::iq4_nl: return {{float16_at(scales, output), float16_at(scales, output)}, 0.0f, 0};
        case Form::q4_1:
        case Form::q5_1: {
            const float d = float16_at(scales, output);
            return {{d, d}, float16_at(scales, kOutputs + output), 0};
        }
        case Form::q4_k:
        case Form::q5_k: {
            const float d = float16_at(head, output) * (float)scales[output];
            return {{d, d}, -(float16_at(head, kOutputs + output) * (float)scales[kOutputs + output]), 0};
        }
        case Form::q6_k: {
            const float d = float16_at(head, output);
            const auto* const halves = reinterpret_cast<const int8_t*>(scales);
            return {{d * (float)halves[output], d * (float)halves[kOutputs + output]}, 0.0f, 32};
        }
        case Form::mxfp4: return {{float_of_e8m0_half(scales[output]), float_of_e8m0_half(scales[output])}, 0.0f, 0};
        default: return {};
    }
}

bool has_minimum(Form form) {
    return form == Form::q4_1 || form == Form::q5_1 || form == Form::q4_k || form == Form::q5_k;
}

// As gguf's own reading has it, operation by operation.
void unpack_group(Form form, const uint8_t* block, int output, int64_t g, float* to) {
    const Layout layout = layout_of(form);
    const uint8_t* const group = block + group_offset(layout, g);
    const int bits = bits_of(form);
    const Factors factors = factors_of(form, block + head_offset(layout, g), group + code_bytes(bits), output);
    const int8_t* const values = form == Form::iq4_nl ? kIq4Values : form == Form::mxfp4 ? kMxValues : nullptr;
    for (int i = 0; i < kGroup; ++i) {
        const int code = code_at(bits, group, output, i);
        const float weight = factors.d[i / 16] * (float)(values ? values[code] : code - factors.zero);
        to[i] = has_minimum(form) ? weight + factors.m : weight;
    }
}

float float_at(Form form, const uint8_t* block, int output, int64_t input) {
    const int64_t index = input * kOutputs + output;
    uint16_t bits;
    if (form != Form::f32) std::memcpy(&bits, block + 2 * index, 2);
    if (form == Form::f16) return float_of_half(bits);
    if (form == Form::bf16) return float_of_bfloat(bits);
    float value;
    std::memcpy(&value, block + 4 * index, 4);
    return value;
}

}  // namespace

void check_shape(Form form, int64_t outputs, int64_t width) {
    if ((int)form < 0 || (int)form >= kForms) throw std::invalid_argument("no such form of weights");
    if (outputs < 1 || width < 1) throw std::invalid_argument("a matrix has at least one output and one input");
    const int64_t inputs = layout_of(form).source_inputs;
    if (width % inputs)
        throw std::invalid_argument("a row of " + std::to_string(width) + " weights is no multiple of the form's " +
                                    std::to_string(inputs));
}

int64_t packed_bytes(Form form, int64_t outputs, int64_t width) {
    check_shape(form, outputs, width);
    const PackedWeights shape{form, outputs, width, nullptr};
    return shape.blocks() * shape.block_bytes();
}

void pack(const PackedWeights& shape, const uint8_t* rows, uint8_t* packed, int64_t begin, int64_t end) {
    const Layout layout = layout_of(shape.form);
    const int64_t row_bytes = shape.width / layout.source_inputs * layout.source_bytes;
    for (int64_t index = begin; index < end; ++index) {
        uint8_t* const block = packed + index * shape.block_bytes();
        std::memset(block, 0, (size_t)shape.block_bytes());
        for (int64_t i = 0; i < kOutputs && index * kOutputs + i < shape.outputs; ++i) {
            const uint8_t* const row = rows + (index * kOutputs + i) * row_bytes;
            layout.is_float ? pack_floats(shape, row, (int)i, block) : pack_output(shape, row, (int)i, block);
        }
    }
}

void unpack_row(const PackedWeights& weights, int64_t output, float* to) {
    const uint8_t* const block = weights.block(output / kOutputs);
    const int lane = (int)(output % kOutputs);
    if (layout_of(weights.form).is_float) {
        for (int64_t k = 0; k < weights.width; ++k) to[k] = float_at(weights.form, block, lane, k);
        return;
    }
    for (int64_t g = 0; g < weights.groups(); ++g) unpack_group(weights.form, block, lane, g, to + g * kGroup);
}

}  // namespace step
}  // namespace kvire
