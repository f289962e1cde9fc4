// The functions that one instruction set's KernelTable points at; kernels.h says what each does.
#pragma once

#include "kernels.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {

void attend_span(const PagedLayer& layer, const SpanQuery& task, float* scratch, const SpanPartial& out);
void merge_spans(const SpanPartial* parts, int64_t count, int64_t query_heads, int64_t value_width,
                 const float* sinks, float* out);
void pack_tile(const PagedLayer& layer, const int32_t* block_table, int64_t head, const PackedTile& tile);
void pack_queries(const QueryRows& rows, float* packed);
void attend_tile(const QueryRows& rows, const float* packed, const PackedTile& tile, const SpanPartial& sums);
void encode(const float* from, char* to, float* scales, int64_t rows, int64_t width, DType dtype);
void decode(const char* from, const float* scales, float* to, int64_t rows, int64_t width, DType dtype);
void linear_rows(const LinearRows& task, int64_t begin, int64_t end);
void rms_norm(const RmsNorm& task, int64_t begin, int64_t end);
void xxh3_128(const char* head, int64_t head_bytes, const char* data, int64_t data_bytes, unsigned char* digest);
float read_sum(const float* from, int64_t count);

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
