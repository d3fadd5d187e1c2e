// xxh3-64 (Yann Collet's xxHash, the long form with its default secret and seed 0) over data that is being worked on anyway: a block's
// hash costs no pass of its own. Included by refit_*.cpp inside the namespace of an instruction set. The tests compare it with
// the xxhash library, which hashes everything else.
#pragma once

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "refit_masks.hpp"

namespace halfbyte::HALFBYTE_ISA {

// What the specification calls stripes (64 bytes) and blocks (16 stripes; a stripe's secret begins 8 bytes further each time).
constexpr int64_t kStripe = 64, kHashBlock = 1024, kSecretSize = 192;
alignas(64) constexpr uint8_t kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};
constexpr uint64_t kPrime32[3] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[5] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u, 0x27D4EB2F165667C5u};

// Words of 64 bits in the widest register of the set.
#if defined(__AVX512F__)
using HashWords = __m512i;
inline HashWords words_at(const void* p) { return _mm512_loadu_si512(p); }
inline void words_to(void* p, HashWords x) { _mm512_storeu_si512(p, x); }
inline HashWords add(HashWords a, HashWords b) { return _mm512_add_epi64(a, b); }
inline HashWords either(HashWords a, HashWords b) { return _mm512_xor_si512(a, b); }
inline HashWords product(HashWords a, HashWords b) { return _mm512_mul_epu32(a, b); }  // of low halves
inline HashWords swapped(HashWords a) { return _mm512_shuffle_epi32(a, _MM_PERM_BADC); }  // neighbours
template <int Bits>
inline HashWords right(HashWords a) { return _mm512_srli_epi64(a, Bits); }
template <int Bits>
inline HashWords left(HashWords a) { return _mm512_slli_epi64(a, Bits); }
inline HashWords all_words(uint64_t x) { return _mm512_set1_epi64(int64_t(x)); }
#elif defined(__AVX2__)
using HashWords = __m256i;
inline HashWords words_at(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void words_to(void* p, HashWords x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline HashWords add(HashWords a, HashWords b) { return _mm256_add_epi64(a, b); }
inline HashWords either(HashWords a, HashWords b) { return _mm256_xor_si256(a, b); }
inline HashWords product(HashWords a, HashWords b) { return _mm256_mul_epu32(a, b); }
inline HashWords swapped(HashWords a) { return _mm256_shuffle_epi32(a, 0x4E); }
template <int Bits>
inline HashWords right(HashWords a) { return _mm256_srli_epi64(a, Bits); }
template <int Bits>
inline HashWords left(HashWords a) { return _mm256_slli_epi64(a, Bits); }
inline HashWords all_words(uint64_t x) { return _mm256_set1_epi64x(int64_t(x)); }
#elif defined(__SSE2__)
using HashWords = __m128i;
inline HashWords words_at(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void words_to(void* p, HashWords x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
inline HashWords add(HashWords a, HashWords b) { return _mm_add_epi64(a, b); }
inline HashWords either(HashWords a, HashWords b) { return _mm_xor_si128(a, b); }
inline HashWords product(HashWords a, HashWords b) { return _mm_mul_epu32(a, b); }
inline HashWords swapped(HashWords a) { return _mm_shuffle_epi32(a, 0x4E); }
template <int Bits>
inline HashWords right(HashWords a) { return _mm_srli_epi64(a, Bits); }
template <int Bits>
inline HashWords left(HashWords a) { return _mm_slli_epi64(a, Bits); }
inline HashWords all_words(uint64_t x) { return _mm_set1_epi64x(int64_t(x)); }
#else
struct HashWords {
    uint64_t a, b;
};
inline HashWords words_at(const void* p) {
    HashWords x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void words_to(void* p, HashWords x) { std::memcpy(p, &x, sizeof x); }
inline HashWords add(HashWords x, HashWords y) { return {x.a + y.a, x.b + y.b}; }
inline HashWords either(HashWords x, HashWords y) { return {x.a ^ y.a, x.b ^ y.b}; }
inline HashWords product(HashWords x, HashWords y) {
    return {(x.a & 0xFFFFFFFFu) * (y.a & 0xFFFFFFFFu), (x.b & 0xFFFFFFFFu) * (y.b & 0xFFFFFFFFu)};
}
inline HashWords swapped(HashWords x) { return {x.b, x.a}; }
template <int Bits>
inline HashWords right(HashWords x) { return {x.a >> Bits, x.b >> Bits}; }
template <int Bits>
inline HashWords left(HashWords x) { return {x.a << Bits, x.b << Bits}; }
inline HashWords all_words(uint64_t x) { return {x, x}; }
#endif

// Eight sums of 64 bits. A stripe adds to each its own word's low half times high half, secret mixed in, and its neighbour's word.
class HashSums {
   public:
    void stripe(const uint8_t* data, const uint8_t* secret) {
        for (int r = 0; r < kRegisters; ++r) {
            const HashWords word = words_at(data + kWidth * r), key = either(word, words_at(secret + kWidth * r));
            sums_[r] = add(sums_[r], add(product(key, right<32>(key)), swapped(word)));
        }
    }
    void scramble() {
        const HashWords prime = all_words(kPrime32[0]);
        for (int r = 0; r < kRegisters; ++r) {
            const HashWords secret = words_at(kSecret + kSecretSize - kStripe + kWidth * r);
            const HashWords mixed = either(either(sums_[r], right<47>(sums_[r])), secret);
            sums_[r] = add(product(mixed, prime), left<32>(product(right<32>(mixed), prime)));
        }
    }
    void get(uint64_t* out) const {
        for (int r = 0; r < kRegisters; ++r) words_to(out + kWidth / 8 * r, sums_[r]);
    }
    void set(const uint64_t* in) {
        for (int r = 0; r < kRegisters; ++r) sums_[r] = words_at(in + kWidth / 8 * r);
    }

   private:
    static constexpr int kWidth = int(sizeof(HashWords)), kRegisters = int(kStripe) / kWidth;
    HashWords sums_[kRegisters];
};

// The hash of `size` bytes, at least kRefitHashed, that come to be known from the front on.
class Xxh3 {
   public:
    explicit Xxh3(int64_t size) : size_(size) {
        const uint64_t start[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
        sums_.set(start);
    }
    // `data` is final up to byte `end`: whole blocks of it are taken, the last one of all is not.
    void advance(const uint8_t* data, int64_t end) {
        HashSums sums = sums_;  // in a register
        for (; at_ + kHashBlock <= end && at_ + kHashBlock < size_; at_ += kHashBlock) {
            for (int s = 0; s < kHashBlock / kStripe; ++s) sums.stripe(data + at_ + kStripe * s, kSecret + 8 * s);
            sums.scramble();
        }
        sums_ = sums;
    }
    uint64_t finish(const uint8_t* data) {
        advance(data, size_);
        const int64_t stripes = (size_ - 1 - at_) / kStripe;
        for (int64_t s = 0; s < stripes; ++s) sums_.stripe(data + at_ + kStripe * s, kSecret + 8 * s);
        sums_.stripe(data + size_ - kStripe, kSecret + kSecretSize - kStripe - 7);
        uint64_t sums[8], hash = uint64_t(size_) * kPrime64[0];
        sums_.get(sums);
        for (int j = 0; j < 8; j += 2)
            hash += folded(sums[j] ^ load<uint64_t>(kSecret + 11 + 8 * j), sums[j + 1] ^ load<uint64_t>(kSecret + 19 + 8 * j));
        hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
        return hash ^ hash >> 32;
    }

   private:
    // Both halves of the product of 128 bits, one on the other. (By halves of the factors: not every compiler has the type.)
    static uint64_t folded(uint64_t a, uint64_t b) {
        const uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), one = (a >> 32) * (b & 0xFFFFFFFFu);
        const uint64_t two = (a & 0xFFFFFFFFu) * (b >> 32), middle = (low >> 32) + (one & 0xFFFFFFFFu) + two;
        return (a * b) ^ ((a >> 32) * (b >> 32) + (one >> 32) + (middle >> 32));
    }
    HashSums sums_;
    int64_t size_, at_ = 0;
};

}  // namespace halfbyte::HALFBYTE_ISA
