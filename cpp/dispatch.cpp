#include "dispatch.hpp"

namespace halfbyte {

Isa best_isa() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
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

Isa usable_isa(int requested) {
    const int best = static_cast<int>(best_isa());
    return static_cast<Isa>(requested < 0 ? 0 : requested > best ? best : requested);
}

}  // namespace halfbyte
