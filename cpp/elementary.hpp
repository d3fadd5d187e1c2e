// exp and log from basic IEEE operations: the twin of halfbyte/kernels/reference/elementary.py, step by step.
// Files that include this are compiled with -ffp-contract=off.
#pragma once

#include "lanes.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

HALFBYTE_INLINE F16 select(const I16& mask, const F16& a, const F16& b) { return mask ? a : b; }

// e^x: at most 1 ulp; 0 below 2^-126, +inf above the largest float, NaN stays NaN.
HALFBYTE_INLINE F16 exp(const F16& x) {
    F16 t = select(x < -100.0f, splat(-100.0f), x);
    t = select(t > 100.0f, splat(100.0f), t);
    const float rounder = 12582912.0f;  // 1.5 * 2^23
    const F16 n = (t * 0x1.715476p+0f + rounder) - rounder;
    const F16 r = (t - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    F16 p = splat(0x1.6a23cep-10f);
    p = p * r + 0x1.123a20p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    const F16 y = 1.0f + (r + (r * r) * p);
    const U16 exponent = bits<U16>(__builtin_convertvector(n, I16)) << 23;
    const I16 scaled = bits<I16>(bits<U16>(y) + exponent);
    F16 result = select(scaled < 0x00800000, F16{}, bits<F16>(scaled));
    result = select(x > 0x1.62e42ep+6f, splat(__builtin_inff()), result);
    return select(x != x, x, result);
}

// e^x for x <= 0: the bits of exp() down to -87, 0 below (NaN gives 0).
HALFBYTE_INLINE F16 exp_negative(const F16& x) {
    const float rounder = 12582912.0f;
    const F16 n = (x * 0x1.715476p+0f + rounder) - rounder;
    const F16 r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    F16 p = splat(0x1.6a23cep-10f);
    p = p * r + 0x1.123a20p-7f;
    p = p * r + 0x1.5558f2p-5f;
    p = p * r + 0x1.555492p-3f;
    p = p * r + 0x1.fffffcp-2f;
    const F16 y = 1.0f + (r + (r * r) * p);
#if defined(__AVX512F__)
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(bits<__m512>(n)), 23);
    const __mmask16 known = _mm512_cmp_ps_mask(bits<__m512>(x), _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    return bits<F16>(_mm512_maskz_add_epi32(known, bits<__m512i>(y), exponent));
#else
    const I16 known = x >= -87.0f;
    const U16 exponent = bits<U16>(__builtin_convertvector(select(known, n, F16{}), I16)) << 23;
    return bits<F16>(bits<I16>(bits<U16>(y) + exponent) & known);
#endif
}

// The natural logarithm of a positive, finite, normal number.
HALFBYTE_INLINE double log(double x) {
    const int64_t b = bits<int64_t>(x);
    const int64_t e = (b - 0x3FE6A09E667F3BCDll) >> 52;
    const double f = bits<double>(static_cast<uint64_t>(b) - (static_cast<uint64_t>(e) << 52)) - 1.0;
    const double s = f / (f + 2.0);
    const double z = s * s;
    double p = 2.0 / 23.0;
    for (int k = 21; k > 1; k -= 2) p = p * z + 2.0 / k;
    const double n = static_cast<double>(e);
    return n * 0x1.62e42fefap-1 + ((s + s) + ((s * z) * p + n * 0x1.cf79abc9e3b39p-40));
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
