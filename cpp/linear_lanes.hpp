// The products written over sixteen-lane vectors, for every instruction set (w4a4: for those without a byte dot product).
#pragma once

#include "linear.hpp"
#include "scalar.hpp"
#include "wide.hpp"

namespace halfbyte {
namespace HALFBYTE_ISA {

// Rows and panels computed side by side: as many accumulators as registers allow.
#if defined(__AVX512F__)
constexpr int kRows = 4;
constexpr int panels_beside(int rows) { return rows == 1 ? 8 : 4; }
#elif defined(__AVX2__)
constexpr int kRows = 2;
constexpr int panels_beside(int rows) { return rows == 2 ? 2 : 4; }
#else
constexpr int kRows = 2;
constexpr int panels_beside(int rows) { return rows == 2 ? 1 : 2; }
#endif
constexpr int64_t kRowBlock = 64;  // rows that share one pass over a panel, so that they stay in the cache

HALFBYTE_INLINE void finish(const Panels& w, int64_t panel, WF y, float* row) {
    if (w.bias != nullptr) y = y + wide(w.bias + panel * kPanel);
    const int64_t left = w.n - panel * kPanel;
    std::memcpy(row + panel * kPanel, &y, left >= kPanel ? 64 : static_cast<size_t>(left) * 4);
}

template <int R, int P>
void bf16_tile(const Panels& w, int64_t panel, const float* const* x, float* const* out) {
    const uint8_t* base = static_cast<const uint8_t*>(w.dense) + panel * w.dense_panel_bytes();
    const int64_t apart = w.dense_panel_bytes();
    WF acc[R][P] = {};
    for (int64_t k = 0; k + 1 < w.k; k += 2) {
        WF even[P], odd[P];
        HALFBYTE_UNROLL
        for (int p = 0; p < P; ++p) {
            __builtin_prefetch(base + p * apart + k * 32 + 2048);
            even[p] = first_bf16(base + p * apart + k * 32);
            odd[p] = second_bf16(base + p * apart + k * 32);
        }
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) {
            HALFBYTE_UNROLL
            for (int p = 0; p < P; ++p) acc[r][p] = fused(x[r][k], even[p], acc[r][p]);
            HALFBYTE_UNROLL
            for (int p = 0; p < P; ++p) acc[r][p] = fused(x[r][k + 1], odd[p], acc[r][p]);
        }
    }
    HALFBYTE_UNROLL
    for (int p = 0; p < P; ++p) {
        const WF last = first_bf16(base + p * apart + (w.k - 1) / 2 * 64);  // of an odd k; else not used
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) finish(w, panel + p, w.k % 2 == 0 ? acc[r][p] : fused(x[r][w.k - 1], last, acc[r][p]), out[r]);
    }
}

typedef double RD __attribute__((vector_size(kRegisterBytes)));
typedef float HalfRF __attribute__((vector_size(kRegisterBytes / 2)));
constexpr int kDoubles = 2 * kRegisters;

HALFBYTE_INLINE RD fused(const RD& a, const RD& b, const RD& c) {
#if defined(__AVX512F__)
    return (RD)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
    return (RD)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

// The product of two floats is exact in double, so a fused multiply-add is the definition's multiply and add.
template <int R, int P>
void fp32_tile(const Panels& w, int64_t panel, const float* const* x, float* const* out) {
    constexpr int lanes = kRegisterBytes / 8;
    const float* base = static_cast<const float*>(w.dense) + panel * w.k * kPanel;
    const int64_t apart = w.k * kPanel;
    RD acc[P][R][kDoubles] = {};
    for (int64_t k = 0; k < w.k; ++k) {
        HALFBYTE_UNROLL
        for (int p = 0; p < P; ++p) {
            HALFBYTE_UNROLL
            for (int i = 0; i < kDoubles; ++i) {
                const RD v = __builtin_convertvector(load<HalfRF>(base + p * apart + k * kPanel + i * lanes), RD);
                HALFBYTE_UNROLL
                for (int r = 0; r < R; ++r) acc[p][r][i] = fused(static_cast<double>(x[r][k]) - RD{}, v, acc[p][r][i]);
            }
        }
    }
    HALFBYTE_UNROLL
    for (int p = 0; p < P; ++p) {
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) {
            float y[16];
            HALFBYTE_UNROLL
            for (int i = 0; i < kDoubles; ++i) store(y + i * lanes, __builtin_convertvector(acc[p][r][i], HalfRF));
            finish(w, panel + p, wide(y), out[r]);
        }
    }
}

template <Format F>
HALFBYTE_INLINE WF block_scale(const uint8_t* p) {
    return F == Format::nvfp4 ? e4m3(p) : e8m0(p);
}

template <Format F, int R, int P>
void w4a16_tile(const Panels& w, int64_t panel, const float* const* x, float* const* out) {
    constexpr int64_t block = F == Format::nvfp4 ? 16 : 32;
    const uint8_t* codes = w.codes + panel * (w.k / 16) * kGroupBytes;
    const uint8_t* scales = w.scales + panel * (w.k / block) * kPanel;
    const int64_t codes_apart = w.k / 16 * kGroupBytes, scales_apart = w.k / block * kPanel;
    WF acc[R][P] = {};
    for (int64_t k = 0; k < w.k; k += 16) {
        WF scale[P];
        HALFBYTE_UNROLL
        for (int p = 0; p < P; ++p) scale[p] = block_scale<F>(scales + p * scales_apart + k / block * kPanel);
        for (int j = 0; j < 16; ++j) {
            const int run = j / 8, shift = 8 * (j % 4) + 4 * (j / 4 % 2);
            HALFBYTE_UNROLL
            for (int p = 0; p < P; ++p) {
                const WF v = e2m1(codes + p * codes_apart + k * 8 + run * 64, static_cast<uint32_t>(shift)) * scale[p];
                HALFBYTE_UNROLL
                for (int r = 0; r < R; ++r) acc[r][p] = fused(x[r][k + j], v, acc[r][p]);
            }
        }
    }
    HALFBYTE_UNROLL
    for (int p = 0; p < P; ++p) {
        const WF row = wide(w.row_scale + (panel + p) * kPanel);
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) finish(w, panel + p, acc[r][p] * row, out[r]);
    }
}

template <Kind K, int R, int P>
HALFBYTE_INLINE void dense_tile(const Panels& w, int64_t panel, const float* const* x, float* const* out) {
    if constexpr (K == Kind::fp32) {
        // Doubles take twice the registers.
        constexpr int Q = R * P <= 4 ? P : R >= 4 ? 1 : 4 / R;
        for (int p = 0; p < P; p += Q) fp32_tile<R, Q>(w, panel + p, x, out);
    } else if constexpr (K == Kind::bf16) {
        bf16_tile<R, P>(w, panel, x, out);
    } else if (w.format == Format::nvfp4) {
        w4a16_tile<Format::nvfp4, R, P>(w, panel, x, out);
    } else {
        w4a16_tile<Format::mxfp4, R, P>(w, panel, x, out);
    }
}

// Rows [i, end) in tiles of R, R/2, ... 1 rows, over panels [first, last).
template <Kind K, int R>
void dense_rows(const Panels& w, int64_t first, int64_t last, const float* x, const RowMap& map, int64_t i, int64_t end, float* out,
                int64_t stride) {
    constexpr int P = panels_beside(R);
    const float* in[R];
    float* to[R];
    for (; i + R <= end; i += R) {
        for (int r = 0; r < R; ++r) {
            in[r] = x + map.input(i + r) * w.k;
            to[r] = out + map.output(i + r) * stride;
        }
        int64_t p = first;
        for (; p + P <= last; p += P) dense_tile<K, R, P>(w, p, in, to);
        for (; p < last; ++p) dense_tile<K, R, 1>(w, p, in, to);
    }
    if constexpr (R > 1) {
        if (i < end) dense_rows<K, R / 2>(w, first, last, x, map, i, end, out, stride);
    }
}

template <Kind K>
void dense_kind(const Panels& w, int64_t first, int64_t last, const float* x, const RowMap& map, float* out, int64_t stride) {
    constexpr int64_t step = 8;  // panels that stay in the cache while the rows pass
    for (int64_t i = 0; i < map.count; i += kRowBlock) {
        const int64_t end = i + kRowBlock < map.count ? i + kRowBlock : map.count;
        for (int64_t p = first; p < last; p += step)
            dense_rows<K, kRows>(w, p, p + step < last ? p + step : last, x, map, i, end, out, stride);
    }
}

inline void dense(const Panels& w, int64_t first, int64_t last, const float* x, const RowMap& map, float* out, int64_t stride) {
    switch (w.kind) {
        case Kind::fp32: return dense_kind<Kind::fp32>(w, first, last, x, map, out, stride);
        case Kind::bf16: return dense_kind<Kind::bf16>(w, first, last, x, map, out, stride);
        default: return dense_kind<Kind::w4a16>(w, first, last, x, map, out, stride);
    }
}

// w4a4 by float lanes: the doubled values and their block sums are small integers, so float arithmetic on them is exact.
template <Format F, int R>
void w4a4_lanes_tile(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
    constexpr int64_t block = F == Format::nvfp4 ? 16 : 32;
    const uint8_t* codes = w.codes + panel * (w.k / 16) * kGroupBytes;
    const uint8_t* scales = w.scales + panel * (w.k / block) * kPanel;
    WF acc[R] = {};
    for (int64_t b = 0; b < w.k / block; ++b) {
        const int64_t at = b * activation_block_bytes(block);
        WF dot[R] = {};
        for (int64_t j = 0; j < block; ++j) {
            const int64_t run = j / 8, shift = 8 * (j % 4) + 4 * (j / 4 % 2);
            const WF v = e2m1(codes + b * (block / 16) * kGroupBytes + run * 64, static_cast<uint32_t>(shift)) * 2.0f;
            HALFBYTE_UNROLL
            for (int r = 0; r < R; ++r) dot[r] = fused(static_cast<float>(static_cast<int8_t>(a[r][at + j])), v, dot[r]);
        }
        const WF scale = block_scale<F>(scales + b * kPanel);
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) {
            float own;
            std::memcpy(&own, a[r] + at + block + 4, 4);
            acc[r] = acc[r] + dot[r] * (scale * own);
        }
    }
    const WF row = wide(w.row_scale + panel * kPanel);
    HALFBYTE_UNROLL
    for (int r = 0; r < R; ++r) finish(w, panel, acc[r] * ((row * global[r]) * 0.25f), out[r]);
}

// Calls Tile::run<R> for tiles of R rows and once for the rows that are left.
template <class Tile, int R>
HALFBYTE_INLINE void w4a4_rows(const Panels& w, int64_t panel, const ActivationRows& x, const RowMap& map, int64_t i, int64_t end,
                               float* out, int64_t stride) {
    const uint8_t* in[R];
    float* to[R];
    float global[R];
    for (; i + R <= end; i += R) {
        for (int r = 0; r < R; ++r) {
            const int64_t row = map.input(i + r);
            in[r] = x.data + row * x.stride;
            global[r] = x.global[row];
            to[r] = out + map.output(i + r) * stride;
        }
        Tile::template run<R>(w, panel, in, global, to);
    }
    if constexpr (R > 1) {
        if (i < end) w4a4_rows<Tile, R - 1>(w, panel, x, map, i, end, out, stride);
    }
}

template <class Tile, int R>
void w4a4_panels(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    for (int64_t i = 0; i < map.count; i += kRowBlock) {
        const int64_t end = i + kRowBlock < map.count ? i + kRowBlock : map.count;
        for (int64_t p = first; p < last; ++p) w4a4_rows<Tile, R>(w, p, x, map, i, end, out, stride);
    }
}

template <Format F>
struct LanesTile {
    template <int R>
    static void run(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
        w4a4_lanes_tile<F, R>(w, panel, a, global, out);
    }
};

inline void w4a4_lanes(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out,
                       int64_t stride) {
    if (w.format == Format::nvfp4) {
        w4a4_panels<LanesTile<Format::nvfp4>, 2>(w, first, last, x, map, out, stride);
    } else {
        w4a4_panels<LanesTile<Format::mxfp4>, 2>(w, first, last, x, map, out, stride);
    }
}

// What follows the codes of a block: start and scale.
struct PlainBlock {
    static HALFBYTE_INLINE void finish(Format, int32_t start, float scale, uint8_t* out) {
        std::memcpy(out, &start, 4);
        std::memcpy(out + 4, &scale, 4);
    }
};

template <class Block>
void expand(Format format, const uint8_t* codes, const uint8_t* scales, int64_t k, uint8_t* out) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int64_t block = format == Format::nvfp4 ? 16 : 32;
    for (int64_t b = 0; b < k / block; ++b) {
        int32_t sum = 0;
#if defined(__AVX2__)
        const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(doubled)), low = _mm_set1_epi8(15);
        for (int64_t j = 0; j < block; j += 16) {
            const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + (b * block + j) / 2));
            const __m128i nibbles = _mm_unpacklo_epi8(_mm_and_si128(packed, low), _mm_and_si128(_mm_srli_epi16(packed, 4), low));
            const __m128i values = _mm_shuffle_epi8(table, nibbles);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), values);
            const __m128i sums = _mm_sad_epu8(_mm_add_epi8(values, _mm_set1_epi8(12)), _mm_setzero_si128());
            sum += _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 12;
        }
#else
        for (int64_t j = 0; j < block; ++j) {
            const uint8_t byte = codes[(b * block + j) / 2];
            const int8_t v = doubled[j % 2 ? byte >> 4 : byte & 15];
            out[j] = static_cast<uint8_t>(v);
            sum += v;
        }
#endif
        const float scale = format == Format::nvfp4 ? scalar::decode_e4m3(scales[b]) : scalar::decode_e8m0(scales[b]);
        Block::finish(format, -12 * sum, scale, out + block);
        out += activation_block_bytes(block);
    }
}

inline void round_bf16(const float* x, int64_t count, float* out) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(out + i, round_bf16_bits(load<U16>(x + i)) << 16);
    for (; i < count; ++i) {
        const uint32_t b = scalar::float_bits(x[i]);
        out[i] = scalar::from_bits((b + 0x7FFFu + ((b >> 16) & 1u)) & 0xFFFF0000u);
    }
}

}  // namespace HALFBYTE_ISA
}  // namespace halfbyte
