// The OpenMP runtime that some other library, in practice torch, has already brought into the process.
#pragma once

#include <string>

namespace kvire {

struct OpenMPRuntime {
    std::string path;
    // Runs fn(data) on `threads` threads, the calling one included, and waits for them. This is the entry point
    // that compilers call for `#pragma omp parallel`: GCC's libgomp has it, LLVM's libomp as well on Linux.
    void (*parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);
};

// Looked up at the first call and never unloaded; null where there is none or KVIRE_OPENMP=0 is set.
const OpenMPRuntime* openmp_runtime();

}  // namespace kvire
