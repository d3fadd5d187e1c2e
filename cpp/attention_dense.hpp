// Scores and values of float32 and bfloat16 pages: multiply then add, in order.
#pragma once

#include "attention_strip.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

template <KvKind kKind>
constexpr int64_t kDenseBytes = kKind == KvKind::bf16 ? 2 : 4;

template <KvKind kKind>
HALFBYTE_INLINE F16 load_dense(const void* p, int64_t i) {
    if constexpr (kKind == KvKind::bf16) {
        const uint16_t* half = static_cast<const uint16_t*>(p) + i;
#if defined(__AVX512F__)
        return bits<F16>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half))), 16));
#else
        typedef uint16_t H16 __attribute__((vector_size(32)));
        return bits<F16>(__builtin_convertvector(load<H16>(half), U16) << 16);
#endif
    } else {
        return load<F16>(static_cast<const float*>(p) + i);
    }
}

// Scores of R rows and T tiles.
template <int R, int T, KvKind kKind>
HALFBYTE_INLINE void dense_scores(const float* q, int64_t stride, int64_t d, const void* const* k, const void* const* next,
                                  float scale, float* scores) {
    constexpr int64_t kRow = kTile * kDenseBytes<kKind>, kSteps = 64 / kRow;  // dimensions a cache line
    F16 sum[R][T] = {};
    for (int64_t i = 0; i < d; ++i) {
        F16 key[T];
        for (int t = 0; t < T; ++t) key[t] = load_dense<kKind>(k[t], i * kTile);
        if (i % kSteps == 0)
            for (int t = 0; t < T; ++t) fetch(next[t], i * kRow);
        for (int r = 0; r < R; ++r) {
            const F16 query = broadcast(q[r * stride + i]);
            for (int t = 0; t < T; ++t) sum[r][t] = sum[r][t] + query * key[t];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, sum[r][t] * scale);
}

// acc = acc * alpha + (sum over the keys of `count` tiles of p * value), for R rows and C vectors of 16 dimensions, in rows
// `stride` apart. `p` and `acc` are those of the first row.
template <int R, int C, KvKind kKind>
HALFBYTE_INLINE void dense_values(const void* const* v, const void* const* next, int64_t count, int64_t stride, int64_t first,
                                  const float* p, const float* alpha, float* acc, int64_t acc_stride) {
    F16 sum[R][C] = {};
    for (int64_t t = 0; t < count; ++t)
        for (int64_t j = 0; j < kTile; ++j) {
            for (int64_t c = 0; c < C * 16 * kDenseBytes<kKind>; c += 64)
                fetch(next[t], (j * stride + first) * kDenseBytes<kKind> + c);
            for (int c = 0; c < C; ++c) {
                const F16 value = load_dense<kKind>(v[t], j * stride + first + c * 16);
                for (int r = 0; r < R; ++r) sum[r][c] = sum[r][c] + broadcast(p[r * kStripKeys + t * kTile + j]) * value;
            }
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            float* a = acc + r * acc_stride + first + c * 16;
            store(a, load<F16>(a) * alpha[r] + sum[r][c]);
        }
}

// Rows of `d` values that do not fill vectors, as float32 rows of `padded`.
template <KvKind kKind>
inline void widen_values(const void* v, int64_t d, int64_t padded, float* out) {
    for (int64_t j = 0; j < kTile; ++j)
        for (int64_t i = 0; i < d; ++i) {
            if constexpr (kKind == KvKind::bf16)
                out[j * padded + i] = bits<float>(uint32_t(static_cast<const uint16_t*>(v)[j * d + i]) << 16);
            else
                out[j * padded + i] = static_cast<const float*>(v)[j * d + i];
        }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
