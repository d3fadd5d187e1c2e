// One number at a time: the small formats and bit casts. Internal linkage, because files of several instruction sets include it.
#pragma once

#include <cstdint>
#include <cstring>

namespace halfbyte {
namespace scalar {

static inline float from_bits(uint32_t b) {
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}

static inline uint32_t float_bits(float f) {
    uint32_t b;
    std::memcpy(&b, &f, 4);
    return b;
}

static inline float value(const void* x, bool bf16, int64_t i) {
    return bf16 ? from_bits(static_cast<uint32_t>(static_cast<const uint16_t*>(x)[i]) << 16) : static_cast<const float*>(x)[i];
}

// E4M3 byte of a >= 0: to nearest even, saturating at 448. Below 2^-6 the spacing is 2^-9, which adding 2^14 rounds to.
static inline uint8_t encode_e4m3(float a) {
    if (!(a < 448.0f)) return 0x7E;
    if (a < 0.015625f) return static_cast<uint8_t>(float_bits(a + 16384.0f) - float_bits(16384.0f));
    const uint32_t b = float_bits(a);
    return static_cast<uint8_t>(((b + 0x7FFFFu + ((b >> 20) & 1u)) >> 20) - (120u << 3));
}

struct E4m3Table {
    float value[256];
    constexpr E4m3Table() : value{} {
        for (int i = 0; i < 256; ++i) {
            const int exponent = i >> 3 & 15, mantissa = i & 7;
            float a = exponent == 0 ? static_cast<float>(mantissa) : static_cast<float>(8 + mantissa);
            for (int e = exponent == 0 ? 1 : exponent; e < 10; ++e) a *= 0.5f;  // (8 + m) / 8 * 2^(e - 7) = (8 + m) * 2^(e - 10)
            for (int e = 10; e < exponent; ++e) a *= 2.0f;
            if ((i & 127) == 127) a = __builtin_nanf("");
            value[i] = i & 128 ? -a : a;
        }
    }
};
static constexpr E4m3Table kE4m3{};

static inline float decode_e4m3(uint8_t byte) { return kE4m3.value[byte]; }

static inline float decode_e8m0(uint8_t byte) {
    return from_bits(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : static_cast<uint32_t>(byte) << 23);
}

static inline bool power_of_two(float g) {
    const uint32_t b = float_bits(g);
    return (b & 0x807FFFFFu) == 0 && b > (27u << 23) && b < (227u << 23);  // 2^-100 < g < 2^100
}

}  // namespace scalar
}  // namespace halfbyte
