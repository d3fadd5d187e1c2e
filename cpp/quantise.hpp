// Quantisation rules and the quantise / dequantise table of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch.hpp"
#include "panels.hpp"

namespace halfbyte {

// The fields of halfbyte.formats.QuantSpec that quantisation needs. Only the default arithmetic is native.
struct Rule {
    Format format = Format::nvfp4;
    int mode = 1;  // 0 tensor, 1 token, 2 constant, 3 none
    float constant = 1.0f;

    HALFBYTE_INLINE int64_t block() const { return format == Format::nvfp4 ? 16 : 32; }
};

struct QuantiseTable {
    // Largest |x| of `count` values as the bits of a float32; 0x7F800000 or above where one is NaN or infinite.
    uint32_t (*amax_bits)(const void* x, bool bf16, int64_t count);
    // One row with the usual rule and a given global scale: codes [k/2], scales [k/16].
    void (*row)(const void* x, bool bf16, int64_t k, float global, uint8_t* codes, uint8_t* scales);
    // One row back: (grid * scale) * global, as float32 or BF16 (to nearest even).
    void (*dequantise_row)(Format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out, bool bf16);
};

extern const QuantiseTable quantise_generic;
#ifdef HALFBYTE_X86
extern const QuantiseTable quantise_avx2;
extern const QuantiseTable quantise_avx512;
#endif

const QuantiseTable& quantise_table(Isa isa);

// Where the quantised form of rows goes: codes [rows, k/2], scales [rows, k/block], the global scale of each row (mode token) or of all,
// and with `bits` 2 or 1 the packed residues of the codes (see guide.hpp).
struct CodeRows {
    uint8_t *codes, *scales;
    float* global;
    int bits = 0;
    uint8_t* payload = nullptr;
};

// Smallest power of two >= amax / 2688, as a normal number; 1 for amax = 0.
float usual_global(float amax);

// Quantises rows into `to`. `given` (or null) has one global scale (given_count 1) or one a row, and `to.global` is then left alone.
// Returns the first row holding NaN or infinity, or -1. Splits rows over threads.
int64_t quantise_rows(Isa isa, const Rule& rule, const void* x, bool bf16, int64_t rows, int64_t k, const float* given,
                      int64_t given_count, const CodeRows& to);

}  // namespace halfbyte
