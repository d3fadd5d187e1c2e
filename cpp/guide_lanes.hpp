// Guided rounding with this instruction set's own registers. Signs are taken off first: with a the size of z and the residue mirrored,
// the bracket is {m, m + 1} for an index m in 0..6, or m alone where a is the grid value m.
#pragma once

#include "guide.hpp"
#include "quantise_lanes.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

// Residues of 16 values, one a lane.
template <int Bits>
HALFBYTE_INLINE void widen_residues(const uint8_t* payload, uint32_t* out) {
    uint64_t word = 0;
    std::memcpy(&word, payload, Bits * 2);
    HALFBYTE_UNROLL
    for (int i = 0; i < 16; ++i) out[i] = static_cast<uint32_t>(word >> (Bits * i)) & ((1u << Bits) - 1u);
}

HALFBYTE_INLINE RI choose(const RI& mask, const RI& yes, const RI& no) { return (yes & mask) | (no & ~mask); }

// The index pointed at, mirrored where `sign` is -1. `low` and `high` are the bracket, equal on a grid point.
template <int Bits>
HALFBYTE_INLINE RI pointed_at(const RI& low, const RI& high, const RI& sign, const RI& residue) {
    if constexpr (Bits == 4) {
        const RI size = residue & 7, turn = sign ^ (0 - (residue >> 3));
        const RI index = (size ^ turn) - turn;
        const RI at_least = choose(index > low, index, low);
        return choose(at_least < high, at_least, high);
    } else if constexpr (Bits == 1) {
        return choose(((residue - low) & 1) != 0, high, low);
    } else {
        const RI step = (((residue ^ sign) - sign) - low) & 3;
        const RI above = (step == 1) | ((step == 2) & (low != 6));
        return choose(low != high, low - above, low - (step == 1) + (step == 3));
    }
}

// Codes of 16 lanes' worth of z.
template <int Bits>
HALFBYTE_INLINE RU guided_codes(const RF& z, const RU& residue, float reach) {
    if constexpr (Bits == 0) {
        return codes_of(z);
    } else {
        const RF a = (RF)((RU)z & 0x7FFFFFFFu);
        const RI sign = (RI)z >> 31;
        const RI low = 0 - ((a >= 0.5f) + (a >= 1.0f) + (a >= 1.5f) + (a >= 2.0f) + (a >= 3.0f) + (a >= 4.0f));
        const RI high = 0 - ((a > 0.0f) + (a > 0.5f) + (a > 1.0f) + (a > 1.5f) + (a > 2.0f) + (a > 3.0f) + (a > 4.0f));
        RI index = pointed_at<Bits>(low, high, sign, (RI)residue);
        if (reach < 1.0f) {
            index = choose(index > low, index, low);
            index = choose(index < high, index, high);
            const RI beyond = a > 6.0f;
            const RF inside = (RF)choose(beyond, (RI)all(6.0f), (RI)a);
            const RF gap = inside - e2m1((RU)index);
            const RF distance = (RF)((RU)gap & 0x7FFFFFFFu), width = e2m1((RU)high) - e2m1((RU)low);
            index = choose(distance <= all(reach) * width, index, low + high - index);
        }
        const RI below = index < 0;
        const RI size = (index ^ below) - below;
        return (RU)(size | ((sign ^ below) & (size != 0) & 8));
    }
}

template <int Bits, bool Bf16>
bool guided_blocks(const Guide& guide, const GuideRow& row, const void* x, int64_t from, int64_t k, void* out) {
    const int64_t block = guide.block();
    RI top{};
    for (int64_t i = from; i < k; i += 16) {
        const uint8_t byte = row.scales[i / block];
        const float s = guide.format == Format::nvfp4 ? scalar::decode_e4m3(byte) : scalar::decode_e8m0(byte);
        const float divisor = guide.format == Format::nvfp4 ? s * row.global : s;
        uint32_t residue[16];
        if constexpr (Bits != 0) widen_residues<Bits>(row.payload + i / 8 * Bits, residue);
        HALFBYTE_UNROLL
        for (int j = 0; j < kRegisters; ++j) {
            const RU v = value_bits<Bf16>(x, i + j * kLanes);
            top = larger((RI)(v & 0x7FFFFFFFu), top);
            RF value{};
            if (divisor > 0.0f) {
                const RU told = Bits != 0 ? load<RU>(residue + j * kLanes) : RU{};
                value = (e2m1(guided_codes<Bits>((RF)v / all(divisor), told, guide.reach)) * all(s)) * all(row.global);
            }
            if constexpr (Bf16) {
                const RU b = (RU)value;
                store(static_cast<uint16_t*>(out) + i + j * kLanes, __builtin_convertvector((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16, RH));
            } else {
                store(static_cast<float*>(out) + i + j * kLanes, value);
            }
        }
    }
    return largest(top) < 0x7F800000u;
}

// Values [from, k) of a row; `from` is a multiple of the block.
template <bool Bf16>
bool guided_rest(const Guide& guide, const GuideRow& row, const void* x, int64_t from, int64_t k, void* out) {
    switch (guide.bits) {
        case 4: return guided_blocks<4, Bf16>(guide, row, x, from, k, out);
        case 2: return guided_blocks<2, Bf16>(guide, row, x, from, k, out);
        case 1: return guided_blocks<1, Bf16>(guide, row, x, from, k, out);
        default: return guided_blocks<0, Bf16>(guide, row, x, from, k, out);
    }
}

inline bool guided_row(const Guide& guide, const GuideRow& row, const void* x, bool bf16, int64_t k, void* out) {
    return bf16 ? guided_rest<true>(guide, row, x, 0, k, out) : guided_rest<false>(guide, row, x, 0, k, out);
}

// Packed residues of 16 packed codes: signed index mod 2 (16 bits) or mod 4 (32 bits), first code lowest.
HALFBYTE_INLINE uint64_t one_bit_each(uint64_t codes) {
    uint64_t v = codes & 0x1111111111111111u;
    v = (v | v >> 3) & 0x0303030303030303u;
    v = (v | v >> 6) & 0x000F000F000F000Fu;
    v = (v | v >> 12) & 0x000000FF000000FFu;
    return v | v >> 24;
}
HALFBYTE_INLINE uint64_t two_bits_each(uint64_t codes) {
    // A negative odd index has the other high bit: -1 is 3, -3 is 1.
    uint64_t v = codes ^ ((codes >> 3 & codes & 0x1111111111111111u) << 1);
    v &= 0x3333333333333333u;
    v = (v | v >> 2) & 0x0F0F0F0F0F0F0F0Fu;
    v = (v | v >> 4) & 0x00FF00FF00FF00FFu;
    v = (v | v >> 8) & 0x0000FFFF0000FFFFu;
    return v | v >> 16;
}

// T holds the residues of 16 codes. Eight words at a time, so that the compiler can use vectors.
template <class T>
void narrow_to(const uint8_t* codes, int64_t words, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= words; i += 8) {
        uint64_t word[8];
        T packed[8];
        std::memcpy(word, codes + 8 * i, 64);
        for (int j = 0; j < 8; ++j) packed[j] = static_cast<T>(sizeof(T) == 2 ? one_bit_each(word[j]) : two_bits_each(word[j]));
        std::memcpy(out + static_cast<int64_t>(sizeof(T)) * i, packed, sizeof packed);
    }
    for (; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, codes + 8 * i, 8);
        const T packed = static_cast<T>(sizeof(T) == 2 ? one_bit_each(word) : two_bits_each(word));
        std::memcpy(out + static_cast<int64_t>(sizeof(T)) * i, &packed, sizeof packed);
    }
}

inline void narrow_row(const uint8_t* codes, int64_t k, int bits, uint8_t* out) {
    bits == 1 ? narrow_to<uint16_t>(codes, k / 16, out) : narrow_to<uint32_t>(codes, k / 16, out);
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
