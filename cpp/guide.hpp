// Payloads (what is left of a code in 4, 2 or 1 bits) and rollout-guided rounding: the table of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch.hpp"
#include "panels.hpp"

namespace halfbyte {

// How a row is rounded at given block scales. `bits` is 4, 2 or 1, or 0 for rounding to nearest (ties to even) without a payload;
// the value pointed at is taken from a distance of at most `reach` of the bracket, in (.5, 1].
struct Guide {
    Format format = Format::nvfp4;
    int bits = 4;
    float reach = 1.0f;

    HALFBYTE_INLINE int64_t block() const { return format == Format::nvfp4 ? 16 : 32; }
};

// One row of guidance: packed residues, block scales, global multiplier.
struct GuideRow {
    const uint8_t* payload;
    const uint8_t* scales;
    float global;
};

struct GuideTable {
    // False where the row holds NaN or infinity; `out` is then unfinished.
    bool (*round)(const Guide&, const GuideRow&, const void* x, bool bf16, int64_t k, void* out);
    // Packed codes of k values (a multiple of 16) to their packed residues in 2 or 1 bits.
    void (*narrow)(const uint8_t* codes, int64_t k, int bits, uint8_t* out);
};

extern const GuideTable guide_generic;
#ifdef HALFBYTE_X86
extern const GuideTable guide_avx2;
extern const GuideTable guide_avx512;
#endif

const GuideTable& guide_table(Isa isa);

}  // namespace halfbyte
