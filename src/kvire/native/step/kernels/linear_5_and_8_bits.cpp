// Products with weights of five and of eight bits.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "linear_scaled.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

void tile_5_and_8_bits(const LinearTile& tile) {
    switch (tile.form) {
        case Form::q5_0: return scaled<Form::q5_0, false>(tile);
        case Form::q5_1: return scaled<Form::q5_1, true>(tile);
        case Form::q8_0: return scaled<Form::q8_0, false>(tile);
        default: return;
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
