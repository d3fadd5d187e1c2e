// What quantising and guided rounding with AVX-512 share. Included by files compiled for AVX-512 only, after their HALFBYTE_ISA.
#pragma once

#include "lanes.hpp"

namespace halfbyte {
namespace {

template <bool Bf16>
HALFBYTE_INLINE __m512 load_values(const void* x, int64_t i) {
    if constexpr (Bf16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(x) + i));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    } else {
        return _mm512_loadu_ps(static_cast<const float*>(x) + i);
    }
}

// ceil(u) + floor(u) of four vectors, u clipped to 23 in size, as bytes: dword 4 * lane + j holds dword `lane` of vector j.
HALFBYTE_INLINE __m512i quarter_sums(const __m512* u) {
    __m512i v[4];
    for (int j = 0; j < 4; ++j) {
        const __m512 c = _mm512_range_ps(u[j], _mm512_set1_ps(23.0f), 2);  // smaller magnitude, sign of u
        v[j] = _mm512_add_epi32(_mm512_cvt_roundps_epi32(c, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC),
                                _mm512_cvt_roundps_epi32(c, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    }
    return _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
}

// Entry a of 48: three tables of sixteen entries, each silent (an index with its top bit set) outside its range.
HALFBYTE_INLINE __m512i look_up(__m512i a, __m512i low, __m512i middle, __m512i high) {
    const __m512i top = _mm512_set1_epi8(0x70);
    const __m512i first = _mm512_shuffle_epi8(low, _mm512_adds_epu8(a, top));
    const __m512i second = _mm512_shuffle_epi8(middle, _mm512_adds_epu8(_mm512_sub_epi8(a, _mm512_set1_epi8(16)), top));
    const __m512i third = _mm512_shuffle_epi8(high, _mm512_adds_epu8(_mm512_sub_epi8(a, _mm512_set1_epi8(32)), top));
    return _mm512_or_si512(_mm512_or_si512(first, second), third);
}

// Nearest codes of such sums, ties to even.
HALFBYTE_INLINE __m512i nearest_codes(__m512i sums) {
    const __m512i low = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4));
    const __m512i middle = _mm512_broadcast_i32x4(_mm_setr_epi8(4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6));
    const __m512i high = _mm512_broadcast_i32x4(_mm_setr_epi8(6, 6, 6, 6, 6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7));
    const __m512i code = look_up(_mm512_abs_epi8(sums), low, middle, high);
    const __mmask64 negative = _mm512_movepi8_mask(sums) & _mm512_test_epi8_mask(code, code);
    return _mm512_mask_add_epi8(code, negative, code, _mm512_set1_epi8(8));
}

}  // namespace
}  // namespace halfbyte
