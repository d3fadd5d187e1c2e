// Vocabulary-wide passes of sampling, of one instruction set (definition: halfbyte/kernels/reference/sampling.py).
#pragma once

#include "elementary.hpp"
#include "sampling.hpp"
#include "sums.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

constexpr float kLowest = -0x1.fffffep+127f;

// Calls pass(i, lanes) for each group of 16 elements; the last one is padded with `fill`.
template <class Pass>
HALFBYTE_INLINE void for_lanes(const float* x, int64_t count, float fill, const Pass& pass) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) pass(i, 16, load<F16>(x + i));
    if (i < count) {
        F16 v = splat(fill);
        std::memcpy(&v, x + i, static_cast<size_t>(count - i) * sizeof(float));
        pass(i, count - i, v);
    }
}

HALFBYTE_INLINE void store_some(float* p, const F16& v, int64_t count) {
    std::memcpy(p, &v, static_cast<size_t>(count) * sizeof(float));
}

inline bool scale_row(const float* logits, int64_t count, float temperature, float* z, float* top) {
    F16 best = splat(kLowest);
    I16 bad{};
    for_lanes(logits, count, kLowest, [&](int64_t i, int64_t n, const F16& v) {
        F16 scaled = v / temperature;
        store_some(z + i, scaled, n);
        if (n < 16)
            for (int64_t l = n; l < 16; ++l) scaled[l] = kLowest;
        bad |= (bits<I16>(scaled) & 0x7FFFFFFF) > 0x7F7FFFFF;
        best = select(scaled > best, scaled, best);
    });
    float highest = kLowest;
    for (int l = 0; l < 16; ++l) {
        if (bad[l] != 0) return false;
        if (best[l] > highest) highest = best[l];
    }
    *top = highest;
    return true;
}

HALFBYTE_INLINE F16 below(const F16& z, float top) {
    const F16 d = z - top;
    return select(d < kLowest, splat(kLowest), d);
}

inline void exponentials(const float* z, int64_t count, float top, float* e) {
    for_lanes(z, count, 0.0f, [&](int64_t i, int64_t n, const F16& v) { store_some(e + i, exp(below(v, top)), n); });
}

inline void block_sums(const float* e, int64_t count, double* blocks) {
    for (int64_t first = 0; first < count; first += kSumBlock) {
        LaneSums lanes;
        lanes.add(count - first < kSumBlock ? count - first : kSumBlock,
                  [&](int64_t i) { return static_cast<double>(e[first + i]); });
        *blocks++ = lanes.total();
    }
}

inline void log_probabilities(const float* z, int64_t count, float top, double log_total, float* out) {
    for_lanes(z, count, 0.0f, [&](int64_t i, int64_t n, const F16& v) {
        const F16 d = below(v, top);
        for (int64_t l = 0; l < n; ++l) out[i + l] = static_cast<float>(static_cast<double>(d[l]) - log_total);
    });
}

inline double logarithm(double x) { return log(x); }

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
