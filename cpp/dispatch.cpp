#include "dispatch.hpp"

#include <algorithm>

#ifdef HALFBYTE_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace halfbyte {
namespace {

#ifdef HALFBYTE_X86
// AMX needs the processor, the operating system's state saving, and on Linux a permission that the process asks for.
bool amx_usable() {
#ifdef __linux__
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tile = (d >> 24) & 1u, int8 = (d >> 25) & 1u;
    if (!tile || !int8) return false;
    unsigned low = 0, high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3u) != 3u) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace

Isa best_isa() {
#ifdef HALFBYTE_X86
    static const Isa best = [] {
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
        if (!avx2) return Isa::generic;
        const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni");
        if (!avx512) return Isa::avx2;
        return amx_usable() ? Isa::amx : Isa::avx512;
    }();
    return best;
#else
    return Isa::generic;
#endif
}

Isa usable_isa(int requested) { return std::min(usable_matrix_isa(requested), Isa::avx512); }

Isa usable_matrix_isa(int requested) {
    return static_cast<Isa>(std::clamp(requested, 0, static_cast<int>(best_isa())));
}

}  // namespace halfbyte
