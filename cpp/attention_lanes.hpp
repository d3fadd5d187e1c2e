// Paged attention of one instruction set: the twin of halfbyte/kernels/reference/attention.py, which has the definition.
//
// An item is processed in strips of four tiles. A row is one query of one head; rows are taken in groups of up to four, so that
// every loaded key and value serves several: scores of the strip, then its online softmax tile by tile, then its values.
#pragma once

#include <type_traits>

#include "attention.hpp"
#include "elementary.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

constexpr int64_t kStripKeys = kStrip * kTile;

// Calls f with std::integral_constant<int, n> for n = 1 .. Most.
template <int Most, class F>
HALFBYTE_INLINE void with_constant(int64_t n, const F& f) {
    if constexpr (Most > 1) {
        if (n < Most) return with_constant<Most - 1>(n, f);
    }
    f(std::integral_constant<int, Most>{});
}

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

HALFBYTE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Working memory of one item, cut from one buffer that serves all items of a thread. `p` and `alpha` hold one group of rows.
struct AttentionScratch {
    int64_t padded, blocks;
    float *q, *acc, *m, *l, *p, *weights, *alpha, *staged;

    AttentionScratch(float* memory, int64_t rows, int64_t d) : padded((d + 15) / 16 * 16), blocks(padded / 16) {
        const auto take = [&memory](int64_t count) { return (memory += count) - count; };
        q = take(rows * padded);
        acc = take(rows * padded);
        m = take(rows);
        l = take(rows);
        p = take(kGroup * kStripKeys);
        weights = take(kGroup * kStrip * padded);
        alpha = take(kGroup * kStrip);
        staged = take(kStripKeys * padded);
    }
};

// One strip of one kv head.
struct Strip {
    int64_t first, count;  // tiles
    const void *k[kStrip], *v[kStrip];
    const uint8_t *k_scales[kStrip], *v_scales[kStrip];
};

// E4M3 bytes of 16 keys as float32.
HALFBYTE_INLINE F16 key_scales(const uint8_t* p) {
#if defined(__AVX512F__)
    // Half precision has one exponent bit more and the mantissa bits in the same place: E4M3 is half * 2^8.
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
    return bits<F16>(_mm512_cvtph_ps(half)) * 256.0f;
#else
    return decode_e4m3(p);
#endif
}

// One number in all lanes, straight from memory (splat() adds it to zero first).
HALFBYTE_INLINE F16 broadcast(const float& x) { return F16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// x to 22 significant bits by two subtractions (Veltkamp 1968).
HALFBYTE_INLINE F16 head22(const F16& x) {
    const F16 c = x * 5.0f;
    return c - (c - x);
}

template <int R, int T, KvKind kKind>
HALFBYTE_INLINE void dense_scores(const float* q, int64_t stride, int64_t d, const void* const* k, float scale, float* scores) {
    F16 sum[R][T] = {};
    for (int64_t i = 0; i < d; ++i) {
        F16 key[T];
        for (int t = 0; t < T; ++t) key[t] = load_dense<kKind>(k[t], i * kTile);
        for (int r = 0; r < R; ++r) {
            const F16 query = broadcast(q[r * stride + i]);
            for (int t = 0; t < T; ++t) sum[r][t] = sum[r][t] + query * key[t];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, sum[r][t] * scale);
}

template <int R, int T>
HALFBYTE_INLINE void fp4_scores(const float* q, int64_t stride, int64_t d, const void* const* k, const uint8_t* const* k_scales,
                                float global, float scale, float* scores) {
    F16 sum[R][T] = {};
    for (int64_t b = 0; b < d / 16; ++b) {
        F16 dot[R][T] = {};
        for (int half = 0; half < 2; ++half) {
            U16 word[T];
            for (int t = 0; t < T; ++t) word[t] = load<U16>(static_cast<const uint32_t*>(k[t]) + (2 * b + half) * kTile);
#pragma GCC unroll 8
            for (int n = 0; n < 8; ++n) {
                F16 key[T];
                for (int t = 0; t < T; ++t) {
                    key[t] = decode_e2m1(word[t]);
                    word[t] = word[t] >> 4;
                }
                for (int r = 0; r < R; ++r) {
                    const F16 query = broadcast(q[r * stride + 16 * b + 8 * half + n]);
                    for (int t = 0; t < T; ++t) dot[r][t] = multiply_add(query, key[t], dot[r][t]);
                }
            }
        }
        for (int t = 0; t < T; ++t) {
            const F16 s = key_scales(k_scales[t] + b * kTile);
            for (int r = 0; r < R; ++r) sum[r][t] = sum[r][t] + dot[r][t] * s;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, (sum[r][t] * global) * scale);
}

// acc = acc * alpha + sum over the 16 keys of a tile of weight * value, for R rows and C vectors of 16 dimensions. The weight of
// row r, vector c and key j is weights[r * weight_stride + c * weight_step + j].
template <int R, int C, KvKind kKind>
HALFBYTE_INLINE void dense_values(const void* v, int64_t v_stride, const float* weights, int64_t weight_stride, int64_t weight_step,
                                  const float* alpha, float* acc, int64_t acc_stride) {
    F16 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = load<F16>(acc + r * acc_stride + c * 16) * alpha[r * kStrip];
    for (int64_t j = 0; j < kTile; ++j)
        for (int c = 0; c < C; ++c) {
            const F16 value = load_dense<kKind>(v, j * v_stride + c * 16);
            for (int r = 0; r < R; ++r) sum[r][c] = sum[r][c] + broadcast(weights[r * weight_stride + c * weight_step + j]) * value;
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(acc + r * acc_stride + c * 16, sum[r][c]);
}

// The same for FP4 codes: blocks First .. First + C of the NB (a divisor of 8) in a word. Words of consecutive keys lie
// `word_step` apart.
template <int R, int NB, int First, int C>
HALFBYTE_INLINE void fp4_values(const uint32_t* words, int64_t word_step, const float* weights, int64_t weight_stride,
                                const float* alpha, float* acc, int64_t acc_stride) {
    F16 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = load<F16>(acc + r * acc_stride + (First + c) * 16) * alpha[r * kStrip];
    constexpr int kKeys = 8 / NB;  // keys in a word
    for (int64_t w = 0; w < kTile / kKeys; ++w) {
        const U16 word = load<U16>(words + w * word_step * 16);
#pragma GCC unroll 8
        for (int key = 0; key < kKeys; ++key) {
            const int64_t j = w * kKeys + key;
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const F16 value = decode_e2m1(word >> static_cast<uint32_t>(4 * (key * NB + First + c)));
                for (int r = 0; r < R; ++r)
                    sum[r][c] = multiply_add(broadcast(weights[r * weight_stride + (First + c) * 16 + j]), value, sum[r][c]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(acc + r * acc_stride + (First + c) * 16, sum[r][c]);
}

template <KvKind kKind>
struct Attention {
    const AttentionInput& in;
    AttentionScratch& s;
    int64_t d = in.kv.width;
    bool even = s.blocks % 8 == 0 || s.blocks == 4 || s.blocks == 2 || s.blocks == 1;  // FP4 blocks divide words evenly

    // Scores of R rows from `row` on into s.p.
    template <int R>
    HALFBYTE_INLINE void score(int64_t row, const Strip& strip) {
#if defined(__AVX512F__)
        constexpr int kTogether = R <= 2 ? 4 : 2;
#else
        constexpr int kTogether = 1;  // few registers
#endif
        int64_t t = 0;
        for (; t + kTogether <= strip.count; t += kTogether) score_tiles<R, kTogether>(row, strip, t);
        if constexpr (kTogether > 1)
            for (; t < strip.count; ++t) score_tiles<R, 1>(row, strip, t);
    }

    template <int R, int T>
    HALFBYTE_INLINE void score_tiles(int64_t row, const Strip& strip, int64_t t) {
        const float* q = s.q + row * s.padded;
        if constexpr (kKind == KvKind::fp4)
            fp4_scores<R, T>(q, s.padded, d, strip.k + t, strip.k_scales + t, in.kv.global, in.scale, s.p + t * kTile);
        else
            dense_scores<R, T, kKind>(q, s.padded, d, strip.k + t, in.scale, s.p + t * kTile);
    }

    // Turns the scores in s.p into p, tile by tile, and updates m and l; a row sees its first `visible(r)` keys of the strip.
    template <int R, class Visible>
    HALFBYTE_INLINE void softmax(int64_t row, const Strip& strip, const Visible& visible) {
        const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        alignas(64) float change[16] = {};
        float high[R][kStrip];
        for (int r = 0; r < R; ++r) {
            const int64_t seen = visible(row + r);
            float m = s.m[row + r];
            for (int64_t t = 0; t < strip.count; ++t) {
                float* scores = s.p + r * kStripKeys + t * kTile;
                F16 v = load<F16>(scores);
                if (seen < (t + 1) * kTile) {
                    v = select(lane < static_cast<int32_t>(seen - t * kTile), v, splat(-__builtin_inff()));
                    store(scores, v);
                }
                const float top = largest(v);
                high[r][t] = top > m ? top : m;
                change[r * kStrip + t] = m - high[r][t];
                m = high[r][t];
            }
            s.m[row + r] = m;
        }
        store(s.alpha, exp(load<F16>(change)));
        for (int r = 0; r < R; ++r)
            for (int64_t t = 0; t < strip.count; ++t) {
                float* scores = s.p + r * kStripKeys + t * kTile;
                store(scores, exp(load<F16>(scores) - high[r][t]));
            }
        float total[R];
        for (int r = 0; r < R; ++r) total[r] = s.l[row + r];
        for (int64_t t = 0; t < strip.count; ++t) {
            for (int r = 0; r < R; ++r) total[r] *= s.alpha[r * kStrip + t];
            for (int64_t j = t * kTile; j < (t + 1) * kTile; ++j)
                for (int r = 0; r < R; ++r) total[r] += s.p[r * kStripKeys + j];
        }
        for (int r = 0; r < R; ++r) s.l[row + r] = total[r];
    }

    HALFBYTE_INLINE static float largest(const F16& v) {
#if defined(__AVX512F__)
        return _mm512_reduce_max_ps(bits<__m512>(v));
#else
        float top = v[0];
        for (int j = 1; j < 16; ++j) top = v[j] > top ? v[j] : top;
        return top;
#endif
    }

    // Weights of FP4 blocks: [row][tile][block][16 keys].
    template <int R>
    HALFBYTE_INLINE void weigh(const Strip& strip) {
        for (int64_t t = 0; t < strip.count; ++t) {
            F16 p[R];
            for (int r = 0; r < R; ++r) {
                const F16 all = load<F16>(s.p + r * kStripKeys + t * kTile);
                p[r] = select(all < 0x1p-80f, F16{}, all);
            }
            for (int64_t b = 0; b < s.blocks; ++b) {
                const F16 scale = key_scales(strip.v_scales[t] + b * kTile);
                for (int r = 0; r < R; ++r) store(s.weights + (r * kStrip + t) * s.padded + b * 16, head22(p[r] * scale));
            }
        }
    }

    template <int R>
    HALFBYTE_INLINE void values(int64_t row, const Strip& strip) {
        if constexpr (kKind == KvKind::fp4) weigh<R>(strip);
        float* acc = s.acc + row * s.padded;
        for (int64_t t = 0; t < strip.count; ++t) {
            const float* alpha = s.alpha + t;
            if constexpr (kKind == KvKind::fp4) {
                const float* weights = s.weights + t * s.padded;
                const int64_t stride = kStrip * s.padded;
                if (even)
                    fp4<R>(static_cast<const uint32_t*>(strip.v[t]), weights, stride, alpha, acc);
                else
                    dense<R, KvKind::fp32>(s.staged + t * kTile * s.padded, s.padded, weights, stride, 16, alpha, acc);
            } else if (s.padded != d) {
                dense<R, KvKind::fp32>(s.staged + t * kTile * s.padded, s.padded, s.p + t * kTile, kStripKeys, 0, alpha, acc);
            } else {
                dense<R, kKind>(strip.v[t], d, s.p + t * kTile, kStripKeys, 0, alpha, acc);
            }
        }
    }

    template <int R>
    HALFBYTE_INLINE void fp4(const uint32_t* words, const float* weights, int64_t stride, const float* alpha, float* acc) {
        constexpr int kHalf = R > 2 ? 4 : 8;  // blocks that fit the registers together
        if (s.blocks % 8 == 0) {
            const int64_t step = s.blocks / 8;
            for (int64_t i = 0; i < step; ++i) {
                const int64_t at = i * 128;
                fp4_values<R, 8, 0, kHalf>(words + i * 16, step, weights + at, stride, alpha, acc + at, s.padded);
                if constexpr (kHalf == 4) fp4_values<R, 8, 4, 4>(words + i * 16, step, weights + at, stride, alpha, acc + at, s.padded);
            }
        } else if (s.blocks == 4) {
            fp4_values<R, 4, 0, 4>(words, 1, weights, stride, alpha, acc, s.padded);
        } else if (s.blocks == 2) {
            fp4_values<R, 2, 0, 2>(words, 1, weights, stride, alpha, acc, s.padded);
        } else {
            fp4_values<R, 1, 0, 1>(words, 1, weights, stride, alpha, acc, s.padded);
        }
    }

    template <int R, KvKind kStored>
    HALFBYTE_INLINE void dense(const void* v, int64_t v_stride, const float* weights, int64_t stride, int64_t step,
                               const float* alpha, float* acc) {
        constexpr int64_t kSize = kStored == KvKind::bf16 ? 2 : 4;
        for (int64_t c = 0; c < s.blocks; c += 4) {
            const void* from = static_cast<const char*>(v) + c * 16 * kSize;
            with_constant<4>(least(4, s.blocks - c), [&](auto vectors) {
                dense_values<R, decltype(vectors)::value, kStored>(from, v_stride, weights + c * step, stride, step, alpha,
                                                                   acc + c * 16, s.padded);
            });
        }
    }

    // Values in float32 rows of whole vectors, where the pages have no such form.
    void stage(const Strip& strip) {
        for (int64_t t = 0; t < strip.count; ++t) {
            float* out = s.staged + t * kTile * s.padded;
            if constexpr (kKind == KvKind::fp4) {
                const uint32_t* words = static_cast<const uint32_t*>(strip.v[t]);
                for (int64_t i = 0; i < kTile * s.blocks; ++i)
                    store(out + i * 16, decode_e2m1(load<U16>(words + i / 8 * 16) >> static_cast<uint32_t>(4 * (i % 8))));
            } else {
                for (int64_t j = 0; j < kTile; ++j)
                    for (int64_t i = 0; i < d; ++i) {
                        if constexpr (kKind == KvKind::bf16)
                            out[j * s.padded + i] = bits<float>(uint32_t(static_cast<const uint16_t*>(strip.v[t])[j * d + i]) << 16);
                        else
                            out[j * s.padded + i] = static_cast<const float*>(strip.v[t])[j * d + i];
                    }
            }
        }
    }

    Strip strip_at(const AttentionItem& it, int64_t first, int64_t count) const {
        const KvPages& kv = in.kv;
        Strip strip{};
        strip.first = first;
        strip.count = count;
        for (int64_t t = 0; t < count; ++t) {
            const int64_t tile = first + t, per_page = kv.tiles_per_page();
            const int64_t page = in.page_table[it.sequence * in.pages_per_sequence + tile / per_page];
            const int64_t index = kv.tile_index(page, it.kv_head, tile % per_page);
            strip.k[t] = kv.template tile_at<const void>(kv.k, index);
            strip.v[t] = kv.template tile_at<const void>(kv.v, index);
            if constexpr (kKind == KvKind::fp4) {
                strip.k_scales[t] = kv.k_scales + index * d;
                strip.v_scales[t] = kv.v_scales + index * d;
            }
        }
        return strip;
    }

    void item(const AttentionItem& it) {
        const int64_t group = in.heads / in.kv.heads, rows = group * it.count;
        const auto offset = [&](int64_t row) { return ((it.first + row / group) * in.heads + it.kv_head * group + row % group) * d; };
        for (int64_t r = 0; r < rows; ++r) {
            float* q = s.q + r * s.padded;
            std::memcpy(q, in.q + offset(r), size_t(d) * sizeof(float));
            if constexpr (kKind == KvKind::fp4)
                for (int64_t i = 0; i < d; i += 16) store(q + i, round22(load<F16>(q + i)));
            s.m[r] = -__builtin_inff();
            s.l[r] = 0.0f;
        }
        std::memset(s.acc, 0, size_t(rows * s.padded) * sizeof(float));
        const int64_t tiles = (it.visible + it.count - 1 + kTile - 1) / kTile;
        for (int64_t first = 0; first < tiles; first += kStrip) {
            const Strip strip = strip_at(it, first, least(kStrip, tiles - first));
            if (kKind == KvKind::fp4 ? !even : s.padded != d) stage(strip);
            const auto visible = [&](int64_t row) { return it.visible + row / group - first * kTile; };
            // Rows are ordered by what they see: the first ones may see nothing of this strip.
            const int64_t unseen = 1 - visible(0);
            for_groups(unseen > 0 ? unseen * group : 0, rows, [&](int64_t row, auto n) {
                constexpr int R = decltype(n)::value;
                score<R>(row, strip);
                softmax<R>(row, strip, visible);
                values<R>(row, strip);
            });
        }
        for (int64_t r = 0; r < rows; ++r) {
            float* out = in.out + offset(r);
            const float* acc = s.acc + r * s.padded;
            const float l = s.l[r];
            for (int64_t i = 0; i < d; ++i) out[i] = (kKind == KvKind::fp4 ? acc[i] * in.kv.global : acc[i]) / l + 0.0f;
        }
    }

    // Calls f(first, n) for groups of nearly equal size of rows first .. rows.
    template <class F>
    HALFBYTE_INLINE static void for_groups(int64_t first, int64_t rows, const F& f) {
        int64_t groups = (rows - first + kGroup - 1) / kGroup;
        while (first < rows) {
            const int64_t n = (rows - first + groups - 1) / groups;
            --groups;
            with_constant<kGroup>(n, [&](auto size) { f(first, size); });
            first += n;
        }
    }
};

inline void attend(const AttentionInput& in, const AttentionItem* items, int64_t count, float* memory, int64_t rows) {
    AttentionScratch scratch(memory, rows, in.kv.width);
    const auto run = [&](auto attention) {
        for (int64_t i = 0; i < count; ++i) attention.item(items[i]);
    };
    switch (in.kv.kind) {
        case KvKind::fp32: return run(Attention<KvKind::fp32>{in, scratch});
        case KvKind::bf16: return run(Attention<KvKind::bf16>{in, scratch});
        case KvKind::fp4: return run(Attention<KvKind::fp4>{in, scratch});
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
