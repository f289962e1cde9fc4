// Products with weights of four bits.
//
// Compiled once per instruction set; lanes.h says what must not be used here.
#include "linear_scaled.h"

namespace kvire {
namespace step {
namespace KVIRE_ISA_NAMESPACE {

void tile_4_bits(const LinearTile& tile) {
    switch (tile.form) {
        case Form::q4_0: return scaled<Form::q4_0, false>(tile);
        case Form::q4_1: return scaled<Form::q4_1, true>(tile);
        case Form::iq4_nl: return scaled<Form::iq4_nl, false>(tile);
        case Form::mxfp4: return scaled<Form::mxfp4, false>(tile);
        default: return;
    }
}

}  // namespace KVIRE_ISA_NAMESPACE
}  // namespace step
}  // namespace kvire
