// Payloads (what is left of a code in 4, 2 or 1 bits) and rollout-guided rounding: the table of one instruction set.
#pragma once

#include <cstdint>
#include <cstring>

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
};

extern const GuideTable guide_generic;
#ifdef HALFBYTE_X86
extern const GuideTable guide_avx2;
extern const GuideTable guide_avx512;
#endif

// Packed residues of 16 packed codes (8 bytes): signed index mod 2 (16 bits) or mod 4 (32 bits), first code lowest.
HALFBYTE_INLINE uint64_t narrow_16(uint64_t codes, int bits) {
    if (bits == 1) {
        uint64_t v = codes & 0x1111111111111111u;
        v = (v | v >> 3) & 0x0303030303030303u;
        v = (v | v >> 6) & 0x000F000F000F000Fu;
        v = (v | v >> 12) & 0x000000FF000000FFu;
        return (v | v >> 24) & 0xFFFFu;
    }
    // A negative odd index has the other high bit: -1 is 3, -3 is 1.
    uint64_t v = codes ^ ((codes >> 3 & codes & 0x1111111111111111u) << 1);
    v &= 0x3333333333333333u;
    v = (v | v >> 2) & 0x0F0F0F0F0F0F0F0Fu;
    v = (v | v >> 4) & 0x00FF00FF00FF00FFu;
    v = (v | v >> 8) & 0x0000FFFF0000FFFFu;
    return (v | v >> 16) & 0xFFFFFFFFu;
}

// Packed codes of k values (a multiple of 16) to their packed residues in 2 or 1 bits.
HALFBYTE_INLINE void narrow(const uint8_t* codes, int64_t k, int bits, uint8_t* out) {
    for (int64_t i = 0; i < k / 16; ++i) {
        uint64_t word;
        std::memcpy(&word, codes + 8 * i, 8);
        const uint64_t packed = narrow_16(word, bits);
        std::memcpy(out + 2 * bits * i, &packed, static_cast<size_t>(2 * bits));
    }
}

}  // namespace halfbyte
