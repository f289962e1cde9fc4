// What the native step adds to the Python module, one function per part.
#pragma once

#include <nanobind/nanobind.h>

namespace kvire {
namespace step {

void bind_isa(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_program(nanobind::module_& m);
void bind_attention(nanobind::module_& m);

}  // namespace step
}  // namespace kvire
