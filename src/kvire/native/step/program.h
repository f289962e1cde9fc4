// A model's step as a list of stages, run in one call.
//
// Values are rows of floats, one row for each token of the step (or for each wanted row of logits, behind the stage
// that selects them). A stage is a set of tasks that may run in any order and on any thread; it is over when its tasks
// are done, not when all threads have arrived, so that nobody waits for a thread that the system has put aside before
// it took anything.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "row_ops.h"

namespace kvire {
namespace step {

// Whose rows a stage computes.
enum class Domain : int { tokens = 0, wanted = 1 };

// Where an operand of a row operation is.
enum class Space : int {
    value = 0,     // a value, `offset` floats into its row
    constant = 1,  // a constant
    position = 2,  // the token's position, as a float
    selected = 3,  // the value of the token whose logits row this is
    scratch = 4,   // of the worker alone: gone when the next row begins
};

struct Operand {
    Space space;
    int64_t id, offset;
};

struct RowStep {
    RowShape shape;
    Operand to, from[kSources];
};

// What else a stage of rows may do with each row, in order.
struct RowAction {
    enum class Kind : int { operation = 0, embed = 1, quantise = 2, write_kv = 3 } kind;
    int64_t index;        // operation: of row steps; embed: of weights; quantise: of quantised rows; write_kv: of layers
    Operand first, second;  // embed: result; quantise: source; write_kv: K, V
};

struct LinearStep {
    int64_t weights;
    int64_t quantised;  // of quantised rows; below 0: the weights are floats, and the rows those of `input`
    Operand input;
    int64_t bias;  // of constants; below 0: none
    Operand out;   // a value
};

struct Stage {
    enum class Kind : int { rows = 0, linear = 1, attend = 2, merge = 3 } kind;
    Domain domain;
    std::vector<RowAction> actions;   // rows
    std::vector<LinearStep> linears;  // linear: they share nothing but their barrier
    int64_t layer;                    // attend, merge
    Operand queries, out;             // attend, merge
};

// One step's input. Pointers are the caller's.
struct StepInput {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* wanted;  // rows whose logits are wanted
    int64_t wanted_rows;
    StepSequences sequences;
    std::vector<StepTables> tables;  // of each group
    float* logits;                   // [wanted rows, width of the last value]
};

class StepProgram {
  public:
    // Each returns its number. Memory behind constants, weights and layers stays the caller's.
    int64_t add_value(int64_t width);
    int64_t add_constant(const float* numbers, int64_t count);
    int64_t add_weights(const PackedWeights& weights);
    int64_t add_quantised(int64_t width);
    int64_t add_layer(const StepLayer& layer, int64_t group);
    int64_t add_row_step(const RowStep& step);
    void add_stage(Stage stage);
    // floats: that row operations need beside values. logits: the value of the wanted rows that is the result.
    void finish(int64_t scratch_floats, int64_t logits);

    // Checks the input, then runs on up to `threads` threads. Throws before anything is written.
    void run(const StepInput& input, int threads);

    int64_t groups() const { return groups_; }
    int64_t logits_width() const { return widths_.at(static_cast<size_t>(logits_)); }
    double waited_s() const { return waited_s_; }  // of the last step: the calling thread's, for others

  private:
    struct Running;
    friend struct Running;

    void check_operand(const Operand& operand, int64_t floats) const;
    void check_result(const Operand& operand, int64_t floats) const;
    void check_step(const RowStep& step, Domain domain) const;
    void check_rows(const Stage& stage) const;
    void check_linear(const LinearStep& linear) const;
    void check_input(const StepInput& input) const;
    void reserve(int64_t rows, int64_t wanted, int threads);

    std::vector<int64_t> widths_;
    struct Constant { const float* numbers; int64_t count; };
    std::vector<Constant> constants_;
    std::vector<PackedWeights> weights_;
    std::vector<int64_t> quantised_widths_;
    std::vector<StepLayer> layers_;
    std::vector<int64_t> layer_groups_;
    std::vector<RowStep> steps_;
    std::vector<Stage> stages_;
    int64_t groups_ = 0, scratch_floats_ = 0, logits_ = 0, attention_floats_ = 0;
    double waited_s_ = 0;
    std::atomic<bool> runs_{false};

    // Memory of a step, kept for the next.
    int64_t rows_ = 0, wanted_ = 0;
    int workers_ = 0;
    std::vector<std::vector<float>> values_;
    std::vector<std::vector<char>> quantised_;
    std::vector<float> scratch_, attention_scratch_, partials_;
};

}  // namespace step
}  // namespace kvire
