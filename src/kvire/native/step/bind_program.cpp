// Programs of the native step, for Python: kvire/step/program.py builds them. What indexes memory is checked when a
// program is finished, and for each step before anything is written.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <vector>

#include "../gil.h"
#include "bind.h"
#include "program.h"

namespace nb = nanobind;

namespace kvire {
namespace step {
namespace {

using Address = uintptr_t;
using Words = std::vector<int64_t>;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

// Reads a flat list of whole numbers.
class Reader {
  public:
    explicit Reader(const Words& words) : words_(words) {}
    int64_t next() {
        if (at_ >= words_.size()) throw std::invalid_argument("a description of the program ends too early");
        return words_[at_++];
    }
    bool more() const { return at_ < words_.size(); }
    float number() {
        const int64_t bits = next();
        double value;
        std::memcpy(&value, &bits, sizeof value);
        return static_cast<float>(value);
    }
    Operand operand() {
        const int64_t space = next(), id = next(), offset = next();
        if (space < 0 || space > 4) throw std::invalid_argument("no such space");
        return {static_cast<Space>(space), id, offset};
    }

  private:
    const Words& words_;
    size_t at_ = 0;
};

// kind, sources, shape[4], then for the result and three sources: operand, stride[4]; then two numbers.
int64_t add_row_step(StepProgram& program, const Words& words) {
    Reader from(words);
    RowStep step{};
    step.shape.kind = static_cast<RowKind>(from.next());
    step.shape.sources = static_cast<int>(from.next());
    for (int64_t& size : step.shape.shape) size = from.next();
    step.to = from.operand();
    for (int64_t& stride : step.shape.to.stride) stride = from.next();
    for (int s = 0; s < kSources; ++s) {
        step.from[s] = from.operand();
        for (int64_t& stride : step.shape.from[s].stride) stride = from.next();
    }
    for (float& number : step.shape.number) number = from.number();
    return program.add_row_step(step);
}

// For each action: kind, index, two operands.
void add_rows(StepProgram& program, int domain, const Words& words) {
    Stage stage{};
    stage.kind = Stage::Kind::rows;
    stage.domain = static_cast<Domain>(domain);
    for (Reader from(words); from.more();) {
        const int64_t kind = from.next();
        if (kind < 0 || kind > 3) throw std::invalid_argument("no such action");
        RowAction action{};
        action.kind = static_cast<RowAction::Kind>(kind);
        action.index = from.next();
        action.first = from.operand();
        action.second = from.operand();
        stage.actions.push_back(action);
    }
    program.add_stage(std::move(stage));
}

// For each product: weights, quantised rows, operand of the rows, bias, operand of the result.
void add_linears(StepProgram& program, int domain, const Words& words) {
    Stage stage{};
    stage.kind = Stage::Kind::linear;
    stage.domain = static_cast<Domain>(domain);
    for (Reader from(words); from.more();) {
        LinearStep linear{};
        linear.weights = from.next();
        linear.quantised = from.next();
        linear.input = from.operand();
        linear.bias = from.next();
        linear.out = from.operand();
        stage.linears.push_back(linear);
    }
    program.add_stage(std::move(stage));
}

void add_attention(StepProgram& program, int64_t layer, const Words& words) {
    Reader from(words);
    Stage stage{};
    stage.domain = Domain::tokens;
    stage.layer = layer;
    stage.queries = from.operand();
    stage.out = from.operand();
    stage.kind = Stage::Kind::attend;
    program.add_stage(stage);
    stage.kind = Stage::Kind::merge;
    program.add_stage(stage);
}

void run_at(StepProgram& program, Address token_ids, Address positions, int64_t sequences, Address row_begin,
            Address context_lens, const std::vector<Address>& block_tables, const Words& table_strides,
            const std::vector<Address>& slots, Address wanted, int64_t wanted_rows, Address logits, int threads) {
    if (block_tables.size() != slots.size() || slots.size() != table_strides.size())
        throw std::invalid_argument("block tables, their strides and slots: one of each for every group");
    StepInput input{pointer<const int64_t>(token_ids),
                    pointer<const int64_t>(positions),
                    pointer<const int64_t>(wanted),
                    wanted_rows,
                    {sequences, pointer<const int64_t>(row_begin), pointer<const int64_t>(context_lens)},
                    {},
                    pointer<float>(logits)};
    for (size_t g = 0; g < slots.size(); ++g)
        input.tables.push_back({pointer<const int32_t>(block_tables[g]), table_strides[g], pointer<const int64_t>(slots[g])});
    const GilReleased released;
    program.run(input, threads);
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<StepProgram>(m, "StepProgram", "A model's step. Memory that it is told of must outlive it.")
        .def(nb::init<>())
        .def("value", &StepProgram::add_value, nb::arg("width"), "A row of floats for each token.")
        .def("constant",
             [](StepProgram& program, Address numbers, int64_t count) {
                 return program.add_constant(pointer<const float>(numbers), count);
             },
             nb::arg("numbers"), nb::arg("count"))
        .def("weights", &StepProgram::add_weights, nb::arg("weights"))
        .def("quantised", &StepProgram::add_quantised, nb::arg("width"))
        .def("layer",
             [](StepProgram& program, const PagedLayer& pool, int64_t group, int64_t query_heads, float scale,
                int64_t window, float softcap, Address sinks) {
                 return program.add_layer({pool, query_heads, scale, window, softcap, pointer<const float>(sinks)}, group);
             },
             nb::arg("pool"), nb::arg("group"), nb::arg("query_heads"), nb::arg("scale"), nb::arg("window"),
             nb::arg("softcap"), nb::arg("sinks"))
        .def("row_step", add_row_step, nb::arg("words"))
        .def("rows", add_rows, nb::arg("domain"), nb::arg("words"))
        .def("linears", add_linears, nb::arg("domain"), nb::arg("words"))
        .def("attention", add_attention, nb::arg("layer"), nb::arg("words"))
        .def("finish", &StepProgram::finish, nb::arg("scratch_floats"), nb::arg("logits"))
        .def_prop_ro("logits_width", &StepProgram::logits_width)
        .def_prop_ro("waited_s", &StepProgram::waited_s, "Of the last step: the longest that a thread waited beyond a spin.")
        .def("run", run_at, nb::arg("token_ids"), nb::arg("positions"), nb::arg("sequences"), nb::arg("row_begin"),
             nb::arg("context_lens"), nb::arg("block_tables"), nb::arg("table_strides"), nb::arg("slots"),
             nb::arg("wanted"), nb::arg("wanted_rows"), nb::arg("logits"), nb::arg("threads"));
}

}  // namespace step
}  // namespace kvire
