// Which of the compiled instruction sets this CPU runs.
#pragma once

#include "kernels.h"

namespace kvire {

// The best kernels for this CPU, chosen once; KVIRE_ISA=baseline in the environment asks for the plain ones.
const KernelTable& kernels();

}  // namespace kvire
