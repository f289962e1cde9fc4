#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace kvire {
namespace step {
namespace {

Isa choose() {
    const char* wanted = std::getenv("KVIRE_ISA");
#ifdef KVIRE_HAS_AVX512
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (!avx2 || (wanted && !std::strcmp(wanted, "baseline"))) return Isa::baseline;
    if (!avx512 || (wanted && !std::strcmp(wanted, "avx2"))) return Isa::avx2;
    return Isa::avx512;
#else
    (void)wanted;
    return Isa::baseline;
#endif
}

}  // namespace

Isa isa() {
    static const Isa chosen = choose();
    return chosen;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::avx512: return "avx512-vnni";
        case Isa::avx2: return "avx2";
        case Isa::baseline: break;
    }
#if defined(__aarch64__)
    return "neon";
#else
    return "baseline";
#endif
}

}  // namespace step
}  // namespace kvire
