// What the kernels of paged attention share: strips of keys, working memory, conversions.
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

HALFBYTE_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// One number in all lanes, straight from memory (splat() adds it to zero first).
HALFBYTE_INLINE F16 broadcast(const float& x) { return F16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

HALFBYTE_INLINE float largest(const F16& v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(bits<__m512>(v));
#else
    float top = v[0];
    for (int j = 1; j < 16; ++j) top = v[j] > top ? v[j] : top;
    return top;
#endif
}

HALFBYTE_INLINE F16 larger(const F16& a, const F16& b) {
#if defined(__AVX512F__)
    return bits<F16>(_mm512_max_ps(bits<__m512>(a), bits<__m512>(b)));
#else
    return select(a > b, a, b);
#endif
}

// One strip of one kv head, and where the next one lies (its own tiles where there is none): those are fetched ahead, because
// tiles of a sequence lie apart in memory, which hardware prefetchers do not follow.
struct Strip {
    int64_t count;  // tiles
    const void *k[kStrip], *v[kStrip];
    const uint8_t *k_scales[kStrip], *v_scales[kStrip];
    const void *next_k[kStrip], *next_v[kStrip];
    const uint8_t *next_k_scales[kStrip], *next_v_scales[kStrip];
};

HALFBYTE_INLINE void fetch(const void* p, int64_t bytes) { __builtin_prefetch(static_cast<const char*>(p) + bytes, 0, 3); }

// Working memory of one item, cut from one buffer that serves all items of a thread. `weights`, `alpha`, `gain`, `up`
// and `down` belong to one group of rows, `p` to two.
struct AttentionScratch {
    int64_t rows, padded, blocks;  // rows of a head
    float *q, *factor, *acc, *m, *l, *p, *weights, *alpha, *gain, *up, *down, *staged;

    AttentionScratch(float* memory, int64_t own, int64_t heads, int64_t d)
        : rows(own), padded((d + 15) / 16 * 16), blocks(padded / 16) {
        const int64_t all = own * heads;
        const auto take = [&memory](int64_t count) { return (memory += count) - count; };
        q = take(all * 2 * padded);
        factor = take(all);
        acc = take(all * padded);
        m = take(all);
        l = take(all * 16);
        p = take(2 * kGroup * kStripKeys);
        weights = take(kGroup * kStrip * 2 * padded);
        alpha = take(kGroup);
        gain = take(kGroup);
        up = take(kGroup * blocks);
        down = take(kGroup * blocks);
        staged = take(kStripKeys * padded);
    }
};

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
