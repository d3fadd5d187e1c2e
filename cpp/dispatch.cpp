#include "dispatch.hpp"

#include <algorithm>

namespace halfbyte {
Isa best_isa() {
#ifdef HALFBYTE_X86
    static const Isa best = [] {
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        if (!avx2) return Isa::generic;
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
        return avx512 ? Isa::avx512 : Isa::avx2;
    }();
    return best;
#else
    return Isa::generic;
#endif
}

Isa usable_isa(int requested) { return static_cast<Isa>(std::clamp(requested, 0, static_cast<int>(best_isa()))); }

}  // namespace halfbyte
