#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "e2m1_avx512.hpp"
#include "quantise.hpp"
#include "scalar.hpp"

namespace halfbyte {
namespace {

using scalar::decode_e4m3;
using scalar::decode_e8m0;

HALFBYTE_INLINE __m512 absolute(__m512 v) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7FFFFFFF))); }

uint32_t amax_bits(const void* x, bool bf16, int64_t count) {
    const __m512i clear = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i a = _mm512_setzero_si512(), b = a;
    int64_t i = 0;
    if (bf16) {
        const uint16_t* p = static_cast<const uint16_t*>(x);
        const __m512i clear16 = _mm512_set1_epi16(0x7FFF);
        for (; i + 32 <= count; i += 32) a = _mm512_max_epu16(a, _mm512_and_si512(_mm512_loadu_si512(p + i), clear16));
        if (i < count) {
            const __mmask32 rest = (1u << (count - i)) - 1u;
            b = _mm512_and_si512(_mm512_maskz_loadu_epi16(rest, p + i), clear16);
        }
        a = _mm512_max_epu16(a, b);
        const __m512i wide = _mm512_max_epi32(_mm512_slli_epi32(a, 16), _mm512_slli_epi32(_mm512_srli_epi32(a, 16), 16));
        return static_cast<uint32_t>(_mm512_reduce_max_epi32(wide));
    }
    const float* p = static_cast<const float*>(x);
    for (; i + 32 <= count; i += 32) {
        a = _mm512_max_epi32(a, _mm512_and_si512(_mm512_loadu_si512(p + i), clear));
        b = _mm512_max_epi32(b, _mm512_and_si512(_mm512_loadu_si512(p + i + 16), clear));
    }
    for (; i < count; i += 16) {
        const int64_t left = count - i;
        const __mmask16 some = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1u);
        a = _mm512_max_epi32(a, _mm512_and_si512(_mm512_maskz_loadu_epi32(some, p + i), clear));
    }
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
}

// Lane j of the result is the largest value of v[j].
HALFBYTE_INLINE __m512 largest_of_each(const __m512* v) {
    __m512 quad[4];
    for (int q = 0; q < 4; ++q) {
        const __m512 a = v[4 * q], b = v[4 * q + 1], c = v[4 * q + 2], d = v[4 * q + 3];
        const __m512d ab = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
        const __m512d cd = _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
        quad[q] = _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    }
    const __m512 low = _mm512_max_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88), _mm512_shuffle_f32x4(quad[0], quad[1], 0xDD));
    const __m512 high = _mm512_max_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88), _mm512_shuffle_f32x4(quad[2], quad[3], 0xDD));
    return _mm512_max_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
}

// As scalar::encode_e4m3, in 32-bit lanes.
HALFBYTE_INLINE __m512i encode_e4m3(__m512 a) {
    a = _mm512_min_ps(a, _mm512_set1_ps(448.0f));
    const __m512 shift = _mm512_set1_ps(16384.0f);
    const __m512i small = _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(a, shift)), _mm512_castps_si512(shift));
    const __m512i b = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF))), 20);
    const __m512i normal = _mm512_sub_epi32(rounded, _mm512_set1_epi32(120 << 3));
    return _mm512_mask_mov_epi32(normal, _mm512_cmp_ps_mask(a, _mm512_set1_ps(0.015625f), _CMP_LT_OQ), small);
}

// Codes of four blocks of four times z (u = 4z), each in one vector: 32 packed bytes. ceil(u) + floor(u) tells the open
// intervals between multiples of one quarter from the multiples themselves, which is what breaking ties needs.
HALFBYTE_INLINE __m256i encode_blocks(const __m512* u) {
    const __m512i code = nearest_codes(quarter_sums(u));
    const __m256i merged = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(code, _mm512_set1_epi16(0x1001)));
    const __m256i order = _mm256_setr_epi16(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm256_permutexvar_epi16(order, merged);
}

constexpr int64_t kSegment = 64;  // blocks whose scales are settled before their codes: the divisions of several overlap

struct Segment {
    alignas(64) float divisor[kSegment];     // s, or s / 4 beside a reciprocal
    alignas(64) float reciprocal[kSegment];  // 4 / s, 0 for s = 0
};

// The scales of up to 16 blocks. With a power-of-two global scale the divisor s has four significant bits: the quotient comes from
// the rounded reciprocal and one correction by the exact remainder (Markstein 1990), which is the rounded quotient. Any other s
// is divided by.
template <bool Bf16, bool Reciprocal, bool Whole>
HALFBYTE_INLINE void settle_scales(const void* x, int64_t first, int64_t count, float global, uint8_t* scales, float* divisor,
                                   float* reciprocal) {
    __m512 amax;
    if constexpr (Whole) {
        __m512 v[16];
        for (int j = 0; j < 16; ++j) v[j] = absolute(load_values<Bf16>(x, (first + j) * 16));
        amax = largest_of_each(v);
    } else {
        alignas(64) float top[16] = {};
        for (int64_t j = 0; j < count; ++j) top[j] = _mm512_reduce_max_ps(absolute(load_values<Bf16>(x, (first + j) * 16)));
        amax = _mm512_load_ps(top);
    }
    const __m512 sixth = _mm512_div_ps(amax, _mm512_set1_ps(6.0f)), g = _mm512_set1_ps(global);
    // A power of two divides as its reciprocal multiplies, but for results below 2^-126, which round to a zero scale either way.
    const __m512i byte = encode_e4m3(Reciprocal ? _mm512_mul_ps(sixth, _mm512_set1_ps(1.0f / global)) : _mm512_div_ps(sixth, g));
    if constexpr (Whole) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(scales + first), _mm512_cvtepi32_epi8(byte));
    } else {
        _mm_mask_storeu_epi8(scales + first, static_cast<__mmask16>((1u << count) - 1u), _mm512_cvtepi32_epi8(byte));
    }
    // Half precision has one exponent bit more and three mantissa bits in the same place: E4M3 is half * 2^8.
    const __m512 e4m3 = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(_mm512_cvtepi32_epi16(byte), 7)), _mm512_set1_ps(256.0f));
    const __m512 s = _mm512_mul_ps(e4m3, g);
    if constexpr (Reciprocal) {
        const __mmask16 live = _mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_GT_OQ);
        _mm512_store_ps(divisor, _mm512_mul_ps(s, _mm512_set1_ps(0.25f)));
        _mm512_store_ps(reciprocal, _mm512_maskz_div_ps(live, _mm512_set1_ps(4.0f), s));
    } else {
        _mm512_store_ps(divisor, s);
    }
}

// Four times the quotients of block `b`, whose scale is entry `at` of the segment.
template <bool Bf16, bool Reciprocal>
HALFBYTE_INLINE __m512 scaled_block(const void* x, int64_t b, const Segment& segment, int64_t at) {
    const __m512 v = load_values<Bf16>(x, b * 16), d = _mm512_set1_ps(segment.divisor[at]);
    if constexpr (Reciprocal) {
        const __m512 r = _mm512_set1_ps(segment.reciprocal[at]), q = _mm512_mul_ps(v, r);
        return _mm512_fmadd_ps(_mm512_fnmadd_ps(q, d, v), r, q);
    } else {
        const __mmask16 nonzero = _mm512_cmp_ps_mask(d, _mm512_setzero_ps(), _CMP_GT_OQ);
        return _mm512_mul_ps(_mm512_maskz_div_ps(nonzero, v, d), _mm512_set1_ps(4.0f));
    }
}

template <bool Bf16, bool Reciprocal>
void usual_row(const void* x, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    Segment segment;
    const int64_t blocks = k / 16;
    for (int64_t from = 0; from < blocks; from += kSegment) {
        const int64_t count = blocks - from < kSegment ? blocks - from : kSegment;
        int64_t b = 0;
        for (; b + 16 <= count; b += 16)
            settle_scales<Bf16, Reciprocal, true>(x, from + b, 16, global, scales, segment.divisor + b, segment.reciprocal + b);
        if (b < count)
            settle_scales<Bf16, Reciprocal, false>(x, from + b, count - b, global, scales, segment.divisor + b, segment.reciprocal + b);
        for (b = 0; b + 4 <= count; b += 4) {
            __m512 u[4];
            for (int i = 0; i < 4; ++i) u[i] = scaled_block<Bf16, Reciprocal>(x, from + b + i, segment, b + i);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + (from + b) * 8), encode_blocks(u));
        }
        if (b < count) {
            __m512 u[4] = {};
            for (int64_t i = 0; i < count - b; ++i) u[i] = scaled_block<Bf16, Reciprocal>(x, from + b + i, segment, b + i);
            _mm256_mask_storeu_epi8(codes + (from + b) * 8, (1u << (count - b) * 8) - 1u, encode_blocks(u));
        }
    }
}

void usual_row_any(const void* x, bool bf16, int64_t k, float global, uint8_t* codes, uint8_t* scales) {
    const bool exact = scalar::power_of_two(global);
    if (bf16) {
        exact ? usual_row<true, true>(x, k, global, codes, scales) : usual_row<true, false>(x, k, global, codes, scales);
    } else {
        exact ? usual_row<false, true>(x, k, global, codes, scales) : usual_row<false, false>(x, k, global, codes, scales);
    }
}

HALFBYTE_INLINE __m512 decode_codes(const uint8_t* codes) {
    const __m512 grid = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m512i words = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_permutexvar_epi32(halves, words), shifts), grid);
}

template <bool Bf16>
void dequantise_any(Format format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out) {
    const int64_t block = format == Format::nvfp4 ? 16 : 32;
    const bool exact = format == Format::nvfp4 && scalar::power_of_two(global);
    for (int64_t i = 0; i < k; i += 16) {
        const uint8_t byte = scales[i / block];
        const float s = format == Format::nvfp4 ? decode_e4m3(byte) : decode_e8m0(byte);
        const __m512 grid = decode_codes(codes + i / 2);
        const __m512 v = exact ? _mm512_mul_ps(grid, _mm512_set1_ps(s * global))
                               : _mm512_mul_ps(_mm512_mul_ps(grid, _mm512_set1_ps(s)), _mm512_set1_ps(global));
        if constexpr (Bf16) {
            __m512i b = _mm512_castps_si512(v);
            if (!exact) {
                const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
                b = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            }
            const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(b, 16));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + i), half);
        } else {
            _mm512_storeu_ps(static_cast<float*>(out) + i, v);
        }
    }
}

void dequantise_row(Format format, const uint8_t* codes, const uint8_t* scales, float global, int64_t k, void* out, bool bf16) {
    bf16 ? dequantise_any<true>(format, codes, scales, global, k, out) : dequantise_any<false>(format, codes, scales, global, k, out);
}

}  // namespace

const QuantiseTable quantise_avx512{amax_bits, usual_row_any, dequantise_row};

}  // namespace halfbyte
#endif
