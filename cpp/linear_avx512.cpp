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

// Adds `blocks` blocks of R rows (their codes start at byte `at`) and P panels to sums[r * apart + p]. `source(b)` yields the block's
// operands, 4 vectors of each panel for 16 inputs, then those of the next 16, `source.apart` vectors further, and its scales. A
// row's codes are loaded once for all panels.
template <Format F, int R, int P, class Source>
HALFBYTE_INLINE void add_blocks(Source& source, int64_t blocks, const uint8_t* const* a, int64_t at, __m512* sums, int apart) {
    constexpr int block = F == Format::nvfp4 ? 16 : 32;
    __m512 acc[R][P];
    HALFBYTE_UNROLL
    for (int r = 0; r < R; ++r) {
        HALFBYTE_UNROLL
        for (int p = 0; p < P; ++p) acc[r][p] = sums[r * apart + p];
    }
    for (int64_t b = 0; b < blocks; ++b) {
        source.move_to(b);
        const __m512i* operand = source.operand;
        const __m512* scale = source.scale;
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) {
            const uint8_t* x = a[r] + at;
            __m512i sum[P];
            for (int p = 0; p < P; ++p) sum[p] = _mm512_set1_epi32(word<int32_t>(x + block));
            for (int j = 0; j < block / 4; ++j) {
                const __m512i four = _mm512_set1_epi32(word<int32_t>(x + j * 4));
                for (int p = 0; p < P; ++p)
                    sum[p] = _mm512_dpbusd_epi32(sum[p], operand[j / 4 * Source::apart + p * 4 + j % 4], four);
            }
            const __m512 own = _mm512_set1_ps(word<float>(x + block + 4));
            if constexpr (F == Format::nvfp4) {
                const __m512 back = _mm512_set1_ps(word<float>(x + block + 8));
                for (int p = 0; p < P; ++p)
                    acc[r][p] = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_castsi512_ps(sum[p]), own, back), scale[p], acc[r][p]);
            } else {
                for (int p = 0; p < P; ++p)
                    acc[r][p] = _mm512_add_ps(acc[r][p], _mm512_mul_ps(_mm512_cvtepi32_ps(sum[p]), _mm512_mul_ps(own, scale[p])));
            }
        }
        at += activation_block_bytes(block);
    }
    HALFBYTE_UNROLL
    for (int r = 0; r < R; ++r) {
        HALFBYTE_UNROLL
        for (int p = 0; p < P; ++p) sums[r * apart + p] = acc[r][p];
    }
}

// Few rows: decode and use at once.
template <Format F>
struct DirectSource {
    static constexpr int groups = F == Format::nvfp4 ? 1 : 2, apart = 4;
    static constexpr int64_t ahead = 4096;  // past a page the hardware's prefetcher starts anew; panels follow each other in memory
    const uint8_t *codes, *bytes;
    __m512i operand[4 * groups];
    __m512 scale[1];

    HALFBYTE_INLINE void move_to(int64_t b) {
        for (int line = 0; line < 2 * groups; ++line)
            _mm_prefetch(reinterpret_cast<const char*>(codes + ahead + line * 64), _MM_HINT_T1);
        if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(bytes + ahead / 8), _MM_HINT_T1);
        for (int g = 0; g < groups; ++g) decode_group(codes + g * kGroupBytes, operand + 4 * g);
        scale[0] = decode_scale<F>(bytes);
        codes += groups * kGroupBytes;
        bytes += kPanel;
    }
};

template <Format F>
struct DirectTile {
    template <int R>
    static void run(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
        constexpr int block = F == Format::nvfp4 ? 16 : 32;
        DirectSource<F> source{w.codes + panel * (w.k / 16) * kGroupBytes, w.scales + panel * (w.k / block) * kPanel, {}, {}};
        __m512 sums[R] = {};
        add_blocks<F, R, 1>(source, w.k / block, a, 0, sums, 1);
        const WF row = wide(w.row_scale + panel * kPanel);
        for (int r = 0; r < R; ++r) finish(w, panel, wide(&sums[r]) * ((row * global[r]) * 0.25f), out[r]);
    }
};

// Many rows: a chunk of the inner dimension of four panels is decoded once into the cache and used by all tiles of rows.
constexpr int64_t kChunkGroups = 16, kRowsChunked = 64;
constexpr int kPanelsBeside = 4, kRowsBeside = 4, kDirectRows = 8;

struct Decoded {
    __m512i operands[kChunkGroups][kPanelsBeside][4];
    __m512 scales[kChunkGroups][kPanelsBeside];
    __m512 sums[kRowsChunked][kPanelsBeside];
};

template <Format F>
HALFBYTE_INLINE void decode_chunk(const uint8_t* codes, const uint8_t* bytes, int64_t blocks, int panel, Decoded& to) {
    constexpr int groups = F == Format::nvfp4 ? 1 : 2;
    for (int64_t g = 0; g < blocks * groups; ++g) decode_group(codes + g * kGroupBytes, to.operands[g][panel]);
    for (int64_t b = 0; b < blocks; ++b) to.scales[b][panel] = decode_scale<F>(bytes + b * kPanel);
}

// What a tile of rows fetches from memory while it computes: every `step`-th panel of the chunk that comes next, from panel `first` on.
struct Ahead {
    const uint8_t *codes, *bytes;         // of panel 0
    int64_t codes_apart, bytes_apart;     // from panel to panel
    int first, step;
};

template <Format F, int P>
struct DecodedSource {
    static constexpr int apart = 4 * kPanelsBeside;
    const Decoded& d;
    const Ahead& ahead;
    const __m512i* operand;
    const __m512* scale;

    HALFBYTE_INLINE void move_to(int64_t b) {
        constexpr int groups = F == Format::nvfp4 ? 1 : 2;
        for (int p = ahead.first; p < P; p += ahead.step) {
            const char* codes = reinterpret_cast<const char*>(ahead.codes + p * ahead.codes_apart + b * groups * kGroupBytes);
            for (int line = 0; line < 2 * groups; ++line) _mm_prefetch(codes + line * 64, _MM_HINT_T0);
            if (b % 4 == 0) _mm_prefetch(reinterpret_cast<const char*>(ahead.bytes + p * ahead.bytes_apart + b * kPanel), _MM_HINT_T0);
        }
        operand = d.operands[b * groups][0];
        scale = d.scales[b];
    }
};

template <Format F, int R, int P>
void tile_chunk(Decoded& d, int64_t blocks, const uint8_t* const* a, int64_t at, int64_t row, Ahead& ahead) {
    DecodedSource<F, P> source{d, ahead, nullptr, nullptr};
    add_blocks<F, R, P>(source, blocks, a + row, at, d.sums[row], kPanelsBeside);
    ++ahead.first;
}

// `rows` rows from entry `from` of the map, panels [first, first + P).
template <Format F, int P>
void panels_chunked(const Panels& w, int64_t first, const ActivationRows& x, const RowMap& map, int64_t from, int64_t rows,
                    const uint8_t* const* a, Decoded& d, float* out, int64_t stride) {
    constexpr int64_t block = F == Format::nvfp4 ? 16 : 32, most = kChunkGroups * 16 / block;
    const int64_t blocks = w.k / block, chunks = (blocks + most - 1) / most;
    const int64_t chunk = (blocks + chunks - 1) / chunks;  // of like size: each fetches as much as the next one needs
    for (int64_t r = 0; r < rows; ++r)
        for (int p = 0; p < P; ++p) d.sums[r][p] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; b += chunk) {
        const int64_t count = b + chunk < blocks ? chunk : blocks - b, at = b * activation_block_bytes(block);
        const int64_t here = first * blocks + b, codes_apart = blocks * (block / 16) * kGroupBytes, bytes_apart = blocks * kPanel;
        for (int p = 0; p < P; ++p)
            decode_chunk<F>(w.codes + here * (block / 16) * kGroupBytes + p * codes_apart, w.scales + here * kPanel + p * bytes_apart,
                            count, p, d);
        // The next chunk, or the first one of the panels behind these (a prefetch may point anywhere).
        const int64_t next = b + chunk < blocks ? here + chunk : (first + P) * blocks;
        Ahead ahead{w.codes + next * (block / 16) * kGroupBytes, w.scales + next * kPanel, codes_apart, bytes_apart, 0,
                    static_cast<int>((rows + kRowsBeside - 1) / kRowsBeside)};
        int64_t r = 0;
        for (; r + kRowsBeside <= rows; r += kRowsBeside) tile_chunk<F, kRowsBeside, P>(d, count, a, at, r, ahead);
        if (r + 2 <= rows) {
            tile_chunk<F, 2, P>(d, count, a, at, r, ahead);
            r += 2;
        }
        if (r < rows) tile_chunk<F, 1, P>(d, count, a, at, r, ahead);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const float global = x.global[map.input(from + r)];
        for (int p = 0; p < P; ++p) {
            const WF row = wide(w.row_scale + (first + p) * kPanel);
            finish(w, first + p, wide(&d.sums[r][p]) * ((row * global) * 0.25f), out + map.output(from + r) * stride);
        }
    }
}

template <Format F>
void chunked(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    const Scratch memory(sizeof(Decoded));
    Decoded& d = *memory.as<Decoded>();
    for (int64_t from = 0; from < map.count; from += kRowsChunked) {
        const int64_t rows = map.count - from < kRowsChunked ? map.count - from : kRowsChunked;
        const uint8_t* a[kRowsChunked];
        for (int64_t r = 0; r < rows; ++r) a[r] = x.data + map.input(from + r) * x.stride;
        int64_t p = first;
        for (; p + kPanelsBeside <= last; p += kPanelsBeside)
            panels_chunked<F, kPanelsBeside>(w, p, x, map, from, rows, a, d, out, stride);
        for (; p < last; ++p) panels_chunked<F, 1>(w, p, x, map, from, rows, a, d, out, stride);
    }
}

template <Format F>
void product(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    if (map.count <= kDirectRows) {
        w4a4_panels<DirectTile<F>, kDirectRows>(w, first, last, x, map, out, stride);
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
