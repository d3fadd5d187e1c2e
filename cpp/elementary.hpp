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

// To 22 significant bits (ties to even), magnitudes below 2^-100 to 0: products with E2M1 values are then exact.
HALFBYTE_INLINE F16 round22(const F16& x) {
    const U16 b = bits<U16>(x);
    const F16 rounded = bits<F16>((b + 1u + ((b >> 2) & 1u)) & ~3u);
    const F16 magnitude = bits<F16>(bits<U16>(rounded) & 0x7FFFFFFFu);
    return select(magnitude < 0x1p-100f, F16{}, rounded);
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
