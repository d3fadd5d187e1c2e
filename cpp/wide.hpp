// Sixteen lanes as an array of this instruction set's own registers: one zmm, two ymm, or four vectors of 16 bytes. For inner loops
// whose accumulators have to stay in registers; GCC keeps the 64-byte types of lanes.hpp in memory where they are wider than a
// register.
#pragma once

#include "lanes.hpp"
#include "scalar.hpp"

// An array of accumulators is in registers only if every index is a constant: the loops over it have to be unrolled.
#define HALFBYTE_UNROLL _Pragma("GCC unroll 16")

namespace halfbyte {
namespace HALFBYTE_ISA {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kRegisters = 64 / kRegisterBytes;

typedef float RF __attribute__((vector_size(kRegisterBytes)));
typedef int32_t RI __attribute__((vector_size(kRegisterBytes)));
typedef uint32_t RU __attribute__((vector_size(kRegisterBytes)));

struct WF {
    RF r[kRegisters];
};

template <class Function>
HALFBYTE_INLINE WF each(const Function& f) {
    WF y;
    HALFBYTE_UNROLL
    for (int i = 0; i < kRegisters; ++i) y.r[i] = f(i);
    return y;
}

HALFBYTE_INLINE RF all(float x) { return x - RF{}; }  // as splat()
HALFBYTE_INLINE WF wide(const void* p) {
    return each([p](int i) { return load<RF>(static_cast<const char*>(p) + i * kRegisterBytes); });
}
HALFBYTE_INLINE WF zero() {
    return each([](int) { return RF{}; });
}
HALFBYTE_INLINE WF operator+(const WF& a, const WF& b) {
    return each([&](int i) { return a.r[i] + b.r[i]; });
}
HALFBYTE_INLINE WF operator*(const WF& a, const WF& b) {
    return each([&](int i) { return a.r[i] * b.r[i]; });
}
HALFBYTE_INLINE WF operator*(const WF& a, float b) {
    return each([&](int i) { return a.r[i] * all(b); });
}

// a * b + c where the product is exact, so that one or two roundings are the same.
HALFBYTE_INLINE RF fused(const RF& a, const RF& b, const RF& c) {
#if defined(__AVX512F__)
    return (RF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (RF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
HALFBYTE_INLINE WF fused(float a, const WF& b, const WF& c) {
    const RF x = all(a);
    return each([&](int i) { return fused(x, b.r[i], c.r[i]); });
}

// Values of the first (low half) or second BF16 number of each 32-bit lane.
HALFBYTE_INLINE WF first_bf16(const void* p) {
    return each([p](int i) { return (RF)(load<RU>(static_cast<const char*>(p) + i * kRegisterBytes) << 16); });
}
HALFBYTE_INLINE WF second_bf16(const void* p) {
    return each([p](int i) { return (RF)(load<RU>(static_cast<const char*>(p) + i * kRegisterBytes) & 0xFFFF0000u); });
}

// E2M1 values of the low four bits of each lane; higher bits may hold anything.
HALFBYTE_INLINE RF e2m1(const RU& code) {
#if defined(__AVX512F__)
    const __m512 grid = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
    return (RF)_mm512_permutexvar_ps((__m512i)code, grid);
#elif defined(__AVX2__)
    const __m256 grid = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
    return (RF)((RU)_mm256_permutevar8x32_ps(grid, (__m256i)code) | ((code << 28) & 0x80000000u));
#else
    // Doubled values of indices 0..7 are 0 1 2 3 4 6 8 12; comparisons yield -1.
    const RI index = (RI)(code & 7u);
    const RI doubled = index - (index > 4) - (index > 5) - 3 * (index > 6);
    return (RF)((RU)(__builtin_convertvector(doubled, RF) * 0.5f) | ((code << 28) & 0x80000000u));
#endif
}
HALFBYTE_INLINE WF e2m1(const void* p, uint32_t shift) {
    return each([&](int i) { return e2m1(load<RU>(static_cast<const char*>(p) + i * kRegisterBytes) >> shift); });
}

// Block scales of 16 outputs: E4M3 or E8M0 bytes.
HALFBYTE_INLINE WF e4m3(const uint8_t* p) {
#if defined(__AVX512F__)
    const F16 v = decode_e4m3(p);
    return wide(&v);
#elif defined(__AVX2__)
    return each([p](int i) {
        const RU byte = (RU)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
        const RF normal = (RF)((byte << 20) + (120u << 23));
        const RF small = (RF)_mm256_cvtepi32_ps((__m256i)byte) * 0.001953125f;
        return (RF)_mm256_blendv_ps((__m256)normal, (__m256)small, (__m256)((RI)byte < 8));
    });
#else
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = scalar::decode_e4m3(p[i]);
    return wide(v);
#endif
}
HALFBYTE_INLINE WF e8m0(const uint8_t* p) {
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = scalar::decode_e8m0(p[i]);
    return wide(v);
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
