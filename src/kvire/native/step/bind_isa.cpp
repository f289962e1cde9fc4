#include "bind.h"
#include "isa.h"

namespace kvire {
namespace step {

void bind_isa(nanobind::module_& m) {
    m.def("step_isa", [] { return isa_name(isa()); },
          "The instruction set of the native step: avx512-vnni, avx2, neon or baseline.");
}

}  // namespace step
}  // namespace kvire
