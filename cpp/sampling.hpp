// Sampling: the table of one instruction set. The row logic, which is scalar, is in sampling.cpp.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace halfbyte {

struct SamplingTable {
    // z = logits / temperature. Returns false when a z is not finite; else *top is the largest.
    bool (*scale)(const float* logits, int64_t count, float temperature, float* z, float* top);
    // e = exp(max(z - top, lowest float)).
    void (*exponentials)(const float* z, int64_t count, float top, float* e);
    // Sums of blocks of 1024 (halfbyte/kernels/reference/sums.py).
    void (*block_sums)(const float* e, int64_t count, double* blocks);
    // out = float(double(max(z - top, lowest float)) - log_total).
    void (*log_probabilities)(const float* z, int64_t count, float top, double log_total, float* out);
    double (*logarithm)(double x);
};

extern const SamplingTable sampling_generic;
#ifdef HALFBYTE_X86
extern const SamplingTable sampling_avx2;
extern const SamplingTable sampling_avx512;
#endif

const SamplingTable& sampling_table(Isa isa);

}  // namespace halfbyte
