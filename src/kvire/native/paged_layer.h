// Checks that stand between what Python passes and memory.
#pragma once

#include "kernels.h"

namespace kvire {

// Throws std::invalid_argument if sizes are not positive, a block's rows would not fit its stride, or scales are
// missing or not wanted.
void check_layer(const PagedLayer& layer);

// Throws std::out_of_range unless every block that positions begin .. end - 1 need is a block of the pool.
// Other entries of the table are never looked at: before a window they may be stale.
void check_blocks(const PagedLayer& layer, const int32_t* block_table, int64_t begin, int64_t end);

// Throws std::out_of_range unless all slots are in the pool.
void check_slots(const PagedLayer& layer, const int64_t* slots, int64_t count);

}  // namespace kvire
