// The Python module kvire._native. Arrays come as addresses (Tensor.data_ptr()) with sizes and strides in elements;
// kvire/attention/cpu.py checks dtypes, shapes and devices before it passes them on. Everything that indexes memory
// (slots, block ids, lengths) is checked here as well. The GIL is released while kernels run.
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "bulk.h"
#include "decode_attention.h"
#include "gil.h"
#include "isa.h"
#include "kv_rows.h"
#include "paged_layer.h"
#include "parallel.h"
#include "prefill_attention.h"
#include "step/bind.h"

namespace nb = nanobind;

namespace kvire {
namespace {

using Address = uintptr_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

// No product of sizes below these overflows, and no tensor has larger ones.
constexpr int64_t kMostPerBlock = 1 << 20, kMostHeads = 1 << 16, kMostBlocks = int64_t{1} << 31;
constexpr int64_t kMostElements = int64_t{1} << 48;

void at_most(int64_t most, std::initializer_list<int64_t> sizes) {
    for (int64_t size : sizes) require(size <= most, "a size is larger than any tensor's");
}

void make_layer(PagedLayer* self, Address k, Address v, int64_t k_block_stride, int64_t v_block_stride,
                int64_t num_blocks, int64_t block_size, int64_t heads, int64_t key_width, int64_t value_width,
                int dtype, Address k_scales, Address v_scales, int64_t k_scale_stride, int64_t v_scale_stride) {
    require(dtype >= 0 && dtype <= 3, "dtype: 0 float32, 1 float16, 2 bfloat16, 3 int8");
    at_most(kMostPerBlock, {block_size, key_width, value_width});
    at_most(kMostHeads, {heads});
    at_most(kMostBlocks, {num_blocks});
    at_most(kMostElements, {k_block_stride, v_block_stride, k_scale_stride, v_scale_stride});
    require(k_scales % alignof(float) == 0 && v_scales % alignof(float) == 0, "scales must be aligned");
    const auto type = static_cast<DType>(dtype);
    const PagedLayer layer{pointer<char>(k), pointer<char>(v), pointer<float>(k_scales), pointer<float>(v_scales),
                           k_block_stride * element_bytes(type), v_block_stride * element_bytes(type),
                           k_scale_stride, v_scale_stride, num_blocks, block_size, heads, key_width, value_width,
                           type};
    check_layer(layer);
    new (self) PagedLayer(layer);
}

void write_kv_at(const PagedLayer& layer, Address k, int64_t k_token_stride, int64_t k_head_stride, Address v,
                 int64_t v_token_stride, int64_t v_head_stride, Address slots, int64_t tokens, int threads) {
    require(tokens >= 0 && (tokens == 0 || (k && v && slots)), "write_kv: k, v and slots are needed");
    require(threads >= 1, "threads must be positive");
    at_most(kMostElements, {tokens});
    const GilReleased unlocked;
    write_kv(layer, {pointer<float>(k), k_token_stride, k_head_stride},
             {pointer<float>(v), v_token_stride, v_head_stride}, pointer<int64_t>(slots), tokens, threads);
}

void gather_kv_at(const PagedLayer& layer, Address block_table, int64_t table_width, int64_t start, int64_t length,
                  Address k_out, Address v_out, int threads) {
    require(length == 0 || (block_table && k_out && v_out), "gather_kv: block_table, k_out and v_out are needed");
    require(table_width >= 0 && threads >= 1, "table_width must not be negative, threads be positive");
    at_most(kMostBlocks, {table_width});
    at_most(kMostElements, {start, length});
    const GilReleased unlocked;
    gather_kv(layer, pointer<int32_t>(block_table), table_width, start, length, pointer<float>(k_out),
              pointer<float>(v_out), threads);
}

void decode_attention_at(const PagedLayer& layer, Address queries, int64_t query_stride, int64_t query_head_stride,
                         int64_t sequences, int64_t query_heads, Address block_tables, int64_t table_stride,
                         int64_t table_width, Address context_lens, float scale, int64_t window, float softcap,
                         Address sinks, Address out, int threads) {
    require(sequences >= 0 && (sequences == 0 || (queries && block_tables && context_lens && out)),
            "decode_attention: queries, block_tables, context_lens and out are needed");
    require(window >= 0 && softcap >= 0 && table_width >= 0, "window, softcap and table_width must not be negative");
    at_most(kMostBlocks, {table_width, query_heads});
    require(threads >= 1, "threads must be positive");
    const DecodeBatch batch{pointer<float>(queries), query_stride, query_head_stride, sequences, query_heads,
                            pointer<int32_t>(block_tables), table_stride, table_width, pointer<int32_t>(context_lens),
                            scale, window, softcap, pointer<float>(sinks), pointer<float>(out)};
    const GilReleased unlocked;
    decode_attention(layer, batch, threads);
}

void prefill_attention_at(const PagedLayer& layer, Address queries, int64_t query_stride, int64_t query_head_stride,
                          int64_t tokens, int64_t query_heads, Address block_table, int64_t table_width,
                          int64_t context_len, float scale, int64_t window, float softcap, Address sinks, Address out,
                          int threads) {
    require(queries && block_table && out, "prefill_attention: queries, block_table and out are needed");
    require(window >= 0 && softcap >= 0 && table_width >= 0, "window, softcap and table_width must not be negative");
    at_most(kMostBlocks, {table_width, query_heads});
    require(threads >= 1, "threads must be positive");
    const PrefillChunk chunk{pointer<float>(queries), query_stride, query_head_stride, tokens, query_heads,
                             pointer<int32_t>(block_table), table_width, context_len, scale, window, softcap,
                             pointer<float>(sinks), pointer<float>(out)};
    const GilReleased unlocked;
    prefill_attention(layer, chunk, threads);
}

void linear_rows_at(Address x, int64_t rows, int64_t width, Address weights, int64_t out_width, Address bias,
                    Address out, int threads) {
    constexpr int64_t kTaskWeights = 32;  // small enough to share evenly, large enough to stream
    require(rows >= 0 && width > 0 && out_width > 0 && threads >= 1, "linear_rows: sizes must be positive");
    require(rows == 0 || (x && weights && out), "linear_rows: x, weights and out are needed");
    at_most(kMostElements, {rows, width, out_width});
    const LinearRows task{pointer<float>(x),   pointer<float>(weights), pointer<float>(bias),
                          pointer<float>(out), rows, width, out_width};
    const GilReleased unlocked;
    parallel_for((out_width + kTaskWeights - 1) / kTaskWeights, threads, [&](int64_t i, int) {
        const int64_t begin = i * kTaskWeights;
        kernels().linear_rows(task, begin, begin + kTaskWeights < out_width ? begin + kTaskWeights : out_width);
    });
}

void rms_norm_at(Address x, int64_t rows, int64_t width, Address weights, float epsilon, Address out, int threads) {
    constexpr int64_t kTaskFloats = 1 << 14;  // so that a decode step stays on the calling thread
    require(rows >= 0 && width > 0 && threads >= 1, "rms_norm: sizes must be positive");
    require(rows == 0 || (x && weights && out), "rms_norm: x, weights and out are needed");
    at_most(kMostElements, {rows, width});
    const RmsNorm task{pointer<float>(x), pointer<float>(weights), pointer<float>(out), rows, width, epsilon};
    const GilReleased unlocked;
    const int64_t task_rows = width < kTaskFloats ? kTaskFloats / width : 1;
    parallel_for((rows + task_rows - 1) / task_rows, threads, [&](int64_t i, int) {
        const int64_t begin = i * task_rows;
        kernels().rms_norm(task, begin, begin + task_rows < rows ? begin + task_rows : rows);
    });
}

double read_sum_at(Address floats, int64_t count, int threads) {
    constexpr int64_t kTaskFloats = 1 << 18;
    require(floats && count >= 0 && threads >= 1, "read_sum: an address, a count and threads are needed");
    at_most(kMostElements, {count});
    const GilReleased unlocked;
    const int64_t tasks = (count + kTaskFloats - 1) / kTaskFloats;
    std::vector<double> parts(static_cast<size_t>(tasks));
    parallel_for(tasks, threads, [&](int64_t task, int) {
        const int64_t from = task * kTaskFloats, left = count - from;
        parts[task] = kernels().read_sum(pointer<float>(floats) + from, left < kTaskFloats ? left : kTaskFloats);
    });
    return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace
}  // namespace kvire

NB_MODULE(_native, m) {
    using namespace kvire;
#ifndef KVIRE_WARN_OF_LEAKS
    // A daemon thread that still runs at exit keeps what its frames refer to, layers and functions of this module among
    // them, and so does whatever an exception's traceback holds. That memory ends with the process.
    nb::set_leak_warnings(false);
#endif
    m.doc() = "CPU kernels over the paged KV cache; kvire.attention.cpu is the interface to use.";

    nb::class_<PagedLayer>(m, "PagedLayer", "One layer of a pool; does not keep its memory alive.")
        .def("__init__", make_layer, nb::arg("k"), nb::arg("v"), nb::arg("k_block_stride"), nb::arg("v_block_stride"),
             nb::arg("num_blocks"), nb::arg("block_size"), nb::arg("heads"), nb::arg("key_width"),
             nb::arg("value_width"), nb::arg("dtype"), nb::arg("k_scales") = 0, nb::arg("v_scales") = 0,
             nb::arg("k_scale_stride") = 0, nb::arg("v_scale_stride") = 0);

    m.def("write_kv", write_kv_at, nb::arg("layer"), nb::arg("k"), nb::arg("k_token_stride"),
          nb::arg("k_head_stride"), nb::arg("v"), nb::arg("v_token_stride"), nb::arg("v_head_stride"),
          nb::arg("slots"), nb::arg("tokens"), nb::arg("threads"),
          "float32 k, v [tokens, heads, width] into int64 slots [tokens]; IndexError before anything is written.");
    m.def("gather_kv", gather_kv_at, nb::arg("layer"), nb::arg("block_table"), nb::arg("table_width"),
          nb::arg("start"), nb::arg("length"), nb::arg("k_out"), nb::arg("v_out"), nb::arg("threads"),
          "Positions start .. start + length - 1 into contiguous float32 k_out, v_out [length, heads, width].");
    m.def("decode_attention", decode_attention_at, nb::arg("layer"), nb::arg("queries"), nb::arg("query_stride"),
          nb::arg("query_head_stride"), nb::arg("sequences"), nb::arg("query_heads"), nb::arg("block_tables"),
          nb::arg("table_stride"), nb::arg("table_width"), nb::arg("context_lens"), nb::arg("scale"),
          nb::arg("window"), nb::arg("softcap"), nb::arg("sinks"), nb::arg("out"), nb::arg("threads"),
          "One float32 query row per sequence over its context; int32 block_tables and context_lens.");
    m.def("prefill_attention", prefill_attention_at, nb::arg("layer"), nb::arg("queries"), nb::arg("query_stride"),
          nb::arg("query_head_stride"), nb::arg("tokens"), nb::arg("query_heads"), nb::arg("block_table"),
          nb::arg("table_width"), nb::arg("context_len"), nb::arg("scale"), nb::arg("window"), nb::arg("softcap"),
          nb::arg("sinks"), nb::arg("out"), nb::arg("threads"),
          "The last `tokens` float32 query rows of one sequence over its context, causally; int32 block_table.");
    m.def("linear_rows", linear_rows_at, nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("weights"),
          nb::arg("out_width"), nb::arg("bias"), nb::arg("out"), nb::arg("threads"),
          "out [rows, out_width] = x [rows, width] times weights [out_width, width] transposed, plus bias.");
    m.def("rms_norm", rms_norm_at, nb::arg("x"), nb::arg("rows"), nb::arg("width"), nb::arg("weights"),
          nb::arg("epsilon"), nb::arg("out"), nb::arg("threads"),
          "out [rows, width] = weights [width] * x [rows, width] over the root of its mean square plus epsilon.");
    m.def("read_sum", read_sum_at, nb::arg("floats"), nb::arg("count"), nb::arg("threads"),
          "Reads `count` floats as fast as memory allows; a yardstick for benchmarks.");
    m.def("checksums", checksums, nb::arg("pieces"),
          "XXH3-128 of each (head, data) of a list, 16 bytes after another; the GIL is taken once for all.");
    m.def("copied_checksums", copied_checksums, nb::arg("pieces"),
          "As checksums, of each (head, source, target); source is copied to target, and the copy is what is hashed.");
    m.def("isa", [] { return kernels().isa; }, "The instruction set in use: avx2, neon or baseline.");
    m.def("thread_runtime", thread_runtime, "The OpenMP library whose threads run the kernels, or 'own threads'.");

    step::bind_isa(m);
    step::bind_linear(m);
    step::bind_program(m);
    step::bind_attention(m);
}
