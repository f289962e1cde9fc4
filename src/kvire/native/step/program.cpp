#include "program.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "../parallel.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace kvire {
namespace step {
namespace {

// Of a task of rows, so that what its operations write stays in the first two caches.
constexpr int64_t kChunkRows = 8;

// Waiting is mostly shorter than a microsecond. Beyond this a thread that others wait for has probably lost its core:
// yield ours, it may need it.
constexpr int kPauses = 3000;

void pause() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

int64_t StepProgram::add_value(int64_t width) {
    if (width < 1 || width > (1 << 24)) throw std::invalid_argument("a value has an impossible width");
    widths_.push_back(width);
    return static_cast<int64_t>(widths_.size()) - 1;
}

int64_t StepProgram::add_constant(const float* numbers, int64_t count) {
    constants_.push_back({numbers, count});
    return static_cast<int64_t>(constants_.size()) - 1;
}

int64_t StepProgram::add_weights(const PackedWeights& weights) {
    weights_.push_back(weights);
    return static_cast<int64_t>(weights_.size()) - 1;
}

int64_t StepProgram::add_quantised(int64_t width) {
    if (width < 1) throw std::invalid_argument("quantised rows have at least one number");
    quantised_widths_.push_back(width);
    return static_cast<int64_t>(quantised_widths_.size()) - 1;
}

int64_t StepProgram::add_layer(const StepLayer& layer, int64_t group) {
    if (group < 0 || group > 64) throw std::invalid_argument("no such group");
    layers_.push_back(layer);
    layer_groups_.push_back(group);
    groups_ = std::max(groups_, group + 1);
    attention_floats_ = std::max(attention_floats_,
                                 AttentionWork::scratch_floats(layer.pool.key_width, layer.pool.value_width,
                                                               layer.query_heads, layer.pool.heads));
    return static_cast<int64_t>(layers_.size()) - 1;
}

int64_t StepProgram::add_row_step(const RowStep& step) {
    check_row_shape(step.shape);
    steps_.push_back(step);
    return static_cast<int64_t>(steps_.size()) - 1;
}

void StepProgram::add_stage(Stage stage) { stages_.push_back(std::move(stage)); }

void StepProgram::check_operand(const Operand& operand, int64_t floats) const {
    const auto fits = [&](int64_t there) {
        if (operand.offset < 0 || operand.offset + floats > there)
            throw std::invalid_argument("an operand leaves the memory that it names");
    };
    switch (operand.space) {
        case Space::value:
        case Space::selected: return fits(widths_.at(static_cast<size_t>(operand.id)));
        case Space::constant: return fits(constants_.at(static_cast<size_t>(operand.id)).count);
        case Space::position: return fits(1);
        case Space::scratch: return fits(scratch_floats_);
    }
    throw std::invalid_argument("no such space");
}

void StepProgram::check_result(const Operand& operand, int64_t floats) const {
    if (operand.space != Space::value && operand.space != Space::scratch)
        throw std::invalid_argument("a result is a value or scratch");
    check_operand(operand, floats);
}

namespace {

constexpr int64_t kMostStride = int64_t{1} << 30;

// Floats from an operand's first to its last. without_last: a reduction's result has no last dimension.
int64_t extent(const RowStrides& strides, const int64_t (&shape)[kDimensions], bool without_last) {
    int64_t floats = 1;
    for (int i = 0; i < kDimensions - (without_last ? 1 : 0); ++i) {
        if (strides.stride[i] < 0 || strides.stride[i] > kMostStride)
            throw std::invalid_argument("a stride is neither negative nor larger than any row");
        floats += (shape[i] - 1) * strides.stride[i];
    }
    return floats;
}

void check_space(const Operand& operand, Domain domain) {
    if (operand.space == Space::selected && domain != Domain::wanted)
        throw std::invalid_argument("only stages of wanted rows select them");
}

}  // namespace

void StepProgram::check_step(const RowStep& step, Domain domain) const {
    const RowKind kind = step.shape.kind;
    const bool reduces = kind == RowKind::sum || kind == RowKind::mean || kind == RowKind::largest;
    check_result(step.to, extent(step.shape.to, step.shape.shape, reduces));
    for (int s = 0; s < step.shape.sources; ++s) {
        check_space(step.from[s], domain);
        check_operand(step.from[s], extent(step.shape.from[s], step.shape.shape, false));
    }
}

void StepProgram::check_rows(const Stage& stage) const {
    for (const RowAction& action : stage.actions) {
        const bool is_of_tokens = action.kind == RowAction::Kind::embed || action.kind == RowAction::Kind::write_kv;
        if (is_of_tokens && stage.domain != Domain::tokens)
            throw std::invalid_argument("tokens are embedded, and KV written, in stages of all tokens");
        if (action.kind != RowAction::Kind::operation) check_space(action.first, stage.domain);
        switch (action.kind) {
            case RowAction::Kind::operation: check_step(steps_.at(static_cast<size_t>(action.index)), stage.domain); break;
            case RowAction::Kind::embed:
                check_result(action.first, weights_.at(static_cast<size_t>(action.index)).width);
                break;
            case RowAction::Kind::quantise:
                check_operand(action.first, quantised_widths_.at(static_cast<size_t>(action.index)));
                break;
            case RowAction::Kind::write_kv: {
                const PagedLayer& pool = layers_.at(static_cast<size_t>(action.index)).pool;
                check_operand(action.first, pool.heads * pool.key_width);
                check_operand(action.second, pool.heads * pool.value_width);
                break;
            }
        }
    }
}

void StepProgram::check_linear(const LinearStep& linear) const {
    const PackedWeights& weights = weights_.at(static_cast<size_t>(linear.weights));
    if (linear.out.space != Space::value) throw std::invalid_argument("a product's result is a value");
    check_operand(linear.out, weights.outputs);
    if (linear.bias >= 0) check_operand({Space::constant, linear.bias, 0}, weights.outputs);
    if (layout_of(weights.form).is_float) {
        if (linear.input.space != Space::value) throw std::invalid_argument("a product's rows are a value");
        check_operand(linear.input, weights.width);
    } else if (quantised_widths_.at(static_cast<size_t>(linear.quantised)) != weights.width) {
        throw std::invalid_argument("quantised rows have another width than the weights");
    }
}

void StepProgram::finish(int64_t scratch_floats, int64_t logits) {
    scratch_floats_ = scratch_floats;
    logits_ = logits;
    widths_.at(static_cast<size_t>(logits));
    for (const Stage& stage : stages_) {
        check_rows(stage);
        for (const LinearStep& linear : stage.linears) check_linear(linear);
        if (stage.kind != Stage::Kind::attend && stage.kind != Stage::Kind::merge) continue;
        const StepLayer& layer = layers_.at(static_cast<size_t>(stage.layer));
        if (stage.queries.space != Space::value || stage.out.space != Space::value)
            throw std::invalid_argument("attention is between values");
        check_operand(stage.queries, layer.query_heads * layer.pool.key_width);
        check_operand(stage.out, layer.query_heads * layer.pool.value_width);
    }
}

void StepProgram::check_input(const StepInput& input) const {
    if (static_cast<int64_t>(input.tables.size()) != groups_) throw std::invalid_argument("block tables of every group");
    if (input.sequences.count < 1) throw std::invalid_argument("a step has at least one sequence");
    const int64_t rows = input.sequences.row_begin[input.sequences.count];
    for (int64_t i = 0; i < input.wanted_rows; ++i)
        if (input.wanted[i] < 0 || input.wanted[i] >= rows) throw std::out_of_range("no such row of the step");
    std::map<std::tuple<int64_t, int64_t>, bool> checked;  // layers of a group differ in nothing that is checked
    for (size_t i = 0; i < layers_.size(); ++i) {
        const auto key = std::make_tuple(layer_groups_[i], layers_[i].window);
        if (!checked.emplace(key, true).second) continue;
        step::check_step(layers_[i], input.sequences, input.tables[static_cast<size_t>(layer_groups_[i])]);
    }
    for (const Stage& stage : stages_)
        for (const RowAction& action : stage.actions)
            if (action.kind == RowAction::Kind::embed)
                for (int64_t row = 0; row < rows; ++row)
                    if (input.token_ids[row] < 0 ||
                        input.token_ids[row] >= weights_[static_cast<size_t>(action.index)].outputs)
                        throw std::out_of_range("no such token");
}

void StepProgram::reserve(int64_t rows, int64_t wanted, int threads) {
    if (rows > rows_ || wanted > wanted_) {
        rows_ = std::max(rows_, rows);
        wanted_ = std::max(wanted_, wanted);
        const int64_t most = std::max(rows_, wanted_);
        values_.resize(widths_.size());
        for (size_t i = 0; i < widths_.size(); ++i) values_[i].resize(static_cast<size_t>(most * widths_[i]));
        quantised_.resize(quantised_widths_.size());
        for (size_t i = 0; i < quantised_widths_.size(); ++i)
            quantised_[i].resize(static_cast<size_t>(QuantisedRows::bytes(most, quantised_widths_[i]) + 64));
    }
    if (threads > workers_) {
        workers_ = threads;
        scratch_.resize(static_cast<size_t>(threads * (scratch_floats_ + 16)));
        attention_scratch_.resize(static_cast<size_t>(threads * attention_floats_));
    }
}

// One step under way.
struct StepProgram::Running {
    StepProgram& program;
    const StepInput& input;
    int64_t rows;
    int threads;
    std::vector<QuantisedRows> quantised;
    std::vector<float> positions;
    std::map<std::tuple<int64_t, int64_t, int64_t>, std::unique_ptr<AttentionPlan>> plans;
    std::vector<std::vector<LinearWork>> linears;  // of each stage
    std::vector<std::unique_ptr<AttentionWork>> attentions;
    std::vector<const AttentionPlan*> plan_of;
    std::vector<int64_t> tasks;
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0}, done{0};
    };
    std::vector<Counter> counters;

    Running(StepProgram& program, const StepInput& input, int threads)
        : program(program), input(input), rows(input.sequences.row_begin[input.sequences.count]), threads(threads),
          linears(program.stages_.size()), attentions(program.stages_.size()), plan_of(program.stages_.size()),
          counters(program.stages_.size()) {
        for (size_t i = 0; i < program.quantised_.size(); ++i) {
            char* const memory = program.quantised_[i].data();
            char* const at = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
            quantised.push_back(QuantisedRows::at(at, std::max(rows, input.wanted_rows), program.quantised_widths_[i]));
        }
        for (int64_t row = 0; row < rows; ++row) positions.push_back(static_cast<float>(input.positions[row]));
        plan();
        for (size_t s = 0; s < program.stages_.size(); ++s) tasks.push_back(prepare(s));
    }

    int64_t rows_of(Domain domain) const { return domain == Domain::tokens ? rows : input.wanted_rows; }

    void plan() {
        int64_t partials = 0;
        for (const StepLayer& layer : program.layers_) {
            const auto key = std::make_tuple(layer.pool.heads, layer.query_heads, layer.window);
            std::unique_ptr<AttentionPlan>& plan = plans[key];
            if (!plan)
                plan = std::make_unique<AttentionPlan>(input.sequences, layer.pool.heads, layer.query_heads,
                                                       layer.window, threads);
            partials = std::max(partials, AttentionWork::partial_floats(*plan, layer.pool.value_width));
        }
        if (static_cast<int64_t>(program.partials_.size()) < partials)
            program.partials_.resize(static_cast<size_t>(partials));
    }

    float* value(const Operand& operand, int64_t row) const {
        const auto id = static_cast<size_t>(operand.id);
        return program.values_[id].data() + row * program.widths_[id] + operand.offset;
    }

    // The number of the stage's tasks; nothing of it runs yet.
    int64_t prepare(size_t s) {
        const Stage& stage = program.stages_[s];
        const int64_t count = rows_of(stage.domain);
        if (stage.kind == Stage::Kind::rows) return (count + chunk(count) - 1) / chunk(count);
        if (stage.kind == Stage::Kind::linear) {
            int64_t total = 0;
            for (const LinearStep& each : stage.linears) {
                const PackedWeights& weights = program.weights_[static_cast<size_t>(each.weights)];
                const bool is_float = layout_of(weights.form).is_float;
                const LinearWork::Input from{
                    is_float ? nullptr : &quantised[static_cast<size_t>(each.quantised)],
                    is_float ? value(each.input, 0) : nullptr,
                    is_float ? program.widths_[static_cast<size_t>(each.input.id)] : 0, nullptr};
                const float* const bias =
                    each.bias < 0 ? nullptr : program.constants_[static_cast<size_t>(each.bias)].numbers;
                linears[s].emplace_back(weights, from, count, bias, value(each.out, 0),
                                        program.widths_[static_cast<size_t>(each.out.id)], threads);
                total += linears[s].back().tasks();
            }
            return count ? total : 0;
        }
        const StepLayer& layer = program.layers_[static_cast<size_t>(stage.layer)];
        const AttentionPlan& plan = *plans[std::make_tuple(layer.pool.heads, layer.query_heads, layer.window)];
        const int64_t group = program.layer_groups_[static_cast<size_t>(stage.layer)];
        attentions[s] = std::make_unique<AttentionWork>(
            layer, input.sequences, input.tables[static_cast<size_t>(group)], plan,
            AttentionWork::Rows{value(stage.queries, 0), program.widths_[static_cast<size_t>(stage.queries.id)]},
            value(stage.out, 0), program.widths_[static_cast<size_t>(stage.out.id)],
            program.attention_scratch_.data(), program.partials_.data());
        plan_of[s] = &plan;
        return static_cast<int64_t>(stage.kind == Stage::Kind::attend ? plan.attends.size() : plan.merges.size());
    }

    int64_t chunk(int64_t count) const {
        return std::max<int64_t>(1, std::min(kChunkRows, (count + threads - 1) / std::max(threads, 1)));
    }

    void run_task(size_t s, int64_t task, int worker) {
        const Stage& stage = program.stages_[s];
        switch (stage.kind) {
            case Stage::Kind::rows: {
                const int64_t count = rows_of(stage.domain), size = chunk(count);
                for (int64_t row = task * size; row < std::min(count, (task + 1) * size); ++row)
                    for (const RowAction& action : stage.actions) act(stage.domain, action, row, worker);
                return;
            }
            case Stage::Kind::linear:
                for (const LinearWork& work : linears[s]) {
                    if (task < work.tasks()) return work.run(task);
                    task -= work.tasks();
                }
                return;
            case Stage::Kind::attend:
                return attentions[s]->attend(plan_of[s]->attends[static_cast<size_t>(task)], worker);
            case Stage::Kind::merge: return attentions[s]->merge(plan_of[s]->merges[static_cast<size_t>(task)]);
        }
    }

    float* place(const Operand& operand, Domain domain, int64_t row, int worker) const {
        switch (operand.space) {
            case Space::value: return value(operand, row);
            case Space::selected: return value(operand, input.wanted[row]);
            case Space::constant:
                return const_cast<float*>(program.constants_[static_cast<size_t>(operand.id)].numbers) + operand.offset;
            case Space::position:
                return const_cast<float*>(positions.data()) + (domain == Domain::wanted ? input.wanted[row] : row);
            case Space::scratch: break;
        }
        return program.scratch_.data() + worker * (program.scratch_floats_ + 16) + operand.offset;
    }

    void act(Domain domain, const RowAction& action, int64_t row, int worker) {
        switch (action.kind) {
            case RowAction::Kind::operation: {
                const RowStep& step = program.steps_[static_cast<size_t>(action.index)];
                const float* from[kSources] = {};
                for (int i = 0; i < step.shape.sources; ++i) from[i] = place(step.from[i], domain, row, worker);
                return row_kernels().run(step.shape, place(step.to, domain, row, worker), from);
            }
            case RowAction::Kind::embed:
                return unpack_row(program.weights_[static_cast<size_t>(action.index)], input.token_ids[row],
                                  place(action.first, domain, row, worker));
            case RowAction::Kind::quantise:
                return quantise_row(place(action.first, domain, row, worker), quantised[static_cast<size_t>(action.index)], row);
            case RowAction::Kind::write_kv: {
                const auto id = static_cast<size_t>(action.index);
                const StepTables& tables = input.tables[static_cast<size_t>(program.layer_groups_[id])];
                const StepTables of_row{tables.block_tables, tables.stride, tables.slots + row};
                return AttentionWork::write(program.layers_[id], of_row, {place(action.first, domain, row, worker), 0},
                                            {place(action.second, domain, row, worker), 0}, 0, 1);
            }
        }
    }

    // Every stage in order; returns the seconds spent waiting for others.
    double work(int worker) {
        using Clock = std::chrono::steady_clock;
        double waited = 0;
        for (size_t s = 0; s < tasks.size(); ++s) {
            Counter& counter = counters[s];
            for (;;) {
                const int64_t task = counter.next.fetch_add(1, std::memory_order_relaxed);
                if (task >= tasks[s]) break;
                run_task(s, task, worker);
                counter.done.fetch_add(1, std::memory_order_release);
            }
            if (counter.done.load(std::memory_order_acquire) >= tasks[s]) continue;
            int pauses = 0;
            Clock::time_point since;
            while (counter.done.load(std::memory_order_acquire) < tasks[s]) {
                if (++pauses < kPauses) {
                    pause();
                    continue;
                }
                if (pauses == kPauses) since = Clock::now();
                std::this_thread::yield();
            }
            if (pauses >= kPauses) waited += std::chrono::duration<double>(Clock::now() - since).count();
        }
        return waited;
    }
};

void StepProgram::run(const StepInput& input, int threads) {
    check_input(input);
    if (runs_.exchange(true)) throw std::runtime_error("this program runs on another thread already");
    struct Ended {
        std::atomic<bool>& runs;
        ~Ended() { runs = false; }
    } ended{runs_};
    threads = std::max(1, threads);
    reserve(input.sequences.row_begin[input.sequences.count], input.wanted_rows, threads);
    Running running(*this, input, threads);
    std::atomic<double> waited{0};
    parallel_for(threads, threads, [&](int64_t, int worker) {
        const double mine = running.work(worker);
        double before = waited.load();
        while (mine > before && !waited.compare_exchange_weak(before, mine)) {
        }
    });
    waited_s_ = waited.load();
    if (input.wanted_rows)
        std::memcpy(input.logits, values_[static_cast<size_t>(logits_)].data(),
                    static_cast<size_t>(input.wanted_rows * logits_width()) * sizeof(float));
}

}  // namespace step
}  // namespace kvire
