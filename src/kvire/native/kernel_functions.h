// The functions that one instruction set's KernelTable points at; kernels.h says what each does.
#pragma once

#include "kernels.h"

namespace kvire {
namespace KVIRE_ISA_NAMESPACE {

void attend_span(const PagedLayer& layer, const SpanQuery& task, float* scratch, const SpanPartial& out);
void merge_spans(const SpanPartial* parts, int64_t count, int64_t query_heads, int64_t value_width,
                 const float* sinks, float* out);
void encode(const float* from, char* to, int64_t count, DType dtype);
void decode(const char* from, float* to, int64_t count, DType dtype);
void linear_rows(const LinearRows& task, int64_t begin, int64_t end);
float read_sum(const float* from, int64_t count);

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace kvire
