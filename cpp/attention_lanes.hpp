// Paged attention of one instruction set: the twin of halfbyte/kernels/reference/attention.py, which has the definition.
//
// Items that differ in their kv head only are processed together, in strips of 64 keys and in each one head after another: their
// tiles lie side by side in a page. A row is one query of one head; rows are taken in groups of up to four, so that
// every loaded key and value serves several: scores of the strip, then its online softmax, then its values. The scores of the
// next group are taken between the softmax and the values of this one, which keeps the processor busy through either's latencies.
#pragma once

#include "attention_dense.hpp"
#include "attention_fp4.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

// A strip and a group of rows.
struct Step {
    Strip strip;
    int64_t first;       // tile
    int64_t head;        // 0: that of the first item
    int64_t row, count;  // rows of that head
    float* p;            // [count, kStripKeys] scores, then weights
};

template <KvKind kKind>
struct Attention {
    static constexpr bool kFp4 = kKind == KvKind::fp4;

    const AttentionInput& in;
    AttentionScratch& s;
    int64_t d = in.kv.width;

    template <int R>
    HALFBYTE_INLINE void score(const Step& step) const {
        const Strip& strip = step.strip;
        const int64_t row = step.head * s.rows + step.row;
        float* p = step.p;
        if constexpr (kFp4) {
            const float *q = s.q + step.head * s.rows * s.blocks * kQueryWords + step.row * kQueryWords, *factor = s.factor + row;
            const int64_t words = s.rows * kQueryWords, blocks = s.blocks;
            const auto tiles = [&](auto n, int64_t t) {
                fp4_scores<R, decltype(n)::value>(q, words, blocks, strip.k + t, strip.k_scales + t, strip.next_k + t, factor,
                                                  p + t * kTile);
            };
            for (int64_t t = 0; t < strip.count; ++t)
                for (int64_t i = 0; i < d; i += 64) fetch(strip.next_k_scales[t], i), fetch(strip.next_v_scales[t], i);
            int64_t t = 0;
#if defined(__AVX512F__)
            if constexpr (R != 3)
                for (; t + 2 <= strip.count; t += 2) tiles(std::integral_constant<int, 2>{}, t);
#endif
            for (; t < strip.count; ++t) tiles(std::integral_constant<int, 1>{}, t);
        } else {
#if defined(__AVX512F__)
            constexpr int kTogether = R <= 2 ? 4 : 2;
#else
            constexpr int kTogether = 1;  // few registers
#endif
            const float* q = s.q + row * s.padded;
            int64_t t = 0;
            for (; t + kTogether <= strip.count; t += kTogether)
                dense_scores<R, kTogether, kKind>(q, s.padded, d, strip.k + t, strip.next_k + t, in.scale, p + t * kTile);
            if constexpr (kTogether > 1)
                for (; t < strip.count; ++t)
                    dense_scores<R, 1, kKind>(q, s.padded, d, strip.k + t, strip.next_k + t, in.scale, p + t * kTile);
        }
    }

    // Turns scores into weights and updates m and l; a row sees its first `visible(row)` keys of the strip.
    template <int R, class Visible>
    HALFBYTE_INLINE void softmax(const Step& step, const Visible& visible) {
        const Strip& strip = step.strip;
        const int64_t row = step.head * s.rows + step.row;
        const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        alignas(64) float change[16] = {}, base[R];
        for (int r = 0; r < R; ++r) {
            float* p = step.p + r * kStripKeys;
            const int64_t seen = visible(step.row + r);
            for (int64_t t = seen / kTile; t < strip.count; ++t)
                store(p + t * kTile, select(lane < static_cast<int32_t>(seen - t * kTile), load<F16>(p + t * kTile), splat(-__builtin_inff())));
            F16 all = load<F16>(p);
            for (int64_t t = 1; t < strip.count; ++t) all = larger(all, load<F16>(p + t * kTile));
            const float top = largest(all), m = s.m[row + r], high = top > m ? top : m;
            s.m[row + r] = high;
            change[r] = m - high;
            change[kGroup + r] = top - high;
            base[r] = kFp4 ? top : high;
        }
        const F16 factors = exp(load<F16>(change));
        for (int r = 0; r < R; ++r) {
            s.alpha[r] = factors[r];
            s.gain[r] = factors[kGroup + r];
            float* p = step.p + r * kStripKeys;
            F16 sum = {};
            for (int64_t t = 0; t < strip.count; ++t) {
                const F16 x = load<F16>(p + t * kTile) - base[r];
                const F16 e = kFp4 ? exp_negative(x) : exp(x);
                store(p + t * kTile, e);
                sum = t == 0 ? e : sum + e;
            }
            float* l = s.l + (row + r) * 16;
            store(l, load<F16>(l) * s.alpha[r] + (kFp4 ? sum * s.gain[r] : sum));
        }
    }

    // Weights of FP4 values, as integers, and what brings their sums back.
    template <int R, class Visible>
    HALFBYTE_INLINE void weigh(const Step& step, const Visible& visible) {
        const Strip& strip = step.strip;
        int64_t before = -1;
        bool same = true;  // all rows see the same keys
        for (int r = 0; r < R; ++r) {
            const int64_t seen = least(visible(step.row + r), strip.count * kTile);
            float *up = s.up + r * s.blocks, *down = s.down + r * s.blocks;
            if (seen == before) {
                std::memcpy(up, up - s.blocks, size_t(s.blocks) * sizeof(float));
                std::memcpy(down, down - s.blocks, size_t(s.blocks) * sizeof(float));
                continue;
            }
            same = before < 0;
            before = seen;
            largest_exponents(strip, s.blocks, seen, reinterpret_cast<int32_t*>(up));
            for (int64_t b = 0; b < s.blocks; ++b) {
                const int32_t e = bits<int32_t>(up[b]);
                up[b] = power_of_two(38 - e);  // for scales times 2^-8
                down[b] = power_of_two(e - 31);
            }
        }
        const float *rows = step.p, *up = s.up;
        float* out = s.weights;
        const int64_t blocks = s.blocks;
        for (int64_t t = 0; t < strip.count; ++t) {
            F16 p[R];
            for (int r = 0; r < R; ++r) p[r] = load<F16>(rows + r * kStripKeys + t * kTile);
            for (int64_t b = 0; b < blocks; ++b, out += kGroup * kWeightWords) {
                const F16 scale = small_scales(strip.v_scales[t] + b * kTile);
                const F16 first = scale * broadcast(up[b]);
                for (int r = 0; r < R; ++r)
                    store_weights(out + r * kWeightWords, p[r] * (same ? first : scale * broadcast(up[r * blocks + b])));
            }
        }
    }

    template <int R, class Visible>
    HALFBYTE_INLINE void values(const Step& step, const Visible& visible) {
        const Strip& strip = step.strip;
        float* acc = s.acc + (step.head * s.rows + step.row) * s.padded;
        if constexpr (kFp4) {
            weigh<R>(step, visible);
            for (int64_t b = 0; b < s.blocks; ++b) {
                F16 dot[R];
                fp4_values<R>(strip, s.blocks, b, s.weights, dot);
                for (int r = 0; r < R; ++r) {
                    float* a = acc + r * s.padded + b * 16;
                    store(a, load<F16>(a) * s.alpha[r] + dot[r] * (s.gain[r] * s.down[r * s.blocks + b]));
                }
            }
        } else if (s.padded == d) {
            dense<R, kKind>(strip.v, strip.next_v, strip.count, d, step.p, acc);
        } else {
            const void* wide[kStrip];
            for (int64_t t = 0; t < strip.count; ++t) {
                wide[t] = s.staged + t * kTile * s.padded;
                widen_values<kKind>(strip.v[t], d, s.padded, s.staged + t * kTile * s.padded);
            }
            dense<R, KvKind::fp32>(wide, wide, strip.count, s.padded, step.p, acc);
        }
    }

    template <int R, KvKind kStored>
    HALFBYTE_INLINE void dense(const void* const* v, const void* const* next, int64_t count, int64_t stride, const float* p,
                               float* acc) {
        for (int64_t c = 0; c < s.blocks; c += 4)
            with_constant<4>(least(4, s.blocks - c), [&](auto vectors) {
                dense_values<R, decltype(vectors)::value, kStored>(v, next, count, stride, c * 16, p, s.alpha, acc, s.padded);
            });
    }

    // Makes the strip that was next the present one, and looks up the one after it: `first` and `head` are its place.
    void advance(const AttentionItem& it, int64_t first, int64_t head, int64_t tiles, Strip& strip) const {
        const KvPages& kv = in.kv;
        const int32_t* pages = in.page_table + it.sequence * in.pages_per_sequence;
        std::memcpy(strip.k, strip.next_k, sizeof strip.k);
        std::memcpy(strip.v, strip.next_v, sizeof strip.v);
        std::memcpy(strip.k_scales, strip.next_k_scales, sizeof strip.k_scales);
        std::memcpy(strip.v_scales, strip.next_v_scales, sizeof strip.v_scales);
        for (int64_t t = 0; t < kStrip; ++t) {
            const int64_t tile = least(first + t, tiles - 1), page = tile / kv.tiles_per_page();
            const int64_t index = kv.tile_index(pages[page], it.kv_head + head, tile - page * kv.tiles_per_page());
            strip.next_k[t] = kv.template tile_at<const void>(kv.k, index);
            strip.next_v[t] = kv.template tile_at<const void>(kv.v, index);
            strip.next_k_scales[t] = kFp4 ? kv.k_scales + index * d : nullptr;
            strip.next_v_scales[t] = kFp4 ? kv.v_scales + index * d : nullptr;
        }
    }

    void start(int64_t head, int64_t r, const float* q) {
        const int64_t row = head * s.rows + r;
        if constexpr (kFp4) {
            float* out = s.q + (head * s.rows * s.blocks + r) * kQueryWords;
            const float unit = split_query(q, d, s.rows * kQueryWords, out);
            const float factor = ((in.kv.global * in.scale) * unit) * 128.0f;  // doubled grid, scales times 2^-8
            s.factor[row] = factor * 0.0f == 0.0f ? factor : __builtin_nanf("");
        } else {
            std::memcpy(s.q + row * s.padded, q, size_t(d) * sizeof(float));
        }
        s.m[row] = -__builtin_inff();
        std::memset(s.l + row * 16, 0, 16 * sizeof(float));
        std::memset(s.acc + row * s.padded, 0, size_t(s.padded) * sizeof(float));
    }

    void finish(int64_t row, float* out) {
        if (kFp4 && s.factor[row] != s.factor[row]) {
            for (int64_t i = 0; i < d; ++i) out[i] = s.factor[row];
            return;
        }
        const float *acc = s.acc + row * s.padded, *lanes = s.l + row * 16;
        float l[16];
        std::memcpy(l, lanes, sizeof l);
        for (int half = 8; half; half /= 2)
            for (int i = 0; i < half; ++i) l[i] += l[i + half];
        for (int64_t i = 0; i < d; ++i) out[i] = (kFp4 ? acc[i] * in.kv.global : acc[i]) / l[0] + 0.0f;
    }

    // Attends for `heads` items, the first of which is `it`.
    void items(const AttentionItem& it, int64_t heads) {
        const int64_t group = in.heads / in.kv.heads, rows = s.rows;
        const auto each_row = [&](const auto& f) {
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t r = 0; r < rows; ++r)
                    f(h, r, ((it.first + r / group) * in.heads + (it.kv_head + h) * group + r % group) * d);
        };
        each_row([&](int64_t h, int64_t r, int64_t at) { start(h, r, in.q + at); });
        const int64_t tiles = (it.visible + it.count - 1 + kTile - 1) / kTile;
        // The group of rows after `now`; false when there is none. Rows are ordered by what they see: the first ones may see
        // nothing of a strip.
        const auto follow = [&](const Step& now, Step& then) {
            then.strip = now.strip;
            then.first = now.first;
            then.head = now.head;
            then.row = now.row + now.count;
            if (then.row == rows) {
                if (++then.head == heads) {
                    then.head = 0;
                    then.first += kStrip;
                }
                if (then.first >= tiles) return false;
                const bool last = then.head + 1 == heads;
                advance(it, then.first + (last ? kStrip : 0), last ? 0 : then.head + 1, tiles, then.strip);
                then.strip.count = least(kStrip, tiles - then.first);
                const int64_t unseen = then.first * kTile + 1 - it.visible;
                then.row = unseen > 0 ? unseen * group : 0;
            }
            const int64_t left = rows - then.row, groups = (left + kGroup - 1) / kGroup;
            then.count = (left + groups - 1) / groups;
            with_constant<kGroup>(then.count, [&](auto n) { score<decltype(n)::value>(then); });
            return true;
        };
        Step steps[2]{};
        steps[0].p = s.p;
        steps[1].p = s.p + kGroup * kStripKeys;
        steps[0].head = heads - 1;  // the step before the first one
        steps[0].first = -kStrip;
        steps[0].row = rows;
        advance(it, 0, 0, tiles, steps[0].strip);
        follow(steps[0], steps[1]);
        for (int now = 1, more = 1; more; now ^= 1) {
            const Step& step = steps[now];
            const auto visible = [&](int64_t row) { return it.visible + row / group - step.first * kTile; };
            with_constant<kGroup>(step.count, [&](auto n) { softmax<decltype(n)::value>(step, visible); });
            more = follow(step, steps[now ^ 1]);
            with_constant<kGroup>(step.count, [&](auto n) { values<decltype(n)::value>(step, visible); });
        }
        each_row([&](int64_t h, int64_t r, int64_t at) { finish(h * rows + r, in.out + at); });
    }
};

inline void attend(const AttentionInput& in, const AttentionItem* items, int64_t count, float* memory, int64_t rows) {
    const int64_t group = in.heads / in.kv.heads;
    for (int64_t i = 0, n; i < count; i += n) {
        const AttentionItem& it = items[i];
        const int64_t own = it.count * group;
        n = 1;
        while (i + n < count && (n + 1) * own <= rows && items[i + n].first == it.first && items[i + n].kv_head == it.kv_head + n) ++n;
        AttentionScratch scratch(memory, own, n, in.kv.width);
        switch (in.kv.kind) {
            case KvKind::fp32: Attention<KvKind::fp32>{in, scratch}.items(it, n); break;
            case KvKind::bf16: Attention<KvKind::bf16>{in, scratch}.items(it, n); break;
            case KvKind::fp4: Attention<KvKind::fp4>{in, scratch}.items(it, n); break;
        }
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
