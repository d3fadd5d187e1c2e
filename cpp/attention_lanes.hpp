// Paged attention of one instruction set: the twin of halfbyte/kernels/reference/attention.py, which has the definition.
//
// An item is processed in strips of four tiles: scores of all its rows (query x head), then for each tile the online softmax and
// the values. A row is one query of one head; rows are taken in groups so that every loaded key and value serves several.
#pragma once

#include <type_traits>

#include "attention.hpp"
#include "elementary.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

constexpr int64_t kStrip = 4;  // tiles
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

// Working memory of one item, cut from one buffer that serves all items of a thread.
struct AttentionScratch {
    int64_t padded, blocks;
    float *q, *acc, *scores, *p, *weights, *alpha, *m, *l, *staged;

    AttentionScratch(float* memory, int64_t rows, int64_t d) : padded((d + 15) / 16 * 16), blocks(padded / 16) {
        const auto take = [&memory](int64_t count) { return (memory += count) - count; };
        q = take(rows * padded);
        acc = take(rows * padded);
        weights = take(rows * padded);
        scores = take(rows * kStripKeys);
        p = take(rows * kTile);
        staged = take(kTile * padded);
        alpha = take(rows);
        m = take(rows);
        l = take(rows);
    }
};

struct Tiles {
    const void* k[kStrip];
    const uint8_t* scales[kStrip];
};

template <int R, int T, KvKind kKind>
HALFBYTE_INLINE void dense_scores(const float* q, int64_t d, const void* const* k, float scale, float* scores) {
    F16 sum[R][T] = {};
    for (int64_t i = 0; i < d; ++i) {
        F16 key[T];
        for (int t = 0; t < T; ++t) key[t] = load_dense<kKind>(k[t], i * kTile);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) sum[r][t] = sum[r][t] + q[r * d + i] * key[t];
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, sum[r][t] * scale);
}

template <int R, int T>
HALFBYTE_INLINE void fp4_scores(const float* q, int64_t d, const void* const* k, const uint8_t* const* k_scales, float global,
                                float scale, float* scores) {
    F16 sum[R][T] = {};
    for (int64_t b = 0; b < d / 16; ++b) {
        F16 dot[R][T] = {};
        for (int half = 0; half < 2; ++half) {
            U16 word[T];
            for (int t = 0; t < T; ++t) word[t] = load<U16>(static_cast<const uint32_t*>(k[t]) + (2 * b + half) * kTile);
            for (int n = 0; n < 8; ++n)
                for (int t = 0; t < T; ++t) {
                    const F16 key = decode_e2m1(word[t] >> (4 * n));
                    for (int r = 0; r < R; ++r)
                        dot[r][t] = multiply_add(splat(q[r * d + 16 * b + 8 * half + n]), key, dot[r][t]);
                }
        }
        for (int t = 0; t < T; ++t) {
            const F16 s = decode_e4m3(k_scales[t] + b * kTile);
            for (int r = 0; r < R; ++r) sum[r][t] = sum[r][t] + dot[r][t] * s;
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) store(scores + r * kStripKeys + t * kTile, (sum[r][t] * global) * scale);
}

// Scores of R rows with `count` tiles.
template <int R, KvKind kKind>
HALFBYTE_INLINE void score_rows(const float* q, int64_t d, const Tiles& tiles, int64_t count, float global, float scale, float* scores) {
#if defined(__AVX512F__)
    constexpr int kTogether = R <= 2 ? 4 : 2;
#else
    constexpr int kTogether = 1;  // few registers
#endif
    int64_t t = 0;
    for (; t + kTogether <= count; t += kTogether) {
        if constexpr (kKind == KvKind::fp4)
            fp4_scores<R, kTogether>(q, d, tiles.k + t, tiles.scales + t, global, scale, scores + t * kTile);
        else
            dense_scores<R, kTogether, kKind>(q, d, tiles.k + t, scale, scores + t * kTile);
    }
    for (; t < count; ++t) {
        if constexpr (kKind == KvKind::fp4)
            fp4_scores<R, 1>(q, d, tiles.k + t, tiles.scales + t, global, scale, scores + t * kTile);
        else
            dense_scores<R, 1, kKind>(q, d, tiles.k + t, scale, scores + t * kTile);
    }
}

// One tile of one row: updates m and l, writes p (0 where masked) and returns alpha. `valid` keys of the tile are seen.
HALFBYTE_INLINE float softmax_tile(const float* scores, int64_t valid, float& m, float& l, float* p) {
    if (valid <= 0) {
        store(p, F16{});
        return 1.0f;
    }
    const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I16 seen = lane < static_cast<int32_t>(least(valid, kTile));
    const F16 s = select(seen, load<F16>(scores), splat(-__builtin_inff()));
    float high = m;
#if defined(__AVX512F__)
    const float top = _mm512_reduce_max_ps(bits<__m512>(s));
    high = top > high ? top : high;
#else
    for (int j = 0; j < kTile; ++j) high = s[j] > high ? s[j] : high;
#endif
    const F16 change = exp(splat(m - high));
    const F16 weight = select(seen, exp(s - high), F16{});
    store(p, weight);
    const float alpha = change[0];
    float total = l * alpha;
    for (int j = 0; j < kTile; ++j) total += p[j];
    m = high;
    l = total;
    return alpha;
}

// acc = acc * alpha + sum over the tile's keys of weight * value, for R rows and C vectors of 16 dimensions. `weights` holds, for
// row r, 16 weights a vector (weight_step 16) or one set for all vectors (weight_step 0).
template <int R, int C, KvKind kKind>
HALFBYTE_INLINE void dense_values(const void* v, int64_t v_stride, const float* weights, int64_t weight_stride, int64_t weight_step,
                                  const float* alpha, float* acc, int64_t acc_stride) {
    F16 sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = load<F16>(acc + r * acc_stride + c * 16) * alpha[r];
    for (int64_t j = 0; j < kTile; ++j)
        for (int c = 0; c < C; ++c) {
            const F16 value = load_dense<kKind>(v, j * v_stride + c * 16);
            for (int r = 0; r < R; ++r) sum[r][c] = sum[r][c] + weights[r * weight_stride + c * weight_step + j] * value;
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(acc + r * acc_stride + c * 16, sum[r][c]);
}

// The same for FP4 codes with NB blocks of 16 dimensions in a word (or NB = 8 of a multiple of 8: words of one key lie
// `word_step` apart).
template <int R, int NB>
HALFBYTE_INLINE void fp4_values(const uint32_t* words, int64_t word_step, const float* weights, int64_t weight_stride,
                                const float* alpha, float* acc, int64_t acc_stride) {
    F16 sum[R][NB];
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) sum[r][b] = load<F16>(acc + r * acc_stride + b * 16) * alpha[r];
    constexpr int kKeys = 8 / NB;  // keys in a word
    for (int64_t w = 0; w < kTile / kKeys; ++w) {
        const U16 word = load<U16>(words + w * word_step * 16);
        for (int n = 0; n < 8; ++n) {
            const F16 value = decode_e2m1(word >> (4 * n));
            const int b = n % NB;
            const int64_t j = w * kKeys + n / NB;
            for (int r = 0; r < R; ++r) sum[r][b] = multiply_add(splat(weights[r * weight_stride + b * 16 + j]), value, sum[r][b]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int b = 0; b < NB; ++b) store(acc + r * acc_stride + b * 16, sum[r][b]);
}

// FP4 values of one tile as float32 grid values [16][width], for widths that do not divide words evenly.
inline void stage_fp4(const uint32_t* words, int64_t width, float* out) {
    const int64_t blocks = width / 16;
    for (int64_t i = 0; i < kTile * blocks; ++i)
        store(out + i * 16, decode_e2m1(load<U16>(words + i / 8 * 16) >> static_cast<uint32_t>(4 * (i % 8))));
}

template <KvKind kKind>
struct Attention {
    const AttentionInput& in;
    AttentionScratch& s;
    int64_t d = in.kv.width;

    template <int R>
    HALFBYTE_INLINE void values(int64_t row, const void* v) {
        float* acc = s.acc + row * s.padded;
        const float* alpha = s.alpha + row;
        if constexpr (kKind == KvKind::fp4) {
            const float* weights = s.weights + row * s.padded;
            const uint32_t* words = static_cast<const uint32_t*>(v);
            if (s.blocks % 8 == 0) {
                for (int64_t b = 0; b < s.blocks; b += 8)
                    fp4_values<R, 8>(words + b / 8 * 16, s.blocks / 8, weights + b * 16, s.padded, alpha, acc + b * 16, s.padded);
            } else if (s.blocks == 4) {
                fp4_values<R, 4>(words, 1, weights, s.padded, alpha, acc, s.padded);
            } else if (s.blocks == 2) {
                fp4_values<R, 2>(words, 1, weights, s.padded, alpha, acc, s.padded);
            } else if (s.blocks == 1) {
                fp4_values<R, 1>(words, 1, weights, s.padded, alpha, acc, s.padded);
            } else {
                dense<R, KvKind::fp32>(s.staged, s.padded, weights, s.padded, 16, alpha, acc);
            }
        } else if (s.padded != d) {
            dense<R, KvKind::fp32>(s.staged, s.padded, s.p + row * kTile, kTile, 0, alpha, acc);
        } else {
            dense<R, kKind>(v, d, s.p + row * kTile, kTile, 0, alpha, acc);
        }
    }

    template <int R, KvKind kStored>
    HALFBYTE_INLINE void dense(const void* v, int64_t stride, const float* weights, int64_t weight_stride, int64_t weight_step,
                               const float* alpha, float* acc) {
        constexpr int64_t kSize = kStored == KvKind::bf16 ? 2 : 4;
        for (int64_t c = 0; c < s.blocks; c += 4) {
            const void* from = static_cast<const char*>(v) + c * 16 * kSize;
            with_constant<4>(least(4, s.blocks - c), [&](auto vectors) {
                dense_values<R, decltype(vectors)::value, kStored>(from, stride, weights + c * weight_step, weight_stride, weight_step,
                                                                   alpha, acc + c * 16, s.padded);
            });
        }
    }

    // What the value loops need besides the pages: weights of FP4 blocks, or a padded copy of values of odd width.
    void prepare_values(int64_t rows, int64_t first_row, const void* v, const uint8_t* v_scales) {
        if constexpr (kKind == KvKind::fp4) {
            for (int64_t b = 0; b < s.blocks; ++b) {
                const F16 scale = decode_e4m3(v_scales + b * kTile);
                for (int64_t r = first_row; r < rows; ++r)
                    store(s.weights + r * s.padded + b * 16, round22(load<F16>(s.p + r * kTile) * scale));
            }
            const bool even = s.blocks % 8 == 0 || s.blocks == 4 || s.blocks == 2 || s.blocks == 1;
            if (!even) stage_fp4(static_cast<const uint32_t*>(v), d, s.staged);
        } else if (s.padded != d) {
            for (int64_t j = 0; j < kTile; ++j)
                for (int64_t i = 0; i < d; ++i) {
                    if constexpr (kKind == KvKind::bf16)
                        s.staged[j * s.padded + i] = bits<float>(uint32_t(static_cast<const uint16_t*>(v)[j * d + i]) << 16);
                    else
                        s.staged[j * s.padded + i] = static_cast<const float*>(v)[j * d + i];
                }
        }
    }

    void item(const AttentionItem& it) {
        const KvPages& kv = in.kv;
        const int64_t group = in.heads / kv.heads, rows = group * it.count;
        const auto q_row = [&](int64_t row) { return ((it.first + row / group) * in.heads + it.kv_head * group + row % group) * d; };
        const auto seen_by = [&](int64_t row) { return it.visible + row / group; };
        for (int64_t r = 0; r < rows; ++r) {
            float* q = s.q + r * d;
            std::memcpy(q, in.q + q_row(r), size_t(d) * sizeof(float));
            if constexpr (kKind == KvKind::fp4)
                for (int64_t i = 0; i < d; i += 16) store(q + i, round22(load<F16>(q + i)));
        }
        std::memset(s.acc, 0, size_t(rows * s.padded) * sizeof(float));
        for (int64_t r = 0; r < rows; ++r) {
            s.m[r] = -__builtin_inff();
            s.l[r] = 0.0f;
        }
        const int64_t tiles = (it.visible + it.count - 1 + kTile - 1) / kTile;
        constexpr int64_t kMost = 4;
        for (int64_t strip = 0; strip < tiles; strip += kStrip) {
            const int64_t count = least(kStrip, tiles - strip);
            // Rows are ordered by what they see: those before first_row see nothing of this strip.
            const int64_t unseen = strip * kTile - it.visible + 1;
            const int64_t first_row = unseen > 0 ? unseen * group : 0;
            Tiles k{};
            const void* v[kStrip];
            const uint8_t* v_scales[kStrip];
            for (int64_t t = 0; t < count; ++t) {
                const int64_t tile = strip + t;
                const int64_t page = in.page_table[it.sequence * in.pages_per_sequence + tile / kv.tiles_per_page()];
                const int64_t index = kv.tile_index(page, it.kv_head, tile % kv.tiles_per_page());
                k.k[t] = kv.tile_at<const void>(kv.k, index);
                v[t] = kv.tile_at<const void>(kv.v, index);
                k.scales[t] = kKind == KvKind::fp4 ? kv.k_scales + index * d : nullptr;
                v_scales[t] = kKind == KvKind::fp4 ? kv.v_scales + index * d : nullptr;
            }
            for_groups(first_row, rows, kMost, [&](int64_t r, auto n) {
                score_rows<decltype(n)::value, kKind>(s.q + r * d, d, k, count, kv.global, in.scale, s.scores + r * kStripKeys);
            });
            for (int64_t t = 0; t < count; ++t) {
                for (int64_t r = first_row; r < rows; ++r)
                    s.alpha[r] = softmax_tile(s.scores + r * kStripKeys + t * kTile, seen_by(r) - (strip + t) * kTile,
                                                      s.m[r], s.l[r], s.p + r * kTile);
                prepare_values(rows, first_row, v[t], v_scales[t]);
                for_groups(first_row, rows, s.blocks % 8 == 0 && kKind == KvKind::fp4 ? 3 : kMost,
                           [&](int64_t r, auto n) { this->template values<decltype(n)::value>(r, v[t]); });
            }
        }
        for (int64_t r = 0; r < rows; ++r) {
            float* out = in.out + q_row(r);
            const float* acc = s.acc + r * s.padded;
            const float l = s.l[r];
            for (int64_t i = 0; i < d; ++i) out[i] = (kKind == KvKind::fp4 ? acc[i] * kv.global : acc[i]) / l + 0.0f;
        }
    }

    // Calls f(first, n) for groups of nearly equal size of rows first .. rows, at most `most` (4 or less) a group.
    template <class F>
    HALFBYTE_INLINE static void for_groups(int64_t first, int64_t rows, int64_t most, const F& f) {
        int64_t groups = (rows - first + most - 1) / most;
        while (first < rows) {
            const int64_t n = (rows - first + groups - 1) / groups;
            --groups;
            with_constant<4>(n, [&](auto size) { f(first, size); });
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
