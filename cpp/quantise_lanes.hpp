// Quantise and dequantise with this instruction set's own registers: the code of the generic and the AVX2 tables.
#pragma once

#include "quantise.hpp"
#include "scalar.hpp"
#include "wide.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

constexpr int kLanes = kRegisterBytes / 4;
typedef uint16_t RH __attribute__((vector_size(kRegisterBytes / 2)));

template <bool Bf16>
HALFBYTE_INLINE RU value_bits(const void* x, int64_t i) {
    if constexpr (Bf16) {
        return __builtin_convertvector(load<RH>(static_cast<const uint16_t*>(x) + i), RU) << 16;
    } else {
        return load<RU>(static_cast<const float*>(x) + i);
    }
}

// Larger of two non-negative numbers as signed integers.
HALFBYTE_INLINE RI larger(const RI& a, const RI& b) {
    const RI more = a > b;
    return (a & more) | (b & ~more);
}

HALFBYTE_INLINE uint32_t largest(const RI& v) {
    uint32_t lanes[kLanes], top = 0;
    store(lanes, v);
    for (int i = 0; i < kLanes; ++i) top = lanes[i] > top ? lanes[i] : top;
    return top;
}

template <bool Bf16>
uint32_t amax_bits_of(const void* x, int64_t count) {
    RI top{};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) top = larger((RI)(value_bits<Bf16>(x, i) & 0x7FFFFFFFu), top);
    uint32_t best = largest(top);
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
HALFBYTE_INLINE RU codes_of(const RF& z) {
    const RU b = (RU)z;
    const RF a = (RF)(b & 0x7FFFFFFFu);
    const RI below = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (RU)(-below) | ((RU)(below != 0) & ((b >> 28) & 8u));
}

template <bool Bf16>
void usual_row(const void* x, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    for (int64_t b = 0; b < k / 16; ++b) {
        RU v[kRegisters];
        RI top{};
        HALFBYTE_UNROLL
        for (int i = 0; i < kRegisters; ++i) {
            v[i] = value_bits<Bf16>(x, b * 16 + i * kLanes);
            top = larger((RI)(v[i] & 0x7FFFFFFFu), top);
        }
        const uint8_t byte = scalar::encode_e4m3((scalar::from_bits(largest(top)) / 6.0f) / global);
        const float s = scalar::decode_e4m3(byte) * global;
        scales[b] = byte;
        uint64_t packed = 0;
        if (s > 0.0f) {
            uint32_t code[16];
            HALFBYTE_UNROLL
            for (int i = 0; i < kRegisters; ++i) store(code + i * kLanes, codes_of((RF)v[i] / all(s)));
            HALFBYTE_UNROLL
            for (int i = 0; i < 16; ++i) packed |= static_cast<uint64_t>(code[i]) << (4 * i);
        }
        std::memcpy(codes + b * 8, &packed, 8);
    }
}

inline void usual_row_any(const void* x, bool bf16, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    bf16 ? usual_row<true>(x, k, global, codes, scales) : usual_row<false>(x, k, global, codes, scales);
}

template <bool Bf16>
void dequantise_any(Format format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out) {
    const int64_t block = format == Format::nvfp4 ? 16 : 32;
    for (int64_t i = 0; i < k; i += 16) {
        const uint8_t byte = scales[i / block];
        const float s = format == Format::nvfp4 ? scalar::decode_e4m3(byte) : scalar::decode_e8m0(byte);
        uint32_t code[16];
        HALFBYTE_UNROLL
        for (int j = 0; j < 16; ++j) code[j] = codes[i / 2 + j / 2] >> (j % 2 * 4);
        HALFBYTE_UNROLL
        for (int j = 0; j < kRegisters; ++j) {
            const RF value = (e2m1(load<RU>(code + j * kLanes)) * all(s)) * all(global);
            if constexpr (Bf16) {
                const RU b = (RU)value;
                store(static_cast<uint16_t*>(out) + i + j * kLanes,
                      __builtin_convertvector((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16, RH));
            } else {
                store(static_cast<float*>(out) + i + j * kLanes, value);
            }
        }
    }
}

inline void dequantise_row(Format format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out, bool bf16) {
    bf16 ? dequantise_any<true>(format, codes, scales, global, k, out) : dequantise_any<false>(format, codes, scales, global, k, out);
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
