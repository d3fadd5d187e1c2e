#define HALFBYTE_ISA isa_avx2
#if defined(__AVX2__)
#include "linear_lanes.hpp"

namespace halfbyte {
namespace {

using namespace isa_avx2;

// w4a4 with vpmaddubsw: weight codes with 12 added are unsigned, so that 12 times the sum of the activation codes has to be
// taken off again (ActivationRows holds it). A pair sum is at most 2 * 24 * 12, four of them fit 16 bits.
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
        const __m256i table = _mm256_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20,
                                               24, 12, 11, 10, 9, 8, 6, 4, 0);
        const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
        const uint8_t* codes = w.codes + panel * (w.k / 16) * kGroupBytes;
        const uint8_t* scales = w.scales + panel * (w.k / block) * kPanel;
        WF acc[R] = {};
        for (int64_t b = 0; b < w.k / block; ++b) {
            const int64_t at = b * activation_block_bytes(block);
            __m256i sum[R][2];
            HALFBYTE_UNROLL
            for (int r = 0; r < R; ++r) {
                int32_t start;
                std::memcpy(&start, a[r] + at + block, 4);
                sum[r][0] = sum[r][1] = _mm256_set1_epi32(start);
            }
            for (int64_t group = 0; group < block / 16; ++group) {
                const uint8_t* from = codes + (b * (block / 16) + group) * kGroupBytes;
                HALFBYTE_UNROLL
                for (int half = 0; half < 2; ++half) {
                    __m256i operand[4];
                    HALFBYTE_UNROLL
                    for (int run = 0; run < 2; ++run) {
                        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + run * 64 + half * 32));
                        operand[2 * run] = _mm256_shuffle_epi8(table, _mm256_and_si256(v, low));
                        operand[2 * run + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
                    }
                    HALFBYTE_UNROLL
                    for (int r = 0; r < R; ++r) {
                        __m256i pairs = _mm256_setzero_si256();
                        HALFBYTE_UNROLL
                        for (int j = 0; j < 4; ++j) {
                            int32_t four;
                            std::memcpy(&four, a[r] + at + group * 16 + j * 4, 4);
                            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(operand[j], _mm256_set1_epi32(four)));
                        }
                        sum[r][half] = _mm256_add_epi32(sum[r][half], _mm256_madd_epi16(pairs, one));
                    }
                }
            }
            const WF scale = block_scale<F>(scales + b * kPanel);
            HALFBYTE_UNROLL
            for (int r = 0; r < R; ++r) {
                float own;
                std::memcpy(&own, a[r] + at + block + 4, 4);
                const WF dot{{(RF)_mm256_cvtepi32_ps(sum[r][0]), (RF)_mm256_cvtepi32_ps(sum[r][1])}};
                acc[r] = acc[r] + dot * (scale * own);
            }
        }
        const WF row = wide(w.row_scale + panel * kPanel);
        HALFBYTE_UNROLL
        for (int r = 0; r < R; ++r) finish(w, panel, acc[r] * ((row * global[r]) * 0.25f), out[r]);
    }
};

void w4a4(const Panels& w, int64_t first, int64_t last, const ActivationRows& x, const RowMap& map, float* out, int64_t stride) {
    w4a4_panels<ByteTile, 2>(w, first, last, x, map, out, stride);
}

}  // namespace

const LinearTable linear_avx2{w4a4, isa_avx2::dense, isa_avx2::expand<isa_avx2::PlainBlock>, isa_avx2::round_bf16};

}  // namespace halfbyte
#endif
