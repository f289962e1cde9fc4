// Which of the instruction sets that the native step was compiled for this processor runs.
#pragma once

namespace kvire {
namespace step {

enum class Isa { baseline, avx2, avx512 };

// The best one, chosen once; KVIRE_ISA=baseline or avx2 in the environment asks for less.
Isa isa();

// avx512: with VNNI. neon where baseline was compiled for it.
const char* isa_name(Isa isa);

// Of one table of kernels per instruction set, the best that runs here.
#if defined(KVIRE_HAS_AVX512)
#define KVIRE_STEP_TABLE(name) \
    (isa() == Isa::avx512 ? avx512::name : isa() == Isa::avx2 ? avx2::name : baseline::name)
#else
#define KVIRE_STEP_TABLE(name) (baseline::name)
#endif

}  // namespace step
}  // namespace kvire
