// Packed weights. Rows are grouped in panels of 16 outputs (zero rows pad the last one); one panel is contiguous.
//
// FP4 codes, per panel and group of 16 inputs: two runs of 64 bytes. Byte 4r+t of run v holds, for output r, the code of input
// 8v+t in its low nibble and of input 8v+4+t in its high nibble: one 64-byte load yields two operands of a 4-way byte dot product.
// FP4 scales, per panel and block: 16 bytes, one an output. BF16: per pair of inputs, 16 x 2 values. FP32: per input, 16 values.
#pragma once

#include <cstdint>

// Small functions in headers that files of several instruction sets include are always inlined: see dispatch.hpp.
#define HALFBYTE_INLINE inline __attribute__((always_inline))

namespace halfbyte {

enum class Kind : int { fp32 = 0, bf16 = 1, w4a16 = 2, w4a4 = 3 };
enum class Format : int { nvfp4 = 0, mxfp4 = 1 };

constexpr int64_t kPanel = 16;       // outputs in a panel
constexpr int64_t kGroupBytes = 128;  // code bytes of 16 inputs x 16 outputs

// A view of one packed matrix, or of one expert of a stack.
struct Panels {
    Kind kind;
    Format format;
    int64_t n, k;
    const uint8_t* codes;
    const uint8_t* scales;
    const float* row_scale;  // padded to whole panels
    const void* dense;
    const float* bias;  // padded to whole panels, or null

    HALFBYTE_INLINE int64_t panels() const { return (n + kPanel - 1) / kPanel; }
    HALFBYTE_INLINE int64_t block() const { return format == Format::nvfp4 ? 16 : 32; }
    HALFBYTE_INLINE int64_t dense_panel_bytes() const { return kind == Kind::fp32 ? k * kPanel * 4 : (k + 1) / 2 * kPanel * 4; }

    // Expert `e` of a stack of matrices of this shape.
    HALFBYTE_INLINE Panels expert(int64_t e) const {
        Panels p = *this;
        const int64_t first = e * panels();
        if (codes != nullptr) {
            p.codes = codes + first * (k / 16) * kGroupBytes;
            p.scales = scales + first * (k / block()) * kPanel;
            p.row_scale = row_scale + first * kPanel;
        } else {
            p.dense = static_cast<const char*>(dense) + first * dense_panel_bytes();
        }
        return p;
    }
};

}  // namespace halfbyte
