// Scores and values of FP4 pages: dot products of integers, exact, so that their order is free (see the reference for the
// definition). Queries are integers below 2^23, value weights below 2^24, grid values doubled.
//
// With VNNI an integer is three bytes, each multiplied with four keys or dimensions at once; elsewhere it is two floats (the low
// byte and the rest), whose products and sums are exact too.
#pragma once

#include "attention_strip.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

// E4M3 bytes of 16 keys, times 2^-8, as float32.
HALFBYTE_INLINE F16 small_scales(const uint8_t* p) {
#if defined(__AVX512F__)
    // Half precision has one exponent bit more and the mantissa bits in the same place.
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
    return bits<F16>(_mm512_cvtph_ps(half));
#else
    return decode_e4m3(p) * 0x1p-8f;
#endif
}

// Round half to even; x in 0 .. 2^24.
HALFBYTE_INLINE I16 to_integer(const F16& x) {
#if defined(__AVX512F__)
    return bits<I16>(_mm512_cvtps_epi32(bits<__m512>(x)));
#else
    const F16 known = select(x == x, x, F16{});  // NaN (the row's sum is NaN as well): converting it is undefined
    return __builtin_convertvector(select(known < 0x1p23f, (known + 0x1p23f) - 0x1p23f, known), I16);
#endif
}

HALFBYTE_INLINE float power_of_two(int32_t e) { return bits<float>(uint32_t(e + 127) << 23); }

#if defined(__AVX512F__)
constexpr int64_t kQueryWords = 16, kWeightWords = 16;  // of 16 dimensions, of 16 keys; words 4 i + byte, byte 0 .. 2

// Per word, sum + the products of four unsigned bytes with four signed ones. Written out because GCC copies the sums of a loop
// between registers otherwise.
HALFBYTE_INLINE __m512i add_products(__m512i sum, const __m512i& unsigned_bytes, const __m512i& signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
    return sum;
}

HALFBYTE_INLINE __m512i word_at(const void* words, int64_t i) {
    return _mm512_set1_epi32(static_cast<const int32_t*>(words)[i]);
}

// The table of E2M1 values, doubled, plus `bias`.
HALFBYTE_INLINE __m512i grid_bytes(int8_t bias) {
    const __m128i grid = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return _mm512_broadcast_i32x4(_mm_add_epi8(grid, _mm_set1_epi8(bias)));
}

HALFBYTE_INLINE void decode_words(const void* words, const __m512i& table, __m512i& low, __m512i& high) {
    const __m512i word = _mm512_loadu_si512(words), nibbles = _mm512_set1_epi8(15);
    low = _mm512_shuffle_epi8(table, _mm512_and_si512(word, nibbles));
    high = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(word, 4), nibbles));
}

// Word 4 i + byte holds digit `byte` (-128 .. 127) of the numbers that decode_words puts beside each other: 2 j + i, or from
// i = 2 on 8 + 2 j + i - 2; word 3 holds -12 times the sum.
HALFBYTE_INLINE void store_query(float* out, const I16& n) {
    const __m512i pairs = _mm512_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512i digits = _mm512_permutexvar_epi32(pairs, bits<__m512i>((n + 0x808080) ^ 0x808080));
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_shuffle_epi8(digits, _mm512_broadcast_i32x4(order)));
    const int32_t bias = -12 * _mm512_reduce_add_epi32(bits<__m512i>(n));
    std::memcpy(out + 3, &bias, sizeof bias);
}

// Scores of R rows and T tiles; the words of a block for consecutive rows lie together, those of the next block `step` floats on. A
// word of a query, once loaded, serves all tiles; with several tiles rows go two by two, so that everything stays in registers.
template <int R, int T>
HALFBYTE_INLINE void fp4_scores(const float* q, int64_t step, int64_t blocks, const void* const* k, const uint8_t* const* scales,
                                const void* const* next, const float* factor, float* scores) {
    const __m512i table = grid_bytes(12);  // the first factor is unsigned; the bias word takes it out again
    constexpr int kPair = T == 1 ? R : R == 1 ? 1 : 2;
    F16 sum[R][T] = {};
    for (int64_t b = 0; b < blocks; ++b) {
        __m512i key[T][4];
        F16 scale[T];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
            decode_words(static_cast<const char*>(k[t]) + 128 * b, table, key[t][0], key[t][1]);
            decode_words(static_cast<const char*>(k[t]) + 128 * b + 64, table, key[t][2], key[t][3]);
            fetch(next[t], 128 * b);
            fetch(next[t], 128 * b + 64);
            scale[t] = small_scales(scales[t] + b * kTile);
        }
        const float* n = q + b * step;
#pragma GCC unroll 4
        for (int first = 0; first < R; first += kPair) {
            const int rows = R - first < kPair ? R - first : kPair;
            __m512i high[kPair][T], low[kPair][T];
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r)
                for (int t = 0; t < T; ++t) high[r][t] = _mm512_setzero_si512(), low[r][t] = word_at(n + (first + r) * kQueryWords, 3);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const __m512i top = word_at(n + (first + r) * kQueryWords, 4 * i + 2);
                    const __m512i bottom = word_at(n + (first + r) * kQueryWords, 4 * i);
                    for (int t = 0; t < T; ++t) high[r][t] = add_products(high[r][t], key[t][i], top);
                    for (int t = 0; t < T; ++t) low[r][t] = add_products(low[r][t], key[t][i], bottom);
                }
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r)
                for (int t = 0; t < T; ++t) high[r][t] = _mm512_slli_epi32(high[r][t], 8);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
                for (int r = 0; r < rows; ++r) {
                    const __m512i middle = word_at(n + (first + r) * kQueryWords, 4 * i + 1);
                    for (int t = 0; t < T; ++t) high[r][t] = add_products(high[r][t], key[t][i], middle);
                }
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r)
                for (int t = 0; t < T; ++t) {
                    const __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[r][t], 8), low[r][t]);
                    sum[first + r][t] = sum[first + r][t] + bits<F16>(_mm512_cvtepi32_ps(dot)) * scale[t];
                }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, sum[r][t] * factor[r]);
}

// The weights of 16 keys as bytes: word 4 i + byte holds keys 4 i .. 4 i + 3.
HALFBYTE_INLINE void store_weights(float* out, const F16& w) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_shuffle_epi8(bits<__m512i>(to_integer(w)), _mm512_broadcast_i32x4(order)));
}

// Per block, the sum over the keys of a strip of weight * doubled grid value, for R rows: (sum of w >> 8) * 256 + sum of w & 255,
// each rounded to float32.
template <int R>
HALFBYTE_INLINE void fp4_values(const Strip& strip, int64_t blocks, int64_t b, const float* weights, F16* dot) {
    const __m512i table = grid_bytes(0);
    __m512i sum[R][3];
    for (auto& row : sum)
        for (__m512i& s : row) s = _mm512_setzero_si512();
    for (int64_t t = 0; t < strip.count; ++t) {
        fetch(strip.next_v[t], 128 * b);
        fetch(strip.next_v[t], 128 * b + 64);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            __m512i value[2];
            decode_words(static_cast<const char*>(strip.v[t]) + 128 * b + 64 * half, table, value[0], value[1]);
            const float* w = weights + (t * blocks + b) * kGroup * kWeightWords + 8 * half;
            for (int n = 0; n < 2; ++n)
                for (int r = 0; r < R; ++r)
                    for (int byte = 0; byte < 3; ++byte)
                        sum[r][byte] = add_products(sum[r][byte], word_at(w + r * kWeightWords, 4 * n + byte), value[n]);
        }
    }
    for (int r = 0; r < R; ++r) {
        const __m512i rest = _mm512_add_epi32(_mm512_slli_epi32(sum[r][2], 8), sum[r][1]);
        dot[r] = multiply_add(bits<F16>(_mm512_cvtepi32_ps(rest)), splat(256.0f), bits<F16>(_mm512_cvtepi32_ps(sum[r][0])));
    }
}

#else
constexpr int64_t kQueryWords = 32, kWeightWords = 32;

template <int R, int T>
HALFBYTE_INLINE void fp4_scores(const float* q, int64_t step, int64_t blocks, const void* const* k, const uint8_t* const* scales,
                                const void* const* next, const float* factor, float* scores) {
    static_assert(T == 1);
    const uint32_t* words = static_cast<const uint32_t*>(k[0]);
    F16 sum[R] = {};
    for (int64_t b = 0; b < blocks; ++b) {
        F16 high[R] = {}, low[R] = {};
        fetch(next[0], 128 * b);
        fetch(next[0], 128 * b + 64);
        for (int64_t half = 0; half < 2; ++half) {
            U16 word = load<U16>(words + (2 * b + half) * kTile);
            for (int n = 0; n < 8; ++n, word = word >> 4) {
                const F16 key = decode_e2m1(word) * 2.0f;
                for (int r = 0; r < R; ++r) {
                    const float* x = q + b * step + r * kQueryWords + 8 * half + n;
                    high[r] = multiply_add(broadcast(x[0]), key, high[r]);
                    low[r] = multiply_add(broadcast(x[16]), key, low[r]);
                }
            }
        }
        const F16 scale = small_scales(scales[0] + b * kTile);
        for (int r = 0; r < R; ++r) sum[r] = sum[r] + multiply_add(high[r], splat(256.0f), low[r]) * scale;
    }
    for (int r = 0; r < R; ++r) store(scores + r * kStripKeys, sum[r] * factor[r]);
}

// Sixteen floats n >> 8, then sixteen n & 255.
HALFBYTE_INLINE void store_query(float* out, const I16& n) {
    store(out, __builtin_convertvector(n >> 8, F16));
    store(out + 16, __builtin_convertvector(n & 255, F16));
}

HALFBYTE_INLINE void store_weights(float* out, const F16& w) { store_query(out, to_integer(w)); }

template <int R>
HALFBYTE_INLINE void fp4_values(const Strip& strip, int64_t blocks, int64_t b, const float* weights, F16* dot) {
    I16 rest[R] = {};
    F16 low[R] = {};
    for (int64_t t = 0; t < strip.count; ++t) {
        F16 high[R] = {};  // exact over one tile, not over four
        fetch(strip.next_v[t], 128 * b);
        fetch(strip.next_v[t], 128 * b + 64);
        for (int half = 0; half < 2; ++half) {
            const U16 word = load<U16>(static_cast<const uint32_t*>(strip.v[t]) + (2 * b + half) * 16);
            for (int n = 0; n < 8; ++n) {
                const F16 value = decode_e2m1(word >> static_cast<uint32_t>(8 * (n % 4) + n / 4 * 4)) * 2.0f;
                for (int r = 0; r < R; ++r) {
                    const float* w = weights + ((t * blocks + b) * kGroup + r) * kWeightWords + 8 * half + n;
                    high[r] = multiply_add(broadcast(w[0]), value, high[r]);
                    low[r] = multiply_add(broadcast(w[16]), value, low[r]);
                }
            }
        }
        for (int r = 0; r < R; ++r) rest[r] = rest[r] + __builtin_convertvector(high[r], I16);
    }
    for (int r = 0; r < R; ++r) dot[r] = multiply_add(__builtin_convertvector(rest[r], F16), splat(256.0f), low[r]);
}
#endif

// A query of d numbers as integers n, q = n 2^-k, with the largest k for which all |n| <= 0x7F7F7F, in the form of store_query;
// a block each `step` floats; returns 2^-k, or NaN if the query holds NaN or infinity.
inline float split_query(const float* q, int64_t d, int64_t step, float* out) {
    U16 largest_bits = {};
    for (int64_t i = 0; i < d; i += 16) {
        const U16 b = load<U16>(q + i) & 0x7FFFFFFFu;
        largest_bits = b > largest_bits ? b : largest_bits;
    }
    uint32_t top = 0;
    for (int i = 0; i < 16; ++i) top = largest_bits[i] > top ? largest_bits[i] : top;
    const bool finite = top < 0x7F800000u;
    const int32_t exponent = finite ? int32_t(bits<uint32_t>(bits<float>(top) * 1.0078125f) >> 23) - 127 : 0;
    const int32_t k = 22 - (exponent > -100 ? exponent : -100);
    const F16 up = splat(power_of_two(k));
    for (int64_t b = 0; b < d / 16; ++b) {
        const F16 x = finite ? load<F16>(q + 16 * b) * up : F16{};
        const I16 negative = x < 0.0f, magnitude = to_integer(select(negative, -x, x));
        store_query(out + b * step, (magnitude ^ negative) - negative);
    }
    return finite ? power_of_two(-k) : __builtin_nanf("");
}

// Of every block, the largest exponent field (at least 1) of the scales of a strip's first `seen` keys.
inline void largest_exponents(const Strip& strip, int64_t blocks, int64_t seen, int32_t* exponents) {
    int64_t b = 0;
#if defined(__AVX512F__)
    if (seen >= strip.count * kTile)
        for (; b + 4 <= blocks; b += 4) {
            __m512i top = _mm512_loadu_si512(strip.v_scales[0] + b * kTile);
            for (int64_t t = 1; t < strip.count; ++t) top = _mm512_max_epu8(top, _mm512_loadu_si512(strip.v_scales[t] + b * kTile));
            top = _mm512_max_epu8(top, _mm512_bsrli_epi128(top, 8));
            top = _mm512_max_epu8(top, _mm512_bsrli_epi128(top, 4));
            top = _mm512_max_epu8(top, _mm512_bsrli_epi128(top, 2));
            top = _mm512_max_epu8(top, _mm512_bsrli_epi128(top, 1));
            alignas(64) uint8_t bytes[64];
            _mm512_store_si512(bytes, top);
            for (int i = 0; i < 4; ++i) exponents[b + i] = bytes[16 * i] > 15 ? bytes[16 * i] >> 3 : 1;
        }
#endif
    for (; b < blocks; ++b) {
        uint8_t top = 15;
        for (int64_t t = 0; t < strip.count; ++t) {
            const int64_t keys = least(kTile, seen - t * kTile);
            for (int64_t j = 0; j < keys; ++j) {
                const uint8_t scale = strip.v_scales[t][b * kTile + j];
                top = scale > top ? scale : top;
            }
        }
        exponents[b] = top >> 3;
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
