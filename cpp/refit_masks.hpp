// Which of 64 elements differ, as the bits of a word: the part of the codec that depends on the instruction set. Included by
// refit_*.cpp inside the namespace of the set.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace halfbyte::HALFBYTE_ISA {

template <class T>
inline T load(const uint8_t* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class T>
inline void store(uint8_t* p, T v) {
    std::memcpy(p, &v, sizeof v);
}

// 64 elements of T (or 64 codes of 4 bits where Bits is 4).
template <int Bits>
inline uint64_t differ64(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    if constexpr (Bits == 4) {
        for (int i = 0; i < 32; ++i) {
            const unsigned x = a[i] ^ b[i];
            mask |= uint64_t((x & 15) != 0) << (2 * i) | uint64_t((x >> 4) != 0) << (2 * i + 1);
        }
    } else {
        constexpr int kSize = Bits / 8, kPerWord = 8 / kSize;
        for (int w = 0; w < 64 / kPerWord; ++w) {
            const uint64_t x = load<uint64_t>(a + 8 * w) ^ load<uint64_t>(b + 8 * w);
            if (x == 0) continue;
            for (int j = 0; j < kPerWord; ++j) {
                const uint64_t part = Bits == 64 ? x : (x >> (Bits % 64 * j)) & ((uint64_t{1} << Bits % 64) - 1);
                mask |= uint64_t(part != 0) << (w * kPerWord + j);
            }
        }
    }
    return mask;
}

#if defined(__AVX512BW__)
template <>
inline uint64_t differ64<8>(const uint8_t* a, const uint8_t* b) {
    return _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
}
template <>
inline uint64_t differ64<16>(const uint8_t* a, const uint8_t* b) {
    const uint64_t low = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    const uint64_t high = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(a + 64), _mm512_loadu_si512(b + 64));
    return low | high << 32;
}
template <>
inline uint64_t differ64<32>(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 4; ++i)
        mask |= uint64_t(_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(a + 64 * i), _mm512_loadu_si512(b + 64 * i))) << (16 * i);
    return mask;
}
template <>
inline uint64_t differ64<64>(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; ++i)
        mask |= uint64_t(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(a + 64 * i), _mm512_loadu_si512(b + 64 * i))) << (8 * i);
    return mask;
}
#elif defined(__AVX2__)
inline __m256i load256(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline uint64_t differ32_bytes(const uint8_t* a, const uint8_t* b) {
    return uint32_t(~_mm256_movemask_epi8(_mm256_cmpeq_epi8(load256(a), load256(b))));
}
template <>
inline uint64_t differ64<8>(const uint8_t* a, const uint8_t* b) {
    return differ32_bytes(a, b) | differ32_bytes(a + 32, b + 32) << 32;
}
template <>
inline uint64_t differ64<16>(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256i low = _mm256_cmpeq_epi16(load256(a + 64 * i), load256(b + 64 * i));
        const __m256i high = _mm256_cmpeq_epi16(load256(a + 64 * i + 32), load256(b + 64 * i + 32));
        const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8);
        mask |= uint64_t(uint32_t(~_mm256_movemask_epi8(bytes))) << (32 * i);
    }
    return mask;
}
template <>
inline uint64_t differ64<32>(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 8; ++i) {
        const __m256i same = _mm256_cmpeq_epi32(load256(a + 32 * i), load256(b + 32 * i));
        mask |= uint64_t(uint8_t(~_mm256_movemask_ps(_mm256_castsi256_ps(same)))) << (8 * i);
    }
    return mask;
}
template <>
inline uint64_t differ64<64>(const uint8_t* a, const uint8_t* b) {
    uint64_t mask = 0;
    for (int i = 0; i < 16; ++i) {
        const __m256i same = _mm256_cmpeq_epi64(load256(a + 32 * i), load256(b + 32 * i));
        mask |= uint64_t(~_mm256_movemask_pd(_mm256_castsi256_pd(same)) & 15) << (4 * i);
    }
    return mask;
}
#endif

// Which of 64 bytes equal `wanted`.
inline uint64_t equal64(const uint8_t* bytes, uint8_t wanted) {
#if defined(__AVX512BW__)
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(char(wanted)));
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi8(char(wanted));
    const uint32_t low = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load256(bytes), all)));
    const uint32_t high = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(load256(bytes + 32), all)));
    return low | uint64_t(high) << 32;
#else
    constexpr uint64_t kLow = 0x7F7F7F7F7F7F7F7Fu;
    uint64_t mask = 0;
    for (int w = 0; w < 8; ++w) {
        const uint64_t x = load<uint64_t>(bytes + 8 * w) ^ 0x0101010101010101u * wanted;
        const uint64_t same = ~(((x & kLow) + kLow) | x | kLow) >> 7;  // bit 0 of each byte that is zero
        mask |= (same * 0x0102040810204080u >> 56) << (8 * w);
    }
    return mask;
#endif
}

// Places of eight marks from their gaps, none a skip, `at` elements being behind; how many elements they pass.
inline uint32_t eight_places(const uint8_t* gap, uint32_t at, uint32_t* places) {
#if defined(__AVX2__)
    __m128i sums = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(gap)));
    sums = _mm_add_epi16(sums, _mm_set1_epi16(1));
    sums = _mm_add_epi16(sums, _mm_slli_si128(sums, 2));
    sums = _mm_add_epi16(sums, _mm_slli_si128(sums, 4));
    sums = _mm_add_epi16(sums, _mm_slli_si128(sums, 8));
    const __m256i ends = _mm256_add_epi32(_mm256_cvtepu16_epi32(sums), _mm256_set1_epi32(int(at - 1)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(places), ends);
    return uint32_t(_mm_extract_epi16(sums, 7));
#else
    const uint32_t before = at;
    for (int j = 0; j < 8; ++j) {
        at += gap[j];
        places[j] = at++;
    }
    return at - before;
#endif
}

// Number of the nth set bit (from 0); there are more than n.
inline int nth_bit(uint64_t mask, int64_t n) {
#if defined(__BMI2__)
    return __builtin_ctzll(_pdep_u64(uint64_t{1} << n, mask));
#else
    for (; n > 0; --n) mask &= mask - 1;
    return __builtin_ctzll(mask);
#endif
}

#if defined(__BMI2__)
#if defined(__AVX2__)
template <>
inline uint64_t differ64<4>(const uint8_t* a, const uint8_t* b) {
    const __m256i x = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                                       _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    const uint32_t low = ~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(x, nibble), zero)));
    const uint32_t high = ~uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_andnot_si256(nibble, x), zero)));
    return _pdep_u64(low, 0x5555555555555555u) | _pdep_u64(high, 0xAAAAAAAAAAAAAAAAu);
}
#endif
// Eight codes, one a byte, to 32 bits and back.
inline uint32_t join_nibbles(uint64_t codes) { return uint32_t(_pext_u64(codes, 0x0F0F0F0F0F0F0F0Fu)); }
inline uint64_t split_nibbles(uint32_t packed) { return _pdep_u64(packed, 0x0F0F0F0F0F0F0F0Fu); }
#else
inline uint32_t join_nibbles(uint64_t codes) {
    codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFu;
    codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFu;
    return uint32_t(codes | codes >> 16);
}
inline uint64_t split_nibbles(uint32_t packed) {
    uint64_t codes = packed;
    codes = (codes | codes << 16) & 0x0000FFFF0000FFFFu;
    codes = (codes | codes << 8) & 0x00FF00FF00FF00FFu;
    return (codes | codes << 4) & 0x0F0F0F0F0F0F0F0Fu;
}
#endif

}  // namespace halfbyte::HALFBYTE_ISA
