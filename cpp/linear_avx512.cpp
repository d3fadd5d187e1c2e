#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512VNNI__)
#include "linear_lanes.hpp"

namespace halfbyte {
namespace {

using namespace isa_avx512;

// w4a4 with vpdpbusd. Weight codes have 12 added, so that they are unsigned; the integer sum starts at -12 times the sum of the
// activation codes and ends at the exact dot product d.
//
// NVFP4 saves the conversion to float: the sum starts at the bits of kMagic = 1.5 * 2^23 as well, so that its bits, read as a
// float, are kMagic + d. One fused multiply-add by the activation's scale s and -kMagic * s leaves d * s, which is exact; a
// second one multiplies by the weight's scale (exact again) and adds to the accumulator, the one rounding of the definition.
// Weight scales are used as halves, 2^-8 of E4M3, so s has 2^8 in it.
constexpr float kMagic = 12582912.0f;

struct MagicBlock {
    static HALFBYTE_INLINE void finish(Format format, int32_t start, float scale, uint8_t* out) {
        if (format == Format::nvfp4) {
            start += static_cast<int32_t>(scalar::float_bits(kMagic));
            scale *= 256.0f;
        }
        const float back = -kMagic * scale;
        std::memcpy(out, &start, 4);
        std::memcpy(out + 4, &scale, 4);
        std::memcpy(out + 8, &back, 4);
    }
};

template <class T>
HALFBYTE_INLINE T word(const uint8_t* p) {
    T v;
    std::memcpy(&v, p, 4);
    return v;
}

// The four operands (inputs 0-3, 4-7, 8-11, 12-15 of every output) of one group of codes, 12 added.
HALFBYTE_INLINE void decode_group(const uint8_t* codes, __m512i* operand) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i u = _mm512_loadu_si512(codes), v = _mm512_loadu_si512(codes + 64);
    operand[0] = _mm512_shuffle_epi8(table, _mm512_and_si512(u, low));
    operand[1] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(u, 4), low));
    operand[2] = _mm512_shuffle_epi8(table, _mm512_and_si512(v, low));
    operand[3] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
}

// Scales of one block: NVFP4 as halves (2^-8 of the value), MXFP4 as they are.
template <Format F>
HALFBYTE_INLINE __m512 decode_scale(const uint8_t* bytes) {
    if constexpr (F == Format::nvfp4) {
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(b), 7));
    } else {
        return bits<__m512>(decode_e8m0(bytes));
    }
}

// Adds one block of R rows; `operand` has 4 vectors for each 16 inputs.
template <Format F, int R>
HALFBYTE_INLINE void add_block(const __m512i* operand, __m512 scale, const uint8_t* const* a, int64_t at, __m512* acc) {
    constexpr int block = F == Format::nvfp4 ? 16 : 32;
    __m512i sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_set1_epi32(word<int32_t>(a[r] + at + block));
    for (int j = 0; j < block / 4; ++j)
        for (int r = 0; r < R; ++r)
            sum[r] = _mm512_dpbusd_epi32(sum[r], operand[j], _mm512_set1_epi32(word<int32_t>(a[r] + at + j * 4)));
    for (int r = 0; r < R; ++r) {
        const __m512 own = _mm512_set1_ps(word<float>(a[r] + at + block + 4));
        if constexpr (F == Format::nvfp4) {
            const __m512 back = _mm512_set1_ps(word<float>(a[r] + at + block + 8));
            acc[r] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_castsi512_ps(sum[r]), own, back), scale, acc[r]);
        } else {
            acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_mul_ps(own, scale)));
        }
    }
}

// Few rows: decode and use at once.
template <Format F>
struct DirectTile {
    template <int R>
    static void run(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
        constexpr int block = F == Format::nvfp4 ? 16 : 32, groups = block / 16;
        const uint8_t* codes = w.codes + panel * (w.k / 16) * kGroupBytes;
        const uint8_t* scales = w.scales + panel * (w.k / block) * kPanel;
        __m512 acc[R];
        for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
        for (int64_t b = 0; b < w.k / block; ++b) {
            // Past a page the hardware starts anew; the next panel follows this one in memory.
            for (int line = 0; line < 2 * groups; ++line)
                _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + line * 64), _MM_HINT_T0);
            if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(scales + kAhead / 8), _MM_HINT_T0);
            __m512i operand[4 * groups];
            for (int g = 0; g < groups; ++g) decode_group(codes + g * kGroupBytes, operand + 4 * g);
            add_block<F, R>(operand, decode_scale<F>(scales), a, b * activation_block_bytes(block), acc);
            codes += groups * kGroupBytes;
            scales += kPanel;
        }
        const F16 row = load<F16>(w.row_scale + panel * kPanel);
        for (int r = 0; r < R; ++r) finish(w, panel, bits<F16>(acc[r]) * ((row * global[r]) * 0.25f), out[r]);
    }

    static constexpr int64_t kAhead = 4096;
};

// Many rows: a chunk of the inner dimension is decoded once into the cache and used by all tiles of rows.
constexpr int64_t kChunkGroups = 64;  // 16 KiB
constexpr int kTileRows = 8;

template <Format F>
HALFBYTE_INLINE void decode_chunk(const uint8_t* codes, const uint8_t* bytes, int64_t blocks, __m512i* operands, __m512* scales) {
    constexpr int groups = F == Format::nvfp4 ? 1 : 2;
    for (int64_t g = 0; g < blocks * groups; ++g) {
        for (int line = 0; line < 2; ++line)
            _mm_prefetch(reinterpret_cast<const char*>(codes + 8192 + g * kGroupBytes + line * 64), _MM_HINT_T0);
        decode_group(codes + g * kGroupBytes, operands + 4 * g);
    }
    for (int64_t b = 0; b < blocks; ++b) scales[b] = decode_scale<F>(bytes + b * kPanel);
}

template <Format F, int R>
void tile_chunk(const __m512i* operands, const __m512* scales, int64_t blocks, const uint8_t* const* a, int64_t at, __m512* sums) {
    constexpr int block = F == Format::nvfp4 ? 16 : 32;
    __m512 acc[R];
    for (int r = 0; r < R; ++r) acc[r] = sums[r];
    for (int64_t b = 0; b < blocks; ++b)
        add_block<F, R>(operands + b * (block / 4), scales[b], a, at + b * activation_block_bytes(block), acc);
    for (int r = 0; r < R; ++r) sums[r] = acc[r];
}

template <Format F>
void chunked(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    constexpr int64_t block = F == Format::nvfp4 ? 16 : 32, chunk = kChunkGroups * 16 / block;
    const int64_t blocks = w.k / block;
    const Scratch memory((kChunkGroups * 4 + chunk + kRowBlock) * 64);
    __m512i* operands = memory.as<__m512i>();
    __m512* scales = memory.as<__m512>(kChunkGroups * 4 * 64);
    __m512* sums = memory.as<__m512>((kChunkGroups * 4 + chunk) * 64);
    for (int64_t from = 0; from < map.count; from += kRowBlock) {
        const int64_t rows = map.count - from < kRowBlock ? map.count - from : kRowBlock;
        const uint8_t* a[kRowBlock];
        for (int64_t r = 0; r < rows; ++r) a[r] = x.data + map.input(from + r) * x.stride;
        for (int64_t p = first; p < last; ++p) {
            for (int64_t r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
            for (int64_t b = 0; b < blocks; b += chunk) {
                const int64_t count = b + chunk < blocks ? chunk : blocks - b;
                const int64_t at = b * activation_block_bytes(block);
                decode_chunk<F>(w.codes + (p * blocks + b) * (block / 16) * kGroupBytes, w.scales + (p * blocks + b) * kPanel, count,
                                operands, scales);
                int64_t r = 0;
                for (; r + kTileRows <= rows; r += kTileRows) tile_chunk<F, kTileRows>(operands, scales, count, a + r, at, sums + r);
                if (r + 4 <= rows) {
                    tile_chunk<F, 4>(operands, scales, count, a + r, at, sums + r);
                    r += 4;
                }
                if (r + 2 <= rows) {
                    tile_chunk<F, 2>(operands, scales, count, a + r, at, sums + r);
                    r += 2;
                }
                if (r < rows) tile_chunk<F, 1>(operands, scales, count, a + r, at, sums + r);
            }
            const F16 row = load<F16>(w.row_scale + p * kPanel);
            for (int64_t r = 0; r < rows; ++r) {
                const float global = x.global[map.input(from + r)];
                finish(w, p, bits<F16>(sums[r]) * ((row * global) * 0.25f), out + map.output(from + r) * stride);
            }
        }
    }
}

template <Format F>
void product(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    if (map.count <= kTileRows) {
        w4a4_panels<DirectTile<F>, kTileRows>(w, first, last, x, map, out, stride);
    } else {
        chunked<F>(w, first, last, x, map, out, stride);
    }
}

void w4a4(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    if (w.format == Format::nvfp4) {
        product<Format::nvfp4>(w, first, last, x, map, out, stride);
    } else {
        product<Format::mxfp4>(w, first, last, x, map, out, stride);
    }
}

}  // namespace

const LinearTable linear_avx512{w4a4, isa_avx512::dense, isa_avx512::expand<MagicBlock>, isa_avx512::round_bf16};

}  // namespace halfbyte
#endif
