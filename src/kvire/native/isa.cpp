#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace kvire {
namespace {

bool baseline_wanted() {
    const char* wanted = std::getenv("KVIRE_ISA");
    return wanted && std::strcmp(wanted, "baseline") == 0;
}

const KernelTable& choose() {
#ifdef KVIRE_HAS_AVX2
    // Every CPU with AVX2 and FMA has F16C as well, which older compilers cannot ask for.
    __builtin_cpu_init();
    if (!baseline_wanted() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kernels;
#else
    (void)baseline_wanted;
#endif
    return baseline::kernels;
}

}  // namespace

const KernelTable& kernels() {
    static const KernelTable& chosen = choose();
    return chosen;
}

}  // namespace kvire
