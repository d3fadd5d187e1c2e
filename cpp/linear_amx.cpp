// w4a4 with AMX tiles, for products of at least a few rows: one tile holds 16 rows x 16 outputs of exact block dots.
//
// Per panel and chunk of the inner dimension, the codes are decoded once into signed bytes, which are B tiles as they stand. Per
// block, TDPBSSD makes the int32 dots of all rows; vectors then add them, scaled, in block order: the numbers of the definition.
#define HALFBYTE_ISA isa_amx
#if defined(__AMX_INT8__)
#include "linear_lanes.hpp"

namespace halfbyte {
namespace {

using namespace isa_amx;

constexpr int kTileRows = 16;
constexpr int64_t kChunk = 64;   // 16-input groups decoded at once: 16 KiB
constexpr int kTiles = 4;        // row tiles that share a decoded chunk
constexpr int kFewestRows = 5;   // below, the byte dot products of linear_avx512.cpp are faster

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0-3: dots [rows, 16 int32]. 4, 5: activations [rows, block bytes]. 6, 7: weights [block / 4, 16 x 4 bytes].
void configure(int rows, int64_t block) {
    TileConfig c;
    for (int t = 0; t < 4; ++t) {
        c.rows[t] = static_cast<uint8_t>(rows);
        c.bytes[t] = 64;
    }
    for (int t = 4; t < 6; ++t) {
        c.rows[t] = static_cast<uint8_t>(rows);
        c.bytes[t] = static_cast<uint16_t>(block);
    }
    for (int t = 6; t < 8; ++t) {
        c.rows[t] = static_cast<uint8_t>(block / 4);
        c.bytes[t] = 64;
    }
    _tile_loadconfig(&c);
}

// The dots of one block by tiles C, A and B (literals: the intrinsics of GCC paste them into their instructions).
#define HALFBYTE_BLOCK_DOTS(C, A, B, a, b, dots) \
    do {                                         \
        _tile_loadd(A, a, block);                \
        _tile_loadd(B, b, 64);                   \
        _tile_zero(C);                           \
        _tile_dpbssd(C, A, B);                   \
        _tile_stored(C, dots, 64);               \
    } while (false)

// Rows of one tile, packed for it: per block, 16 x `block` code bytes; per block, 16 scales.
struct TileRows {
    const uint8_t* codes;
    const float* scales;
};

template <Format F, int R>
HALFBYTE_INLINE void add_block(const int32_t* dots, const float* own, const float* scale, __m512* acc) {
    const __m512 s = _mm512_load_ps(scale);
    for (int r = 0; r < R; ++r) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots + r * 16));
        if constexpr (F == Format::nvfp4) {
            acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(dot, _mm512_set1_ps(own[r])), s, acc[r]);  // exact product: at most 20 bits
        } else {
            acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(dot, _mm512_mul_ps(_mm512_set1_ps(own[r]), s)));
        }
    }
}

// Blocks [0, count) of one chunk for one tile of rows; the dots of four blocks are in flight while four others are added.
template <Format F, int R>
void tile_chunk(const TileRows& rows, const int8_t* weights, const float* scales, int64_t count, float* sums) {
    constexpr int block = F == Format::nvfp4 ? 16 : 32;
    alignas(64) int32_t dots[2][4][kTileRows * 16];
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = _mm512_load_ps(sums + r * 16);
    const int64_t fours = count / 4;
    const auto issue = [&](int64_t q) {
        const uint8_t* a = rows.codes + q * 4 * kTileRows * block;
        const int8_t* b = weights + q * 4 * block * kPanel;
        HALFBYTE_BLOCK_DOTS(0, 4, 6, a, b, dots[q & 1][0]);
        HALFBYTE_BLOCK_DOTS(1, 5, 7, a + kTileRows * block, b + block * kPanel, dots[q & 1][1]);
        HALFBYTE_BLOCK_DOTS(2, 4, 6, a + 2 * kTileRows * block, b + 2 * block * kPanel, dots[q & 1][2]);
        HALFBYTE_BLOCK_DOTS(3, 5, 7, a + 3 * kTileRows * block, b + 3 * block * kPanel, dots[q & 1][3]);
    };
    if (fours > 0) issue(0);
    for (int64_t q = 0; q < fours; ++q) {
        if (q + 1 < fours) issue(q + 1);
        for (int i = 0; i < 4; ++i)
            add_block<F, R>(dots[q & 1][i], rows.scales + (q * 4 + i) * kTileRows, scales + (q * 4 + i) * kPanel, acc);
    }
    for (int64_t b = fours * 4; b < count; ++b) {
        HALFBYTE_BLOCK_DOTS(0, 4, 6, rows.codes + b * kTileRows * block, weights + b * block * kPanel, dots[0][0]);
        add_block<F, R>(dots[0][0], rows.scales + b * kTileRows, scales + b * kPanel, acc);
    }
    for (int r = 0; r < R; ++r) _mm512_store_ps(sums + r * 16, acc[r]);
}

template <Format F>
void decode_chunk(const uint8_t* codes, const uint8_t* scale_bytes, int64_t blocks, int8_t* weights, float* scales) {
    constexpr int groups = F == Format::nvfp4 ? 1 : 2;
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t g = 0; g < blocks * groups; ++g) {
        const __m512i u = _mm512_loadu_si512(codes + g * kGroupBytes), v = _mm512_loadu_si512(codes + g * kGroupBytes + 64);
        int8_t* to = weights + g * 256;
        _mm512_store_si512(to, _mm512_shuffle_epi8(table, _mm512_and_si512(u, low)));
        _mm512_store_si512(to + 64, _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(u, 4), low)));
        _mm512_store_si512(to + 128, _mm512_shuffle_epi8(table, _mm512_and_si512(v, low)));
        _mm512_store_si512(to + 192, _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low)));
    }
    for (int64_t b = 0; b < blocks; ++b) store(scales + b * kPanel, block_scale<F>(scale_bytes + b * kPanel));
}

// Up to kTiles * 16 rows [i, end) over panels [first, last).
template <Format F, int R>
void tile_rows(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, int64_t i, int64_t end,
               float* out, int64_t stride) {
    constexpr int64_t block = F == Format::nvfp4 ? 16 : 32, chunk = kChunk * 16 / block;
    const int64_t blocks = w.k / block, tiles = (end - i + kTileRows - 1) / kTileRows;
    const int64_t code_bytes = blocks * kTileRows * block, scale_bytes = blocks * kTileRows * 4;
    const Scratch packed(tiles * (code_bytes + scale_bytes)), decoded(kChunk * (256 + 64)), sums_memory(tiles * kTileRows * 64);
    TileRows rows[kTiles];
    for (int64_t t = 0; t < tiles; ++t) {
        uint8_t* codes = packed.as<uint8_t>(t * (code_bytes + scale_bytes));
        float* scales = packed.as<float>(t * (code_bytes + scale_bytes) + code_bytes);
        for (int64_t r = 0; r < kTileRows; ++r) {
            const bool inside = i + t * kTileRows + r < end;
            const uint8_t* from = inside ? x.data + map.input(i + t * kTileRows + r) * x.stride : nullptr;
            for (int64_t b = 0; b < blocks; ++b) {
                uint8_t* to = codes + (b * kTileRows + r) * block;
                if (inside) {
                    std::memcpy(to, from + b * activation_block_bytes(block), block);
                    std::memcpy(scales + b * kTileRows + r, from + b * activation_block_bytes(block) + block + 4, 4);
                } else {
                    std::memset(to, 0, block);
                    scales[b * kTileRows + r] = 0.0f;
                }
            }
        }
        rows[t] = {codes, scales};
    }
    configure(R, block);
    int8_t* weights = decoded.as<int8_t>();
    float* scales = decoded.as<float>(kChunk * 256);
    float* sums = sums_memory.as<float>();
    for (int64_t p = first; p < last; ++p) {
        std::memset(sums, 0, static_cast<size_t>(tiles) * kTileRows * 64);
        for (int64_t b = 0; b < blocks; b += chunk) {
            const int64_t count = b + chunk < blocks ? chunk : blocks - b;
            decode_chunk<F>(w.codes + (p * blocks + b) * (block / 16) * kGroupBytes, w.scales + (p * blocks + b) * kPanel, count, weights,
                            scales);
            for (int64_t t = 0; t < tiles; ++t)
                tile_chunk<F, R>({rows[t].codes + b * kTileRows * block, rows[t].scales + b * kTileRows}, weights, scales, count,
                                 sums + t * kTileRows * 16);
        }
        const F16 row = load<F16>(w.row_scale + p * kPanel);
        for (int64_t r = i; r < end; ++r) {
            const float global = x.global[map.input(r)];
            finish(w, p, load<F16>(sums + (r - i) * 16) * ((row * global) * 0.25f), out + map.output(r) * stride);
        }
    }
    _tile_release();
}

template <Format F>
void w4a4_format(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    const int64_t whole = map.count / kTileRows * kTileRows, left = map.count - whole;
    for (int64_t i = 0; i < whole; i += kTiles * kTileRows)
        tile_rows<F, 16>(w, first, last, x, map, i, whole < i + kTiles * kTileRows ? whole : i + kTiles * kTileRows, out, stride);
    if (left > 12) {
        tile_rows<F, 16>(w, first, last, x, map, whole, map.count, out, stride);
    } else if (left > 8) {
        tile_rows<F, 12>(w, first, last, x, map, whole, map.count, out, stride);
    } else if (left >= kFewestRows) {
        tile_rows<F, 8>(w, first, last, x, map, whole, map.count, out, stride);
    } else if (left > 0) {
        linear_avx512.w4a4(w, first, last, x, {left, map.in, map.out, map.first + whole}, out, stride);
    }
}

void w4a4(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    if (w.format == Format::nvfp4) {
        w4a4_format<Format::nvfp4>(w, first, last, x, map, out, stride);
    } else {
        w4a4_format<Format::mxfp4>(w, first, last, x, map, out, stride);
    }
}

}  // namespace

const LinearTable linear_amx{w4a4, isa_amx::dense, isa_amx::expand, isa_amx::round_bf16};

}  // namespace halfbyte
#endif
