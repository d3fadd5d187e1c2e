#define HALFBYTE_ISA isa_avx512
#if defined(__AVX512VNNI__)
#include "linear_lanes.hpp"

namespace halfbyte {
namespace {

using namespace isa_avx512;

// w4a4 with vpdpbusd: weight codes with 12 added are unsigned; the accumulator starts at -12 times the sum of the activation
// codes (ActivationRows holds it), so it ends at the exact dot product.
struct ByteTile {
    template <int R>
    static void run(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
        if (w.format == Format::nvfp4) {
            tile<Format::nvfp4, R>(w, panel, a, global, out);
        } else {
            tile<Format::mxfp4, R>(w, panel, a, global, out);
        }
    }

    template <Format F, int R>
    static void tile(const Panels& w, int64_t panel, const uint8_t* const* a, const float* global, float* const* out) {
        constexpr int64_t block = F == Format::nvfp4 ? 16 : 32;
        constexpr int groups = static_cast<int>(block / 16);
        const __m512i table =
            _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m512i low = _mm512_set1_epi8(15);
        const uint8_t* codes = w.codes + panel * (w.k / 16) * kGroupBytes;
        const uint8_t* scales = w.scales + panel * (w.k / block) * kPanel;
        __m512 acc[R];
        for (int r = 0; r < R; ++r) acc[r] = _mm512_setzero_ps();
        int64_t at = 0;
        for (int64_t b = 0; b < w.k / block; ++b) {
            __m512i sum[R];
            for (int r = 0; r < R; ++r) sum[r] = _mm512_set1_epi32(word<int32_t>(a[r] + at + block));
            for (int g = 0; g < groups; ++g) {
                const __m512i u = _mm512_loadu_si512(codes), v = _mm512_loadu_si512(codes + 64);
                codes += kGroupBytes;
                const __m512i operand[4] = {
                    _mm512_shuffle_epi8(table, _mm512_and_si512(u, low)),
                    _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(u, 4), low)),
                    _mm512_shuffle_epi8(table, _mm512_and_si512(v, low)),
                    _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(v, 4), low)),
                };
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < 4; ++j)
                        sum[r] = _mm512_dpbusd_epi32(sum[r], operand[j], _mm512_set1_epi32(word<int32_t>(a[r] + at + g * 16 + j * 4)));
            }
            const __m512 scale = bits<__m512>(block_scale<F>(scales + b * kPanel));
            for (int r = 0; r < R; ++r) {
                const __m512 own = _mm512_set1_ps(word<float>(a[r] + at + block + 4));
                const __m512 dot = _mm512_cvtepi32_ps(sum[r]);
                if constexpr (F == Format::nvfp4) {
                    acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(dot, own), scale, acc[r]);  // exact product: at most 20 bits
                } else {
                    acc[r] = _mm512_add_ps(acc[r], _mm512_mul_ps(dot, _mm512_mul_ps(own, scale)));
                }
            }
            at += activation_block_bytes(block);
        }
        const F16 row = load<F16>(w.row_scale + panel * kPanel);
        for (int r = 0; r < R; ++r) finish(w, panel, bits<F16>(acc[r]) * ((row * global[r]) * 0.25f), out[r]);
    }

    template <class T>
    static HALFBYTE_INLINE T word(const uint8_t* p) {
        T v;
        std::memcpy(&v, p, 4);
        return v;
    }
};

void w4a4(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    w4a4_panels<ByteTile, 8>(w, first, last, x, map, out, stride);
}

}  // namespace

const LinearTable linear_avx512{w4a4, isa_avx512::dense, isa_avx512::expand, isa_avx512::round_bf16};

}  // namespace halfbyte
#endif
