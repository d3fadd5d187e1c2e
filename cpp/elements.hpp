// The two passes over elements that any quantisation rule needs: block maxima, and codes at given block scales. The few numbers a
// block in between are arithmetic of the rule, done where the rule is written down (halfbyte/formats).
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace halfbyte {

// How a scaled value becomes a code; the fields of halfbyte.formats.QuantSpec.
struct CodeRule {
    bool multiply;  // by the block's number, else divide by it
    int ties;       // 0 even, 1 toward zero, 2 away
    int zero_sign;  // 0 positive, 1 keep, 2 negative, 3 nonpositive
    bool wrap;      // code 8 from 7 upwards
};

struct ElementsTable {
    // Largest |x| of each block of 16 or 32 as float32; NaN and infinity are larger than every number.
    void (*block_amax)(const void* x, bool bf16, int64_t block, int64_t blocks, float* out);
    // Packed codes; `scale` has one number a block, NaN where all of the block is zero.
    void (*codes)(const CodeRule&, const void* x, bool bf16, const float* scale, int64_t block, int64_t blocks, uint8_t* out);
};

extern const ElementsTable elements_generic;
#ifdef HALFBYTE_X86
extern const ElementsTable elements_avx2;
extern const ElementsTable elements_avx512;
#endif

}  // namespace halfbyte
