// Attention of the native step, for Python. Arrays come as addresses; what indexes memory is checked here.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../gil.h"
#include "../parallel.h"
#include "attention.h"
#include "bind.h"
#include "isa.h"

namespace nb = nanobind;

namespace kvire {
namespace step {
namespace {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

const AttentionKernels& kernels_for(const std::string& name) {
    if (name.empty()) return attention_kernels();
    if (name == "baseline") return baseline::attention_kernels;
#ifdef KVIRE_HAS_AVX512
    if (name == "avx2" && isa() != Isa::baseline) return avx2::attention_kernels;
    if (name == "avx512" && isa() == Isa::avx512) return avx512::attention_kernels;
#endif
    throw std::invalid_argument("this processor, or KVIRE_ISA, has no " + name);
}

// Memory that the next call uses again: a step makes dozens. index: of two that are needed at once.
float* floats(int index, int64_t count) {
    thread_local std::vector<float> memory[2];
    if (static_cast<int64_t>(memory[index].size()) < count) memory[index].resize(static_cast<size_t>(count));
    return memory[index].data();
}

// One layer of a step: writes its K and V, then attends.
void attend_at(const PagedLayer& pool, int64_t query_heads, float scale, int64_t window, float softcap, Address sinks,
               int64_t sequences, Address row_begin, Address context_lens, Address block_tables, int64_t table_stride,
               Address slots, Address queries, Address k, Address v, Address out, int threads, const std::string& name) {
    if (threads < 1 || sequences < 1) throw std::invalid_argument("at least one thread and one sequence");
    const StepLayer layer{pool, query_heads, scale, window, softcap, pointer<const float>(sinks)};
    const StepSequences of{sequences, pointer<const int64_t>(row_begin), pointer<const int64_t>(context_lens)};
    const StepTables tables{pointer<const int32_t>(block_tables), table_stride, pointer<const int64_t>(slots)};
    const AttentionKernels& kernels = kernels_for(name);
    check_step(layer, of, tables);
    const GilReleased released;
    const int64_t rows = of.row_begin[sequences];
    AttentionWork::write(layer, tables, {pointer<const float>(k), pool.heads * pool.key_width},
                         {pointer<const float>(v), pool.heads * pool.value_width}, 0, rows);
    const AttentionPlan plan(of, pool.heads, query_heads, window, threads);
    float* const scratch = floats(
        0, threads * AttentionWork::scratch_floats(pool.key_width, pool.value_width, query_heads, pool.heads));
    float* const partials = floats(1, AttentionWork::partial_floats(plan, pool.value_width));
    const AttentionWork work(layer, of, tables, plan, {pointer<const float>(queries), query_heads * pool.key_width},
                             pointer<float>(out), query_heads * pool.value_width, scratch, partials,
                             kernels);
    parallel_for(static_cast<int64_t>(plan.attends.size()), threads,
                 [&](int64_t i, int worker) { work.attend(plan.attends[static_cast<size_t>(i)], worker); });
    parallel_for(static_cast<int64_t>(plan.merges.size()), threads,
                 [&](int64_t i, int) { work.merge(plan.merges[static_cast<size_t>(i)]); });
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("step_attention", attend_at, nb::arg("pool"), nb::arg("query_heads"), nb::arg("scale"), nb::arg("window"),
          nb::arg("softcap"), nb::arg("sinks"), nb::arg("sequences"), nb::arg("row_begin"), nb::arg("context_lens"),
          nb::arg("block_tables"), nb::arg("table_stride"), nb::arg("slots"), nb::arg("queries"), nb::arg("k"),
          nb::arg("v"), nb::arg("out"), nb::arg("threads"), nb::arg("isa") = "",
          "Writes float32 k, v [rows, heads, width] into a pool laid out by heads, then attends: out [rows, query "
          "heads, width]. int64 row_begin [sequences + 1], context_lens, slots; int32 block_tables.");
}

}  // namespace step
}  // namespace kvire
