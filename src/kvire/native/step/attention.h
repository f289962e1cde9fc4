// Attention of a step over paged KV, in the order of docs/adr/0019-one-arithmetic.md: a row has the same bits whether
// its token is prefilled or decoded, and whatever else is in the step.
//
// The pool is laid out by heads: K of a block [head, width, token], V [head, token, width], scales of int8 [head,
// token]. Positions then sit in the lanes of scores, widths in those of values.
#pragma once

#include <stdint.h>

#include <vector>

#include "../kernels.h"

namespace kvire {
namespace step {

constexpr int64_t kPiece = 64;      // positions with a largest score and sums of their own, from multiples of it on
constexpr int64_t kWidest = 1024;   // numbers of a key or value, at most
constexpr int64_t kTaskRows = 96;   // query rows of one prefill task: a piece of KV is converted once for them

// One layer of a pool, and how its queries meet it.
struct StepLayer {
    PagedLayer pool;  // strides as there; within a block as above
    int64_t query_heads;
    float scale;
    int64_t window;      // each token sees its last `window` positions; 0: all
    float softcap;       // 0: none
    const float* sinks;  // [query_heads] or null
};

// The sequences of a step; each owns rows row_begin[s] .. row_begin[s + 1] - 1, the last of its context.
struct StepSequences {
    int64_t count;
    const int64_t* row_begin;     // [count + 1]
    const int64_t* context_lens;  // with the step's own tokens
};

// Where one group of layers keeps the KV of these sequences.
struct StepTables {
    const int32_t* block_tables;  // [sequences, stride]
    int64_t stride;
    const int64_t* slots;  // of each row: block * block_size + offset
};

// Throws std::out_of_range unless all slots and needed blocks are in the pool, before anything is written.
void check_step(const StepLayer& layer, const StepSequences& sequences, const StepTables& tables);

// The same for every layer of one shape and window: which rows and pieces each task takes.
struct AttendTask {
    int64_t sequence, head;            // KV head
    int64_t first_row, rows;           // tokens
    int64_t first_piece, piece_end;    // for decodes that are split; otherwise all that the rows see
    int64_t partial;                   // of the first piece; below 0: rows end in this task
};

struct MergeTask {
    int64_t sequence, head, partial, pieces;
};

class AttentionPlan {
  public:
    AttentionPlan(const StepSequences& sequences, int64_t heads, int64_t query_heads, int64_t window, int workers);

    std::vector<AttendTask> attends;  // long ones first
    std::vector<MergeTask> merges;
    int64_t partials = 0;  // pieces times query heads of a KV head
};

struct AttentionKernels;
struct PieceInPool;
const AttentionKernels& attention_kernels();

// One layer's attention of one step: write all, then attend all, then merge all.
class AttentionWork {
  public:
    struct Rows {
        const float* first;
        int64_t stride;  // from row to row; heads and widths are contiguous
    };

    // scratch: scratch_floats(...) for all workers together; partials: of the plan.
    AttentionWork(const StepLayer& layer, const StepSequences& sequences, const StepTables& tables,
                  const AttentionPlan& plan, Rows queries, float* out, int64_t out_stride, float* scratch,
                  float* partials, const AttentionKernels& kernels = attention_kernels());

    static int64_t scratch_floats(int64_t key_width, int64_t value_width, int64_t query_heads, int64_t heads);
    static int64_t partial_floats(const AttentionPlan& plan, int64_t value_width);

    // Rows begin .. end - 1 into the pool, rounded to its dtype.
    static void write(const StepLayer& layer, const StepTables& tables, Rows k, Rows v, int64_t begin, int64_t end);

    void attend(const AttendTask& task, int worker) const;
    void merge(const MergeTask& task) const;

  private:
    // seen: the first position that a row of the task sees; a block table says nothing of those before.
    void pack(const AttendTask& task, int64_t piece, int64_t seen, int64_t end, float* k, float* v) const;
    void locate(const AttendTask& task, int64_t piece, int64_t seen, int64_t end, PieceInPool& at) const;

    const StepLayer& layer_;
    const StepSequences& sequences_;
    const StepTables& tables_;
    const AttentionPlan& plan_;
    Rows queries_;
    float* out_;
    int64_t out_stride_;
    float *scratch_, *partials_;
    int64_t group_, value_floats_;
    bool reads_pool_;  // decodes need no conversion first
    const AttentionKernels& kernels_;
};

// What rows have added up over the pieces so far, or over one piece.
struct Sums {
    float* largest;  // [rows]
    float* weight;   // [rows]
    float* values;   // [rows, stride]
    int64_t stride;
};

// Rows of queries against one piece. Row r sees positions low[r] .. high[r] - 1 of it, none if they are equal.
struct PieceRows {
    const float* queries;  // [rows, key_width], scaled
    int64_t rows, key_width, value_width;
    const float* k;  // [key_width, kPiece]
    const float* v;  // [kPiece, stride of sums]
    const int32_t *low, *high;
    float softcap;
};

// The same for few rows, read from the pool where it lies: sixteen positions at a time, from whole lines of a block.
struct PieceInPool {
    const float* queries;
    int64_t rows, key_width, value_width;
    DType dtype;
    int64_t vectors;                                   // sixteens of positions that are there
    const char *k[kPiece / 16], *v[kPiece / 16];       // of each: K of width 0, V of the first position
    const float *k_scales[kPiece / 16], *v_scales[kPiece / 16];
    const char *next_k[kPiece / 16], *next_v[kPiece / 16];  // to prefetch meanwhile
    int64_t block_size;
    const int32_t *low, *high;
    float softcap;
};

// Rows that PieceInPool takes in one tile, and at most: for more, conversion to floats pays.
constexpr int64_t kFewRows = 4, kMostRowsInPool = 16;

struct AttentionKernels {
    // `count` positions of one head of one block into columns at .. of a panel; scales: of its tokens or null.
    void (*pack_k)(const char* from, const float* scales, DType dtype, int64_t width, int64_t block_size, int64_t first,
                   int64_t count, float* panel, int64_t at);
    void (*pack_v)(const char* from, const float* scales, DType dtype, int64_t width, int64_t first, int64_t count,
                   float* panel, int64_t stride, int64_t at);
    // is_first: sums are new; else the piece is joined to them.
    void (*attend)(const PieceRows& rows, const Sums& sums, bool is_first);
    void (*attend_in_pool)(const PieceInPool& rows, const Sums& sums, bool is_first);
    // The later ones of `pieces` to the first, ascending; from one to the next: `apart` floats.
    void (*join)(const Sums& first, int64_t pieces, int64_t apart, int64_t rows);
    // values / weight, with the sink's share of the weight.
    void (*finish)(const Sums& sums, int64_t row, int64_t value_width, const float* sink, float* out);
    void (*scale)(const float* from, float factor, int64_t count, float* to);
};

namespace baseline {
extern const AttentionKernels attention_kernels;
}
namespace avx2 {
extern const AttentionKernels attention_kernels;
}
namespace avx512 {
extern const AttentionKernels attention_kernels;
}

}  // namespace step
}  // namespace kvire
