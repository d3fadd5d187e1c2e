// Quantise and dequantise with sixteen-lane vectors: the code of the generic and the AVX2 tables.
#pragma once

#include "lanes.hpp"
#include "quantise.hpp"
#include "scalar.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

template <bool Bf16>
HALFBYTE_INLINE F16 load_values(const void* x, int64_t i) {
    if constexpr (Bf16) {
        typedef uint16_t H16 __attribute__((vector_size(32)));
        const U16 wide = __builtin_convertvector(load<H16>(static_cast<const uint16_t*>(x) + i), U16);
        return bits<F16>(wide << 16);
    } else {
        return load<F16>(static_cast<const float*>(x) + i);
    }
}

HALFBYTE_INLINE uint32_t largest(const U16& v) {
    uint32_t top = 0;
    for (int i = 0; i < 16; ++i) top = v[i] > top ? v[i] : top;
    return top;
}

template <bool Bf16>
uint32_t amax_bits_of(const void* x, int64_t count) {
    I16 top{};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const I16 v = bits<I16>(load_values<Bf16>(x, i)) & 0x7FFFFFFF;
        const I16 more = v > top;
        top = (v & more) | (top & ~more);
    }
    uint32_t best = largest(bits<U16>(top));
    for (; i < count; ++i) {
        const uint32_t v = scalar::float_bits(scalar::value(x, Bf16, i)) & 0x7FFFFFFFu;
        best = v > best ? v : best;
    }
    return best;
}

inline uint32_t amax_bits(const void* x, bool bf16, int64_t count) {
    return bf16 ? amax_bits_of<true>(x, count) : amax_bits_of<false>(x, count);
}

// Codes of z by counting the midpoints below it; a tie goes to the even code.
HALFBYTE_INLINE U16 encode_e2m1(const F16& z) {
    const U16 b = bits<U16>(z);
    const F16 a = bits<F16>(b & 0x7FFFFFFFu);
    const I16 below = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    const I16 nonzero = below != 0;
    return bits<U16>(-below) | (bits<U16>(nonzero) & ((b >> 28) & 8u));
}

template <bool Bf16>
void usual_row(const void* x, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    for (int64_t b = 0; b < k / 16; ++b) {
        const F16 v = load_values<Bf16>(x, b * 16);
        const uint32_t top = largest(bits<U16>(v) & 0x7FFFFFFFu);
        const uint8_t byte = scalar::encode_e4m3((scalar::from_bits(top) / 6.0f) / global);
        const float s = scalar::decode_e4m3(byte) * global;
        scales[b] = byte;
        uint64_t packed = 0;
        if (s > 0.0f) {
            const U16 code = encode_e2m1(v / s);
            for (int i = 0; i < 16; ++i) packed |= static_cast<uint64_t>(code[i]) << (4 * i);
        }
        std::memcpy(codes + b * 8, &packed, 8);
    }
}

inline void usual_row_any(const void* x, bool bf16, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    bf16 ? usual_row<true>(x, k, global, codes, scales) : usual_row<false>(x, k, global, codes, scales);
}

inline void dequantise_row(Format format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out, bool bf16) {
    const int64_t block = format == Format::nvfp4 ? 16 : 32;
    const U16 shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    for (int64_t i = 0; i < k; i += 16) {
        const uint8_t byte = scales[i / block];
        const float s = format == Format::nvfp4 ? scalar::decode_e4m3(byte) : scalar::decode_e8m0(byte);
        uint32_t word[2];
        std::memcpy(word, codes + i / 2, 8);
        U16 code;
        for (int j = 0; j < 16; ++j) code[j] = word[j / 8];
        const F16 value = (decode_e2m1((code >> shifts) & 15u) * s) * global;
        if (bf16) {
            typedef uint16_t H16 __attribute__((vector_size(32)));
            store(static_cast<uint16_t*>(out) + i, __builtin_convertvector(round_bf16_bits(bits<U16>(value)), H16));
        } else {
            store(static_cast<float*>(out) + i, value);
        }
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
