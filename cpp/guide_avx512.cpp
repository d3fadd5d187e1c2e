#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512F__)
#include "e2m1_avx512.hpp"
#include "guide_lanes.hpp"

namespace halfbyte {
namespace {

constexpr int64_t kSegment = 1024;  // values whose scales are decoded before they are rounded

struct Segment {
    alignas(64) float divisor[kSegment / 16];     // s / 4
    alignas(64) float reciprocal[kSegment / 16];  // 4 / s, 0 for s = 0
};

void settle_scales(const uint8_t* scales, int64_t count, float global, Segment& segment) {
    for (int64_t b = 0; b < count; b += 16) {
        const int64_t left = count - b;
        const __mmask16 some = left >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << left) - 1u);
        const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(some, scales + b)), 7);
        const __m512 e4m3 = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
        const __m512 quarter = _mm512_mul_ps(e4m3, _mm512_set1_ps(global * 0.25f));
        const __mmask16 live = _mm512_cmp_ps_mask(quarter, _mm512_setzero_ps(), _CMP_GT_OQ);
        _mm512_store_ps(segment.divisor + b, quarter);
        _mm512_store_ps(segment.reciprocal + b, _mm512_maskz_div_ps(live, _mm512_set1_ps(1.0f), quarter));
    }
}

// The residues of 64 values, one a byte; a mask for one bit.
template <int Bits>
HALFBYTE_INLINE auto residues(const uint8_t* payload) {
    if constexpr (Bits == 4) {
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(payload)));
        return _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
    } else if constexpr (Bits == 2) {
        const __m512i quads = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(payload)));
        const __m512i twice = _mm512_or_si512(quads, _mm512_slli_epi32(quads, 12));
        return _mm512_and_si512(_mm512_or_si512(twice, _mm512_slli_epi32(twice, 6)), _mm512_set1_epi8(3));
    } else {
        __mmask64 mask;
        std::memcpy(&mask, payload, 8);
        return mask;
    }
}

// Codes of 64 values, one a byte, from the sums of ceil and floor of four times z (`sums`), both in order. ceil(u) + floor(u) tells the multiples of one quarter from the open
// intervals between them; all of {4, 6} stands for its end 6 as well, so the sum is at most 46.
template <int Bits>
HALFBYTE_INLINE __m512i guided_codes(__m512i sums, const uint8_t* payload) {
    const __m512i a = _mm512_abs_epi8(sums);
    const __mmask64 negative = _mm512_movepi8_mask(sums);
    // Index of the grid value at or below a / 8, with 16 added where a / 8 is above it.
    const __m512i t = look_up(a, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 16, 16, 16, 1, 17, 17, 17, 2, 18, 18, 18, 3, 19, 19, 19)),
                              _mm512_broadcast_i32x4(_mm_setr_epi8(4, 20, 20, 20, 20, 20, 20, 20, 5, 21, 21, 21, 21, 21, 21, 21)),
                              _mm512_broadcast_i32x4(_mm_setr_epi8(6, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22, 22)));
    const __m512i one = _mm512_set1_epi8(1), low = _mm512_and_si512(t, _mm512_set1_epi8(7));
    const __mmask64 open = _mm512_test_epi8_mask(t, _mm512_set1_epi8(16));
    const auto told = residues<Bits>(payload);
    __m512i size;
    __mmask64 minus = negative;
    if constexpr (Bits == 4) {
        const __m512i signed_index = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, -1, -2, -3, -4, -5, -6, -7));
        __m512i index = _mm512_shuffle_epi8(signed_index, told);
        index = _mm512_mask_sub_epi8(index, negative, _mm512_setzero_si512(), index);
        size = _mm512_min_epi8(_mm512_max_epi8(index, low), _mm512_mask_add_epi8(low, open, low, one));
    } else if constexpr (Bits == 2) {
        const __m512i mirrored = _mm512_mask_sub_epi8(told, negative, _mm512_setzero_si512(), told);
        const __m512i step = _mm512_and_si512(_mm512_sub_epi8(mirrored, low), _mm512_set1_epi8(3));
        const __mmask64 two = open & _mm512_cmpeq_epi8_mask(step, _mm512_set1_epi8(2));
        const __mmask64 above = _mm512_cmpeq_epi8_mask(step, one) | (two & _mm512_cmpneq_epi8_mask(low, _mm512_set1_epi8(6)));
        const __mmask64 below = _mm512_cmpeq_epi8_mask(step, _mm512_set1_epi8(3)) & ~open;
        const __m512i index = _mm512_mask_sub_epi8(_mm512_mask_add_epi8(low, above, low, one), below, low, one);
        minus ^= _mm512_movepi8_mask(index);
        size = _mm512_abs_epi8(index);
    } else {
        size = _mm512_mask_add_epi8(low, open & (told ^ _mm512_test_epi8_mask(low, one)), low, one);
    }
    return _mm512_mask_add_epi8(size, minus & _mm512_test_epi8_mask(size, size), size, _mm512_set1_epi8(8));
}

// Whole groups of 64 values of a row whose global scale is a power of two: the quotient comes from the rounded reciprocal and one
// correction (see quantise_avx512.cpp), which is the rounded quotient unless it overflows or vanishes. False where that, NaN or
// infinity may have happened. Small values have to be watched only where they can vanish (`Watch`).
template <int Bits, bool Bf16, bool Watch>
bool guided_groups(const GuideRow& row, const void* x, int64_t k, void* out) {
    const __m512 grid = _mm512_setr_ps(0.f, 2.f, 4.f, 6.f, 8.f, 12.f, 16.f, 24.f, -0.f, -2.f, -4.f, -6.f, -8.f, -12.f, -16.f, -24.f);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i clear = _mm512_set1_epi32(0x7FFFFFFF), one = _mm512_set1_epi32(1);
    __m512i most = _mm512_setzero_si512(), least = _mm512_set1_epi32(-1);
    Segment segment;
    for (int64_t from = 0; from < k; from += kSegment) {
        const int64_t count = k - from < kSegment ? k - from : kSegment;
        settle_scales(row.scales + from / 16, count / 16, row.global, segment);
        for (int64_t i = 0; i < count; i += 64) {
            __m512 u[4];
            for (int j = 0; j < 4; ++j) {
                const __m512 v = load_values<Bf16>(x, from + i + 16 * j);
                const __m512i size = _mm512_and_si512(_mm512_castps_si512(v), clear);
                most = _mm512_max_epi32(most, size);
                if constexpr (Watch) least = _mm512_min_epu32(least, _mm512_sub_epi32(size, one));  // zero wraps round
                const __m512 d = _mm512_set1_ps(segment.divisor[i / 16 + j]), r = _mm512_set1_ps(segment.reciprocal[i / 16 + j]);
                const __m512 q = _mm512_mul_ps(v, r);
                // d is a quarter of the divisor and r its inverse: q and the corrected quotient are four times z.
                u[j] = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, d, v), r, q);
            }
            const __m512i sums = _mm512_permutexvar_epi32(order, quarter_sums(u));
            __m512i codes;
            if constexpr (Bits == 0) {
                codes = nearest_codes(sums);
            } else {
                codes = guided_codes<Bits>(sums, row.payload + (from + i) / 8 * Bits);
            }
            const __m128i part[4] = {_mm512_castsi512_si128(codes), _mm512_extracti32x4_epi32(codes, 1), _mm512_extracti32x4_epi32(codes, 2),
                                     _mm512_extracti32x4_epi32(codes, 3)};
            for (int j = 0; j < 4; ++j) {
                const __m512 value = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(part[j]), grid);
                __m512 y = _mm512_mul_ps(value, _mm512_set1_ps(segment.divisor[i / 16 + j]));
                if constexpr (Bits == 2) y = _mm512_add_ps(y, _mm512_setzero_ps());  // a step off zero at a zero scale is +0
                if constexpr (Bf16) {
                    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(y), 16));
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(out) + from + i + 16 * j), half);
                } else {
                    _mm512_storeu_ps(static_cast<float*>(out) + from + i + 16 * j, y);
                }
            }
        }
    }
    if (!(scalar::from_bits(static_cast<uint32_t>(_mm512_reduce_max_epi32(most))) < row.global * 0x1p110f)) return false;
    const uint32_t small = _mm512_reduce_min_epu32(least);
    return small == 0xFFFFFFFFu || scalar::from_bits(small + 1) >= row.global * 0x1p-110f;
}

template <bool Bf16>
bool fast_row(const Guide& guide, const GuideRow& row, const void* x, int64_t k, void* out) {
    // The smallest number is 2^-149 (2^-133 in BF16) and s at most 448 times the global scale: no x / s vanishes below this.
    const bool watch = row.global > (Bf16 ? 0x1p8f : 0x1p-8f);
    switch (guide.bits) {
        case 4: return watch ? guided_groups<4, Bf16, true>(row, x, k, out) : guided_groups<4, Bf16, false>(row, x, k, out);
        case 2: return watch ? guided_groups<2, Bf16, true>(row, x, k, out) : guided_groups<2, Bf16, false>(row, x, k, out);
        case 1: return watch ? guided_groups<1, Bf16, true>(row, x, k, out) : guided_groups<1, Bf16, false>(row, x, k, out);
        default: return guided_groups<0, Bf16, false>(row, x, k, out);
    }
}

template <bool Bf16>
bool round_row(const Guide& guide, const GuideRow& row, const void* x, int64_t k, void* out) {
    int64_t whole = 0;
    if (guide.format == Format::nvfp4 && (guide.reach == 1.0f || guide.bits == 0) && scalar::power_of_two(row.global)) {
        whole = k / 64 * 64;
        if (whole > 0 && !fast_row<Bf16>(guide, row, x, whole, out)) whole = 0;
    }
    return whole == k || isa_avx512::guided_rest<Bf16>(guide, row, x, whole, k, out);
}

bool round_any(const Guide& guide, const GuideRow& row, const void* x, bool bf16, int64_t k, void* out) {
    return bf16 ? round_row<true>(guide, row, x, k, out) : round_row<false>(guide, row, x, k, out);
}

}  // namespace

const GuideTable guide_avx512{round_any, isa_avx512::narrow_row};

}  // namespace halfbyte
#endif
