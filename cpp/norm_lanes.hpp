// RMSNorm, rotary embedding and SwiGLU of one instruction set (definitions: halfbyte/kernels/reference).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "elementary.hpp"
#include "norm.hpp"
#include "sums.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

inline void rms_norm(const float* x, const float* weight, double eps, int64_t rows, int64_t width, float* out) {
    for (int64_t r = 0; r < rows; ++r, x += width, out += width) {
        const double sum = lane_sum(width, [x](int64_t i) { return static_cast<double>(x[i]) * static_cast<double>(x[i]); });
        const float inv = static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(width) + eps));
        for (int64_t i = 0; i < width; ++i) out[i] = (x[i] * inv) * weight[i];
    }
}

inline void rope(const float* x, const int64_t* positions, const float* cos, const float* sin, int64_t rows, int64_t heads,
                 int64_t width, float* out) {
    const int64_t half = width / 2;
    for (int64_t r = 0; r < rows; ++r) {
        const float* c = cos + positions[r] * half;
        const float* s = sin + positions[r] * half;
        for (int64_t h = 0; h < heads; ++h, x += width, out += width) {
            for (int64_t i = 0; i < half; ++i) {
                const float first = x[i], second = x[half + i];
                out[i] = first * c[i] - second * s[i];
                out[half + i] = second * c[i] + first * s[i];
            }
        }
    }
}

HALFBYTE_INLINE F16 swiglu(const F16& gate, const F16& up) { return (gate / (1.0f + exp(-gate))) * up; }

inline void swiglu_rows(const float* gate_up, int64_t rows, int64_t width, float* out) {
    for (int64_t r = 0; r < rows; ++r, gate_up += 2 * width, out += width) {
        int64_t i = 0;
        for (; i + 16 <= width; i += 16) store(out + i, swiglu(load<F16>(gate_up + i), load<F16>(gate_up + width + i)));
        if (i < width) {
            F16 gate{}, up{};
            const size_t rest = static_cast<size_t>(width - i) * sizeof(float);
            std::memcpy(&gate, gate_up + i, rest);
            std::memcpy(&up, gate_up + width + i, rest);
            const F16 y = swiglu(gate, up);
            std::memcpy(out + i, &y, rest);
        }
    }
}

inline void route(const float* logits, int64_t rows, int64_t experts, int64_t chosen, bool normalise, int32_t* ids, float* gates) {
    std::vector<float> weights(static_cast<size_t>((experts + 15) / 16 * 16));
    std::vector<uint8_t> taken(static_cast<size_t>(experts));
    for (int64_t r = 0; r < rows; ++r, logits += experts, ids += chosen, gates += chosen) {
        std::fill(taken.begin(), taken.end(), uint8_t{0});
        for (int64_t c = 0; c < chosen; ++c) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; ++e)
                if (!taken[size_t(e)] && (best < 0 || logits[e] > logits[best])) best = e;
            taken[size_t(best)] = 1;
            ids[c] = static_cast<int32_t>(best);
        }
        const float top = logits[ids[0]];
        for (int64_t e = 0; e < experts; e += 16) {
            F16 x{};
            std::memcpy(&x, logits + e, static_cast<size_t>(experts - e < 16 ? experts - e : 16) * sizeof(float));
            store(weights.data() + e, exp(x - top));
        }
        float total = normalise ? weights[size_t(ids[0])] : weights[0];
        for (int64_t j = 1; j < (normalise ? chosen : experts); ++j) total += weights[size_t(normalise ? ids[j] : j)];
        for (int64_t c = 0; c < chosen; ++c) gates[c] = weights[size_t(ids[c])] / total;
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
