// Writing keys and values into pages.
#include <algorithm>
#include <atomic>
#include <vector>

#include "attention.hpp"
#include "quantise.hpp"
#include "scalar.hpp"
#include "threads.hpp"

namespace halfbyte {
namespace {

bool all_distinct(const int64_t* slots, int64_t count) {
    if (std::adjacent_find(slots, slots + count, std::greater_equal<>()) == slots + count) return true;  // rising: the usual case
    std::vector<int64_t> sorted(slots, slots + count);
    std::sort(sorted.begin(), sorted.end());
    return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

uint16_t round_bf16(float x) {
    const uint32_t b = scalar::float_bits(x);
    return static_cast<uint16_t>((b + 0x7FFFu + ((b >> 16) & 1u)) >> 16);
}

struct Place {
    int64_t tile, lane;
};

// Strides of one token's elements inside a tile: keys lie across lanes, values in rows.
void store_dense(const KvPages& kv, void* array, bool keys, Place at, const float* x) {
    const int64_t first = keys ? at.lane : at.lane * kv.width, step = keys ? kTile : 1;
    if (kv.kind == KvKind::fp32) {
        float* out = kv.tile_at<float>(array, at.tile) + first;
        for (int64_t i = 0; i < kv.width; ++i) out[i * step] = x[i];
    } else {
        uint16_t* out = kv.tile_at<uint16_t>(array, at.tile) + first;
        for (int64_t i = 0; i < kv.width; ++i) out[i * step] = round_bf16(x[i]);
    }
}

void store_keys(const KvPages& kv, Place at, const uint8_t* codes, const uint8_t* scales) {
    uint32_t* words = kv.tile_at<uint32_t>(kv.k, at.tile) + at.lane;
    for (int64_t w = 0; w < kv.width / 8; ++w) std::memcpy(words + w * kTile, codes + 4 * w, 4);
    for (int64_t b = 0; b < kv.width / 16; ++b) kv.k_scales[at.tile * kv.width + b * kTile + at.lane] = scales[b];
}

void store_values(const KvPages& kv, Place at, const uint8_t* codes, const uint8_t* scales) {
    uint32_t* words = kv.tile_at<uint32_t>(kv.v, at.tile);
    const uint32_t shift = static_cast<uint32_t>(8 * (at.lane % 4) + at.lane % 8 / 4 * 4), clear = ~(15u << shift);
    for (int64_t b = 0; b < kv.width / 16; ++b) {
        uint32_t* word = words + (2 * b + at.lane / 8) * 16;
        for (int64_t l = 0; l < 16; ++l) {
            const uint32_t code = (codes[b * 8 + l / 2] >> (4 * (l % 2))) & 15u;
            word[l] = (word[l] & clear) | (code << shift);
        }
        kv.v_scales[at.tile * kv.width + b * kTile + at.lane] = scales[b];
    }
}

}  // namespace

bool store_rows(Isa isa, const KvPages& kv, const float* k, const float* v, const int64_t* slots, int64_t count) {
    const QuantiseTable& table = quantise_table(isa);
    const int64_t row = kv.heads * kv.width, grain = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, row));
    for (int64_t i = 0; i < count; ++i)
        if (slots[i] < 0 || slots[i] >= kv.pages * kv.page_size) return false;
    if (!all_distinct(slots, count)) return false;
    std::atomic<bool> finite{true};
    parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        for (const float* x : {k, v})
            if (table.amax_bits(x + begin * row, false, (end - begin) * row) >= 0x7F800000u) finite = false;
    });
    if (!finite) return false;
    // Split over heads: values of neighbouring tokens share words.
    parallel_for(kv.heads, std::max<int64_t>(1, grain * kv.heads / std::max<int64_t>(1, count)), [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> codes(size_t(kv.width / 2)), scales(size_t(kv.width / 16));
        for (int64_t i = 0; i < count; ++i) {
            const int64_t page = slots[i] / kv.page_size, offset = slots[i] % kv.page_size;
            for (int64_t h = begin; h < end; ++h) {
                const Place at{kv.tile_index(page, h, offset / kTile), offset % kTile};
                const float *key = k + (i * kv.heads + h) * kv.width, *value = v + (i * kv.heads + h) * kv.width;
                if (kv.kind != KvKind::fp4) {
                    store_dense(kv, kv.k, true, at, key);
                    store_dense(kv, kv.v, false, at, value);
                    continue;
                }
                table.row(key, false, kv.width, kv.global, codes.data(), scales.data());
                store_keys(kv, at, codes.data(), scales.data());
                table.row(value, false, kv.width, kv.global, codes.data(), scales.data());
                store_values(kv, at, codes.data(), scales.data());
            }
        }
    });
    return true;
}

}  // namespace halfbyte
