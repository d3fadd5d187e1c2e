// Sixteen lanes, as GCC/Clang vector types: one zmm, two ymm or four xmm registers. Included by one translation unit an
// instruction set, each of which defines HALFBYTE_ISA to the name of its namespace first.
#pragma once

#ifndef HALFBYTE_ISA
#error "define HALFBYTE_ISA before including lanes.hpp"
#endif

#include <cstdint>
#include <cstring>

#include "panels.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace halfbyte {
namespace HALFBYTE_ISA {

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef double D8 __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));

template <class V>
HALFBYTE_INLINE V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
HALFBYTE_INLINE void store(void* p, const V& v) {
    std::memcpy(p, &v, sizeof v);
}

template <class To, class From>
HALFBYTE_INLINE To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// x - 0 is x for every x, also -0, so no subtraction is left (0 + x would remain an addition).
HALFBYTE_INLINE F16 splat(float x) { return x - F16{}; }

// a * b + c where the product is exact, so that one or two roundings are the same.
HALFBYTE_INLINE F16 multiply_add(const F16& a, const F16& b, const F16& c) {
#if defined(__AVX512F__)
    return bits<F16>(_mm512_fmadd_ps(bits<__m512>(a), bits<__m512>(b), bits<__m512>(c)));
#else
    return a * b + c;
#endif
}

// E2M1 values of the low four bits of each lane; higher bits may hold anything.
HALFBYTE_INLINE F16 decode_e2m1(const U16& code) {
#if defined(__AVX512F__)
    const __m512 grid = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
    return bits<F16>(_mm512_permutexvar_ps(bits<__m512i>(code), grid));
#elif defined(__AVX2__)
    struct Halves {
        __m256i lo, hi;
    };
    struct Floats {
        __m256 lo, hi;
    };
    const __m256 grid = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
    const Halves c = bits<Halves>(code);
    const U16 sign = (code << 28) & 0x80000000u;
    const Floats f{_mm256_permutevar8x32_ps(grid, c.lo), _mm256_permutevar8x32_ps(grid, c.hi)};
    return bits<F16>(bits<U16>(f) | sign);
#else
    // Doubled values of indices 0..7 are 0 1 2 3 4 6 8 12; comparisons yield -1.
    const I16 index = bits<I16>(code & 7u);
    const I16 doubled = index - (index > 4) - (index > 5) - 3 * (index > 6);
    const F16 v = bits<F16>(bits<U16>(__builtin_convertvector(doubled, F16) * 0.5f) | ((code << 28) & 0x80000000u));
    return v;
#endif
}

// The bytes of 16 outputs widened to lanes.
HALFBYTE_INLINE U16 widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return bits<U16>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    typedef uint8_t B16 __attribute__((vector_size(16)));
    return __builtin_convertvector(load<B16>(p), U16);
#endif
}

// E4M3 bytes without a sign as float32, by arithmetic (0x7F is not expected).
HALFBYTE_INLINE F16 decode_e4m3(const uint8_t* p) {
#if defined(__AVX512F__)
    // Half precision has one exponent bit more and three of the mantissa bits in the same place: E4M3 is half * 2^8.
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
    return bits<F16>(_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f)));
#else
    const U16 byte = widen_bytes(p);
    const F16 normal = bits<F16>((byte << 20) + (120u << 23));
    const F16 small = __builtin_convertvector(bits<I16>(byte), F16) * 0.001953125f;
    const I16 is_small = byte < 8u;
    return bits<F16>((bits<I16>(small) & is_small) | (bits<I16>(normal) & ~is_small));
#endif
}

// E8M0 bytes as float32 powers of two: byte 0 is the subnormal 2^-127, byte 255 NaN.
HALFBYTE_INLINE F16 decode_e8m0(const uint8_t* p) {
    const U16 byte = widen_bytes(p);
    const U16 value = byte << 23;
    const I16 zero = byte == 0u, last = byte == 255u;
    return bits<F16>(bits<I16>(value) | (zero & 0x00400000) | (last & 0x00400000));
}

HALFBYTE_INLINE U16 round_bf16_bits(const U16& b) { return (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16; }

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
