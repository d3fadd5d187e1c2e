// Paged attention and its pages: the table of one instruction set.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace halfbyte {

enum class KvKind : int { fp32 = 0, bf16 = 1, fp4 = 2 };

constexpr int64_t kTile = 16;  // keys that are processed together

// The page arrays of one layer (layout: halfbyte/kernels/kv.py). Members are always inlined: see dispatch.hpp.
struct KvPages {
    KvKind kind;
    int64_t pages, page_size, heads, width;
    void *k, *v;
    uint8_t *k_scales, *v_scales;
    float global;

    [[gnu::always_inline]] int64_t tiles_per_page() const { return page_size / kTile; }
    [[gnu::always_inline]] int64_t tile_index(int64_t page, int64_t head, int64_t tile) const { return (page * heads + head) * tiles_per_page() + tile; }
    [[gnu::always_inline]] int64_t tile_bytes() const { return kTile * width * (kind == KvKind::fp32 ? 8 : kind == KvKind::bf16 ? 4 : 1) / 2; }
    template <class T>
    [[gnu::always_inline]] T* tile_at(void* array, int64_t index) const {
        return reinterpret_cast<T*>(static_cast<char*>(array) + index * tile_bytes());
    }
};

constexpr int64_t kStrip = 4;  // tiles between two looks at the running maximum: part of the definition
constexpr int64_t kGroup = 4;  // rows (query x head) that share loaded keys and values; twice as many fit a vector

// Working memory (AttentionScratch): queries, their factors, accumulators, m and l of all rows; scores, value weights and factors
// of a group; a strip of values.
constexpr int64_t scratch_floats(int64_t rows, int64_t width) {
    const int64_t padded = (width + 15) / 16 * 16;
    return rows * (3 * padded + 18) + kGroup * (kStrip * (2 * kTile + 2 * padded) + 2 + padded / 8) + kStrip * kTile * padded;
}

struct AttentionInput {
    const float* q;  // [T, heads, width]
    float* out;
    int64_t heads;
    KvPages kv;
    const int32_t* page_table;  // [S, pages_per_sequence]
    int64_t pages_per_sequence;
    float scale;
};

// Queries first .. first + count of one sequence and the heads that share one kv head. The first query sees `visible` keys.
struct AttentionItem {
    int32_t sequence, kv_head;
    int64_t first, count, visible;
};

struct AttentionTable {
    // `rows`: what `scratch` is for, scratch_floats(rows, width) of them; at least the largest count * heads / kv heads of an
    // item. Neighbouring kv heads are processed together as far as they fit.
    void (*attend)(const AttentionInput&, const AttentionItem* items, int64_t count, float* scratch, int64_t rows);
};

extern const AttentionTable attention_generic;
#ifdef HALFBYTE_X86
extern const AttentionTable attention_avx2;
extern const AttentionTable attention_avx512;
#endif

const AttentionTable& attention_table(Isa isa);

// Whether the queries lie in order, contexts fit their pages and every page in use exists.
bool attention_fits(const AttentionInput& in, const int32_t* query_start, const int32_t* context, int64_t queries, int64_t sequences);

// Causal attention of all queries; false (and nothing computed) unless attention_fits.
bool attention(Isa isa, const AttentionInput& in, const int32_t* query_start, const int32_t* context, int64_t queries, int64_t sequences);

// Writes rows k, v [count, heads, width]; false (and nothing written) for NaN, infinity, a repeated slot or one outside the pages.
bool store_rows(Isa isa, const KvPages& kv, const float* k, const float* v, const int64_t* slots, int64_t count);

}  // namespace halfbyte
