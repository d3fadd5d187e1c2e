// RMSNorm, rotary embedding, SwiGLU and top-k routing: the table of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace halfbyte {

struct NormTable {
    void (*rms_norm)(const float* x, const float* weight, double eps, int64_t rows, int64_t width, float* out);
    // x [rows, heads, width]; positions must lie in the tables [P, width / 2].
    void (*rope)(const float* x, const int64_t* positions, const float* cos, const float* sin, int64_t rows, int64_t heads,
                 int64_t width, float* out);
    // gate_up [rows, 2 width], gate first.
    void (*swiglu)(const float* gate_up, int64_t rows, int64_t width, float* out);
    // The `chosen` largest of each row's logits, ties to the lower one, and their gates; logits must be finite.
    void (*route)(const float* logits, int64_t rows, int64_t experts, int64_t chosen, bool normalise, int32_t* ids, float* gates);
};

extern const NormTable norm_generic;
#ifdef HALFBYTE_X86
extern const NormTable norm_avx2;
extern const NormTable norm_avx512;
#endif

const NormTable& norm_table(Isa isa);

}  // namespace halfbyte
