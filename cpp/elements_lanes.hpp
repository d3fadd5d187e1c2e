// Block maxima and codes with this instruction set's own registers.
#pragma once

#include "elements.hpp"
#include "quantise_lanes.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

template <bool Bf16>
void block_amax_of(const void* x, int64_t block, int64_t blocks, float* out) {
    for (int64_t b = 0; b < blocks; ++b) {
        RI top{};
        for (int64_t i = 0; i < block; i += kLanes) top = larger((RI)(value_bits<Bf16>(x, b * block + i) & 0x7FFFFFFFu), top);
        out[b] = scalar::from_bits(largest(top));
    }
}

inline void block_amax(const void* x, bool bf16, int64_t block, int64_t blocks, float* out) {
    bf16 ? block_amax_of<true>(x, block, blocks, out) : block_amax_of<false>(x, block, blocks, out);
}

// Codes of z by counting midpoints; those of odd place go up on a tie to even.
template <int Ties>
HALFBYTE_INLINE RU codes_by(const RF& z, int zero_sign, bool wrap) {
    const RU b = (RU)z;
    const RF a = (RF)(b & 0x7FFFFFFFu);
    RI below;
    if constexpr (Ties == 0) {
        below = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    } else if constexpr (Ties == 1) {
        below = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.0f);
    } else {
        below = (a >= 0.25f) + (a >= 0.75f) + (a >= 1.25f) + (a >= 1.75f) + (a >= 2.5f) + (a >= 3.5f) + (a >= 5.0f);
    }
    RI sign = (RI)(z < 0.0f);
    if (zero_sign == 0) sign = sign & (RI)(below != 0);
    if (zero_sign == 1) sign = (RI)b >> 31;
    if (zero_sign == 3) sign = (RI)(z <= 0.0f);
    RU code = (RU)(-below) | ((RU)sign & 8u);
    if (wrap) {
        const RU beyond = (RU)(a >= 7.0f);
        code = (code & ~beyond) | (beyond & 8u);
    }
    return code;
}

template <bool Bf16, int Ties>
void codes_of_rule(const CodeRule& rule, const void* x, const float* scale, int64_t block, int64_t blocks, uint8_t* out) {
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t j = 0; j < block; j += 16) {
            const int64_t at = b * block + j;
            const bool dead = scale[b] != scale[b];
            const RF s = all(scale[b]);
            uint32_t code[16];
            HALFBYTE_UNROLL
            for (int i = 0; i < kRegisters; ++i) {
                const RF v = (RF)value_bits<Bf16>(x, at + i * kLanes);
                const RF z = dead ? RF{} : rule.multiply ? v * s : v / s;
                store(code + i * kLanes, codes_by<Ties>(z, rule.zero_sign, rule.wrap));
            }
            uint64_t packed = 0;
            HALFBYTE_UNROLL
            for (int i = 0; i < 16; ++i) packed |= static_cast<uint64_t>(code[i]) << (4 * i);
            std::memcpy(out + at / 2, &packed, 8);
        }
}

template <bool Bf16>
void codes_of_ties(const CodeRule& rule, const void* x, const float* scale, int64_t block, int64_t blocks, uint8_t* out) {
    switch (rule.ties) {
        case 0: return codes_of_rule<Bf16, 0>(rule, x, scale, block, blocks, out);
        case 1: return codes_of_rule<Bf16, 1>(rule, x, scale, block, blocks, out);
        default: return codes_of_rule<Bf16, 2>(rule, x, scale, block, blocks, out);
    }
}

inline void rule_codes(const CodeRule& rule, const void* x, bool bf16, const float* scale, int64_t block, int64_t blocks, uint8_t* out) {
    bf16 ? codes_of_ties<true>(rule, x, scale, block, blocks, out) : codes_of_ties<false>(rule, x, scale, block, blocks, out);
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
