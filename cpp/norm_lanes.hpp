// RMSNorm, rotary embedding and SwiGLU of one instruction set (definitions: halfbyte/kernels/reference).
#pragma once

#include <cmath>

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

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
