// Rows of guidance, one a token: parts of a pass stored side by side at the tokens' slots, and codes read out of KV pages.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "attention.hpp"
#include "guide.hpp"
#include "registers.hpp"
#include "threads.hpp"

namespace nb = nanobind;

namespace halfbyte {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// `width` bytes of each token's row from byte `start` on: copied, or the exponents of as many float32 powers of two.
struct Part {
    const uint8_t* source;
    int64_t start, width;
    bool exponents;
};

int64_t token_grain(int64_t bytes) { return std::max<int64_t>(1, (1 << 16) / std::max<int64_t>(1, bytes)); }

void store_parts(uint8_t* rows, int64_t stride, const int64_t* slots, int64_t count, const std::vector<Part>& parts) {
    parallel_for(count, token_grain(stride), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
            uint8_t* row = rows + slots[t] * stride;
            for (const Part& p : parts) {
                if (!p.exponents) {
                    std::memcpy(row + p.start, p.source + t * p.width, static_cast<size_t>(p.width));
                    continue;
                }
                for (int64_t i = 0; i < p.width; ++i) {
                    uint32_t bits;
                    std::memcpy(&bits, p.source + (t * p.width + i) * 4, 4);
                    row[p.start + i] = static_cast<uint8_t>(bits >> 23);
                }
            }
        }
    });
}

// Codes of one key, two a byte. Its lane holds eight a word, in order.
void read_key(const KvPages& kv, int64_t tile, int64_t lane, uint8_t* codes) {
    const uint32_t* words = kv.tile_at<uint32_t>(kv.k, tile) + lane;
    for (int64_t w = 0; w < kv.width / 8; ++w) std::memcpy(codes + 4 * w, words + w * kTile, 4);
}

// Codes of one value: a nibble of 16 neighbouring words for each block of 16.
void read_value(const KvPages& kv, int64_t tile, int64_t lane, uint8_t* codes) {
    const uint32_t* words = kv.tile_at<uint32_t>(kv.v, tile);
    const uint32_t shift = static_cast<uint32_t>(8 * (lane % 4) + lane % 8 / 4 * 4);
    for (int64_t b = 0; b < kv.width / 16; ++b) {
        const uint32_t* word = words + (2 * b + lane / 8) * 16;
        for (int64_t l = 0; l < 8; ++l) {  // two words at once
            uint64_t both;
            std::memcpy(&both, word + 2 * l, 8);
            both = both >> shift & 0x0000000F0000000Fu;
            codes[b * 8 + l] = static_cast<uint8_t>(both | both >> 28);
        }
    }
}

// Codes (as `bits` say) and block scales of the keys or values at `slots`, from byte `start` of each token's row on; false (and
// nothing written) for a slot outside the pages.
bool read_kv(Isa isa, const KvPages& kv, bool keys, const int64_t* slots, int64_t count, int bits, uint8_t* rows, int64_t stride,
             int64_t start) {
    for (int64_t t = 0; t < count; ++t)
        if (slots[t] < 0 || slots[t] >= kv.pages * kv.page_size) return false;
    const GuideTable& guide = guide_table(isa);
    const int64_t bytes = kv.width * bits / 8, blocks = kv.width / 16;
    const uint8_t* scales = keys ? kv.k_scales : kv.v_scales;
    parallel_for(count, token_grain(kv.heads * kv.width), [&](int64_t begin, int64_t end) {
        std::vector<uint8_t> whole(static_cast<size_t>(kv.width / 2));
        for (int64_t t = begin; t < end; ++t) {
            const int64_t page = slots[t] / kv.page_size, offset = slots[t] % kv.page_size, lane = offset % kTile;
            uint8_t *to = rows + t * stride + start, *to_scales = to + kv.heads * bytes;
            for (int64_t h = 0; h < kv.heads; ++h, to += bytes) {
                const int64_t tile = kv.tile_index(page, h, offset / kTile);
                uint8_t* codes = bits == 4 ? to : whole.data();
                if (keys) {
                    read_key(kv, tile, lane, codes);
                } else {
                    read_value(kv, tile, lane, codes);
                }
                if (bits != 4) guide.narrow(codes, kv.width, bits, to);
                for (int64_t b = 0; b < blocks; ++b) *to_scales++ = scales[tile * kv.width + b * kTile + lane];
            }
        }
    });
    return true;
}

}  // namespace

void register_guidance_rows(nb::module_& m) {
    // Sizes and dtypes, and the slots of store_parts, are checked by the Python wrappers. A part is (address, first byte, bytes, whether exponents).
    m.def("store_parts", [](uintptr_t rows, int64_t stride, uintptr_t slots, int64_t count,
                            const std::vector<std::tuple<uintptr_t, int64_t, int64_t, bool>>& told) {
        nb::gil_scoped_release free;
        std::vector<Part> parts;
        parts.reserve(told.size());
        for (const auto& [source, start, width, exponents] : told) parts.push_back({at<const uint8_t>(source), start, width, exponents});
        store_parts(at<uint8_t>(rows), stride, at<const int64_t>(slots), count, parts);
    });
    m.def("read_kv", [](int isa, const KvPages& kv, bool keys, uintptr_t slots, int64_t count, int bits, uintptr_t rows, int64_t stride,
                        int64_t start) {
        nb::gil_scoped_release free;
        return read_kv(usable_isa(isa), kv, keys, at<const int64_t>(slots), count, bits, at<uint8_t>(rows), stride, start);
    });
}

}  // namespace halfbyte
