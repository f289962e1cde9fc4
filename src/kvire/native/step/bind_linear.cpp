// Packed weights and their products, for Python. Arrays come as addresses; kvire/weights checks shapes and dtypes.
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../gil.h"
#include "../parallel.h"
#include "bind.h"
#include "isa.h"
#include "linear.h"

namespace nb = nanobind;

namespace kvire {
namespace step {
namespace {

using Address = uintptr_t;

constexpr int64_t kMostRows = 1 << 20, kMostElements = int64_t{1} << 40;

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

Form form_of(int code) {
    require(code >= 0 && code < kForms, "no such form of weights");
    return static_cast<Form>(code);
}

const LinearKernels& kernels_for(const std::string& name) {
    if (name.empty()) return linear_kernels();
    if (name == "baseline") return baseline::linear_kernels;
#ifdef KVIRE_HAS_AVX512
    if (name == "avx2" && isa() != Isa::baseline) return avx2::linear_kernels;
    if (name == "avx512" && isa() == Isa::avx512) return avx512::linear_kernels;
#endif
    throw std::invalid_argument("this processor, or KVIRE_ISA, has no " + name);
}

void make_weights(PackedWeights* self, int form, int64_t outputs, int64_t width, Address bytes) {
    require(outputs <= kMostElements && width <= kMostElements, "a size is larger than any matrix's");
    check_shape(form_of(form), outputs, width);
    new (self) PackedWeights{form_of(form), outputs, width, reinterpret_cast<const uint8_t*>(bytes)};
}

void pack_rows(int form, int64_t outputs, int64_t width, Address rows, Address packed, int threads) {
    check_shape(form_of(form), outputs, width);
    require(threads >= 1, "threads: at least 1");
    const PackedWeights shape{form_of(form), outputs, width, nullptr};
    const GilReleased released;
    parallel_for(shape.blocks(), threads, [&](int64_t block, int) {
        pack(shape, reinterpret_cast<const uint8_t*>(rows), reinterpret_cast<uint8_t*>(packed), block, block + 1);
    });
}

void unpack(const PackedWeights& weights, Address to, int64_t begin, int64_t end, int threads) {
    require(begin >= 0 && begin <= end && end <= weights.outputs, "no such outputs");
    require(threads >= 1, "threads: at least 1");
    const GilReleased released;
    parallel_for(end - begin, threads, [&](int64_t i, int) {
        unpack_row(weights, begin + i, reinterpret_cast<float*>(to) + i * weights.width);
    });
}

void unpack_rows_at(const PackedWeights& weights, Address ids, int64_t count, Address to, int threads) {
    const auto* const rows = reinterpret_cast<const int64_t*>(ids);
    require(count >= 0 && threads >= 1, "threads: at least 1");
    for (int64_t i = 0; i < count; ++i)
        if (rows[i] < 0 || rows[i] >= weights.outputs) throw std::out_of_range("no row " + std::to_string(rows[i]));
    const GilReleased released;
    parallel_for(count, threads, [&](int64_t i, int) {
        unpack_row(weights, rows[i], reinterpret_cast<float*>(to) + i * weights.width);
    });
}

// Memory that the next call uses again: a step makes hundreds.
char* scratch(int64_t bytes) {
    thread_local std::vector<char> memory;
    if (static_cast<int64_t>(memory.size()) < bytes + 64) memory.resize(static_cast<size_t>(bytes + 64));
    const auto at = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (64 - at % 64) % 64;
}

void product(const PackedWeights& weights, const LinearKernels& kernels, const float* x, int64_t rows,
             const float* bias, float* out, int threads) {
    const bool is_float = layout_of(weights.form).is_float;
    QuantisedRows quantised{};
    if (!is_float) {
        quantised = QuantisedRows::at(scratch(QuantisedRows::bytes(rows, weights.width)), rows, weights.width);
        constexpr int64_t together = 8;  // fewer are not worth waking a thread
        parallel_for((rows + together - 1) / together, threads, [&](int64_t task, int) {
            for (int64_t row = task * together; row < rows && row < (task + 1) * together; ++row) {
                const int64_t at = row * quantised.groups();
                kernels.quantise_row(x + row * weights.width, weights.width, quantised.q + at * kGroup,
                                     quantised.scale + at, quantised.scaled_sum + at, quantised.sums + 2 * at);
            }
        });
    }
    const LinearWork::Input input{is_float ? nullptr : &quantised, x, weights.width, nullptr};
    const LinearWork work(weights, input, rows, bias, out, weights.outputs, threads, kernels);
    parallel_for(work.tasks(), threads, [&](int64_t task, int) { work.run(task); });
}

void linear_at(const PackedWeights& weights, Address x, int64_t rows, Address bias, Address out, int threads,
               const std::string& isa) {
    require(rows >= 0 && rows <= kMostRows, "rows: at most a million");
    require(threads >= 1, "threads: at least 1");
    const LinearKernels& kernels = kernels_for(isa);
    const GilReleased released;
    product(weights, kernels, reinterpret_cast<const float*>(x), rows, reinterpret_cast<const float*>(bias),
            reinterpret_cast<float*>(out), threads);
}

void quantise_at(Address x, int64_t width, Address q, Address scale, Address scaled_sum, Address sums,
                 const std::string& isa) {
    require(width >= 1 && width <= kMostElements, "width: at least 1");
    kernels_for(isa).quantise_row(reinterpret_cast<const float*>(x), width, reinterpret_cast<int8_t*>(q),
                                  reinterpret_cast<float*>(scale), reinterpret_cast<float*>(scaled_sum),
                                  reinterpret_cast<int16_t*>(sums));
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<PackedWeights>(m, "PackedWeights", "A packed matrix; does not keep its memory alive.")
        .def("__init__", make_weights, nb::arg("form"), nb::arg("outputs"), nb::arg("width"), nb::arg("bytes"));
    m.def("packed_bytes", [](int form, int64_t outputs, int64_t width) {
        return packed_bytes(form_of(form), outputs, width);
    }, nb::arg("form"), nb::arg("outputs"), nb::arg("width"), "Bytes of a packed matrix [outputs, width].");
    m.def("pack_weights", pack_rows, nb::arg("form"), nb::arg("outputs"), nb::arg("width"), nb::arg("rows"),
          nb::arg("packed"), nb::arg("threads"), "Rows in the file's own blocks into the packed order.");
    m.def("unpack_weights", unpack, nb::arg("weights"), nb::arg("to"), nb::arg("begin"), nb::arg("end"),
          nb::arg("threads"), "The exact float32 weights of outputs begin .. end - 1: [end - begin, width].");
    m.def("unpack_rows", unpack_rows_at, nb::arg("weights"), nb::arg("ids"), nb::arg("count"), nb::arg("to"),
          nb::arg("threads"), "The exact float32 rows of int64 ids: [count, width]; IndexError before any is written.");
    m.def("packed_linear", linear_at, nb::arg("weights"), nb::arg("x"), nb::arg("rows"), nb::arg("bias"),
          nb::arg("out"), nb::arg("threads"), nb::arg("isa") = "",
          "float32 out [rows, outputs] = x [rows, width] times packed weights, plus bias (an address, or 0).");
    m.def("quantise_row", quantise_at, nb::arg("x"), nb::arg("width"), nb::arg("q"), nb::arg("scale"),
          nb::arg("scaled_sum"), nb::arg("sums"), nb::arg("isa") = "",
          "A float32 row as int8 q, with a float32 scale for each 32 and int16 sums of each 16.");
}

}  // namespace step
}  // namespace kvire
